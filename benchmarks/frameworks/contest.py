"""What every contestant's script is told and reports; with the standard library alone.

A script runs inside its framework's own environment, where neither Quiver nor, for some, torch is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CLASSES, BATCH = 10, 128
OPTIMIZER = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
PROCESSES = Path("/proc")


@dataclass(frozen=True)
class Size:
    shape: tuple[int, ...]
    clients: int
    samples: int
    epochs: int


SIZES = {
    "A": Size((64,), clients=100, samples=500, epochs=6),
    "B": Size((3, 32, 32), clients=20, samples=500, epochs=2),
}


def arguments() -> argparse.Namespace:
    """The work, the rounds to time, the threads to use, the clock."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    return parser.parse_args()


def report(version: str, **found: object) -> None:
    """The last line of a script's output."""
    print(json.dumps({"version": version, **found}), flush=True)


def processor_seconds() -> float:
    """Of this process and of all it has started, such as the actors of a runtime."""
    if not PROCESSES.exists():
        return time.process_time()
    tick, total = os.sysconf("SC_CLK_TCK"), time.process_time()
    for fields in _helpers().values():
        total += (
            sum(map(int, fields[11:15])) / tick
        )  # user and system, of it and what it waited for
    return total


def peak_megabytes() -> float:
    """The most this process has held, and what those it started hold now."""
    total = _kilobytes(PROCESSES / "self" / "status", "VmHWM")
    for number in _helpers():
        total += _kilobytes(PROCESSES / number / "smaps_rollup", "Pss")
    return total * 1024 / 1e6


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": processor_seconds}


def _helpers() -> dict[str, list[str]]:
    """Processes that descend from this one, with the fields of `stat` behind the name."""
    fields: dict[str, list[str]] = {}
    for file in PROCESSES.glob("[0-9]*/stat"):
        try:
            fields[file.parent.name] = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
    found: dict[str, list[str]] = {}
    parents = {str(os.getpid())}
    while parents:
        children = {number: rest for number, rest in fields.items() if rest[1] in parents}
        found.update(children)
        parents = set(children)
    return found


def _kilobytes(file: Path, name: str) -> int:
    try:
        numbers = re.findall(rf"^{name}:\s*(\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(numbers[0]) if numbers else 0
