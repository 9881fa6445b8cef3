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
from quiverfl import DFedPGP, FederatedData, Task, Training, make_model, random_push, simulate
from quiverfl.engine.simulate import SMALL_WORK

INPUTS, CLASSES, SAMPLES, BATCH, CLIENTS = 64, 10, 64, 32, 50
TOGETHER = 25
WIDTHS = (8, 32, 128, 256, 512, 2048)
"""Of the hidden layer: from a step of half a million products to one of a hundred million."""
MOST = 1.15
"""How much slower than one thread the default may be, measurement and all."""


def figures(repeats: int, quick: bool) -> list[Figure]:
    found = []
    with _busy_process():
        for width in WIDTHS[::3] if quick else WIDTHS:
            found += _of_width(width, repeats)
    return found


def _of_width(width: int, repeats: int) -> list[Figure]:
    everything = max(2, torch.get_num_threads())
    contestants = {
        "one": _rounds(width, 1),
        "default": _rounds(width, None),
        "all": _rounds(width, everything),
    }
    seconds = interleaved(contestants, repeats)
    weights = (INPUTS + 1) * width + (width + 1) * CLASSES
    work = weights * BATCH * TOGETHER
    side = "below" if work < SMALL_WORK else "above"
    name = f"{work / 1e6:.1f} million products a step ({side} the threshold)"
    details = {"seconds": seconds, "products": work, "threads": everything}
    return [
        Figure(
            "threads",
            f"default / one thread, {name}",
            ratio(seconds["default"], seconds["one"]),
            "≤",
            MOST,
            details=details,
        ),
        Figure(
            "threads",
            f"{everything} threads / one thread, {name}",
            ratio(seconds["all"], seconds["one"]),
        ),
    ]


def _rounds(width: int, threads: int | None) -> Callable[[], object]:
    random = np.random.default_rng(0)
    pair = (
        random.normal(size=(SAMPLES, INPUTS)).astype(np.float32),
        random.integers(0, CLASSES, SAMPLES),
    )
    data = FederatedData.from_arrays([pair] * CLIENTS, [pair] * CLIENTS)
    task = Task(lambda: make_model("mlp", (INPUTS,), CLASSES, hidden=[width]))
    setup = {
        "method": DFedPGP(personal_epochs=1, shared_epochs=2),
        "topology": random_push(clients=CLIENTS, neighbors=5, seed=0),
        "training": Training(lr=0.05, batch_size=BATCH),
    }
    return lambda: simulate(task, data, rounds=2, seed=0, threads=threads, **setup)


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
