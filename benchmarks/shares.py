"""What a round at medium scale is made of: `python -m benchmarks.shares` (--kernels torch).

DFedPGP with configs/scales/medium.toml on made-up images of CIFAR-10's shape, one thread, in
processor time: the calls are the run's own, each with a clock around it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quiverfl import keep_freed_memory
from quiverfl.data.dataset import Dataset
from quiverfl.engine.history import Callback, Record
from quiverfl.engine.local.examples import Examples
from quiverfl.engine.local.programs import Sequential
from quiverfl.engine.local.step import PhaseSteps
from quiverfl.runs.config_files import configs_folder, load_config
from quiverfl.runs.experiment import run_in_folder

FORWARD, GATHER, OPTIMIZER = "forward, loss and backward", "gathering batches", "optimizer"
CLASSES, TRAIN, TEST = 10, 50_000, 10_000
COUNTED = 5
"""Rounds, from the second on: one of them is evaluated. The last, which always is, comes after."""


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.shares", description=__doc__)
    parser.add_argument("--kernels", choices=["compiled", "torch"], default="compiled")
    kernels = parser.parse_args().kernels
    torch.set_num_threads(1)
    keep_freed_memory()
    spent, rounds = shares(kernels)
    whole = sum(rounds)
    print(f"{whole / len(rounds):.2f} s of processor time a round, kernels = {kernels!r}")
    for name, seconds in spent.items():
        print(f"{name:30s} {100 * seconds / whole:5.1f} %  {seconds / len(rounds):6.3f} s")
    rest = whole - sum(spent.values())
    print(f"{'everything else':30s} {100 * rest / whole:5.1f} %  {rest / len(rounds):6.3f} s")


def shares(kernels: str) -> tuple[dict[str, float], list[float]]:
    """Seconds of all counted rounds by what they went to, and of each round as a whole."""
    clock = Clock()
    bind = Sequential.bind
    Sequential.bind = lambda *given: clock.timed(bind(*given), FORWARD)  # type: ignore[method-assign]
    for owner, name, what in (
        (Sequential, "see", FORWARD),
        (Examples, "_take", GATHER),
        (PhaseSteps, "_descend", OPTIMIZER),
    ):
        setattr(owner, name, clock.timed(getattr(owner, name), what))
    changes = [
        'method.name="dfedpgp"',
        f'model.kernels="{kernels}"',
        "training.lr=0.01",
        "training.personal_lr=0.001",
        f"run.rounds={COUNTED + 2}",
        "run.threads=1",
    ]
    config = load_config(configs_folder() / "scales" / "medium.toml", changes)
    with tempfile.TemporaryDirectory() as folder:
        run_in_folder(config, Path(folder) / "run", clock, images())
    return clock.counted, clock.rounds


class Clock(Callback):
    """Processor time of functions of the engine and of rounds, of those that are counted."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.counted: dict[str, float] = {}
        self.rounds: list[float] = []
        self._begin: float | None = None

    def timed(self, work: Callable[..., Any], what: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begin = time.thread_time()
            result = work(*given, **named)
            taken = time.thread_time() - begin
            self.spent[what] = self.spent.get(what, 0.0) + taken
            return result

        return call

    def on_round_end(self, record: Record) -> None:
        now = time.thread_time()
        if self._begin is None:
            self.spent = {}
        elif len(self.rounds) < COUNTED:
            self.rounds.append(now - self._begin)
            self.counted = dict(self.spent)
        self._begin = now


def images() -> Dataset:
    """As many as CIFAR-10 has; patches of colour that differ by class, and noise."""
    draws = np.random.default_rng(0)
    colours = draws.integers(0, 128, (CLASSES, 3, 4, 4))
    parts = []
    for count in (TRAIN, TEST):
        y = np.arange(count) % CLASSES
        patches = colours[y].repeat(8, axis=2).repeat(8, axis=3)
        x = (patches + draws.integers(0, 128, (count, 3, 32, 32))).astype(np.uint8)
        parts += [x, y.astype(np.int64)]
    return Dataset("made up", *parts, classes=CLASSES, mean=(0.5,) * 3, std=(0.25,) * 3)


if __name__ == "__main__":
    main()
