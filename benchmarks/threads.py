"""Threads by default, beside a second busy process: is one thread, or are all, the better choice?

Threads that wait for each other do so busily. Alone that is quick; beside another process they wait
for one that does not run. So a step that is small must be computed by one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from benchmarks.clock import interleaved
from benchmarks.figures import Figure, ratio
from quiverfl import DFedAvgM, FederatedData, Task, Training, make_model, random_regular, simulate
from quiverfl.runs.simulate import SMALL_WORK

INPUTS, CLASSES, SAMPLES, BATCH, CLIENTS = 64, 10, 64, 32, 25
WIDTHS = (8, 32, 128, 512, 2048)
"""Of the hidden layer: from a step of half a million products to one of a hundred million."""
MOST = 1.15
"""How much slower than the other choice the default may be, measurement and all."""


def figures(repeats: int, quick: bool) -> list[Figure]:
    with _busy_process():
        widths = WIDTHS[1::3] if quick else WIDTHS
        return [_of_width(width, 1 if quick else repeats) for width in widths]


def _of_width(width: int, repeats: int) -> Figure:
    everything = max(2, torch.get_num_threads())
    contestants = {"one": _training(width, 1), "all": _training(width, everything)}
    seconds = interleaved(contestants, repeats)
    weights = (INPUTS + 1) * width + (width + 1) * CLASSES
    work = weights * BATCH * CLIENTS
    chosen, other = ("one", "all") if work < SMALL_WORK else ("all", "one")
    words = {"one": "one thread", "all": f"{everything} threads"}
    return Figure(
        "threads",
        f"{words[chosen]}, the default, / {words[other]}: {work / 1e6:.1f} million products a step",
        ratio(seconds[chosen], seconds[other]),
        "≤",
        MOST,
        details={"seconds": seconds, "products": work, "threads": everything},
    )


def _training(width: int, threads: int) -> Callable[[], float]:
    """Seconds of training in two rounds after the first."""
    random = np.random.default_rng(0)
    pair = (
        random.normal(size=(SAMPLES, INPUTS)).astype(np.float32),
        random.integers(0, CLASSES, SAMPLES),
    )
    data = FederatedData.from_arrays([pair] * CLIENTS, [pair] * CLIENTS)
    task = Task(lambda: make_model("mlp", (INPUTS,), CLASSES, hidden=[width]))

    def seconds() -> float:
        run = simulate(
            task,
            data,
            method=DFedAvgM(epochs=2),
            topology=random_regular(clients=CLIENTS, neighbors=4, seed=0),
            training=Training(lr=0.05, batch_size=BATCH),
            rounds=3,
            evaluate_every=3,
            threads=threads,
        )
        return float(run.rounds["train_seconds"].iloc[1:].sum())

    return seconds


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
