"""Times of several contestants in one process, taken in turns so that noise meets all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

Seconds = dict[str, list[float]]
Kind = Literal["wall", "cpu"]

CLOCKS: dict[Kind, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` with one thread is for a machine that others use at the same time."""


def interleaved(
    contestants: Mapping[str, Callable[[], object]], repeats: int, kind: Kind = "wall"
) -> Seconds:
    """Seconds of every contestant in every repeat, after one round that is not counted.

    One that works in another process returns the seconds it took there.
    """
    clock = CLOCKS[kind]
    seconds: Seconds = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, work in contestants.items():
            begin = clock()
            there = work()
            if repeat:
                seconds[name].append(there if isinstance(there, float) else clock() - begin)
    return seconds
