"""`python -m benchmarks`: measure; `… render`: the table into the documentation; `… frameworks`."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    adapters,
    crowd,
    frameworks,
    machine,
    mixing,
    ranks,
    report,
    scale,
    threads,
    training,
    whole,
)
from benchmarks.figures import Figure
from benchmarks.works import WORKS
from quiverfl import keep_freed_memory

PARTS = ("A", "B", "C", "D", "E", "F", "G", "H", "T", "threads", "run")
REPEATS = {"A": 7, "B": 4, "C": 3, "D": 7, "E": 3, "F": 3, "G": 5, "T": 5, "threads": 3}
RESULT, QUICK_RESULT = Path("runs/bench/result.json"), Path("runs/bench/quick.json")
DOCUMENT = Path("docs/explanation/performance.md")


def main() -> None:
    wanted = _arguments()
    if wanted.command == "render":
        report.render(wanted.out, wanted.document, wanted.mixed)
        print(f"{wanted.document}: table of {wanted.out}")
        return
    torch.set_num_threads(wanted.threads)
    keep_freed_memory()  # as the command `quiver` does; the other contestants gain as well
    about = _about(wanted)
    begin = time.perf_counter()
    for name, part in _parts(wanted).items():
        print(f"{name} …", end=" ", flush=True)
        since = time.perf_counter()
        report.write(wanted.out, part(), about)
        print(f"{time.perf_counter() - since:.0f} s", flush=True)
    report.show(wanted.out, about)
    print(f"{time.perf_counter() - begin:.0f} s, written to {wanted.out}")


def _parts(wanted: argparse.Namespace) -> dict[str, Callable[[], list[Figure]]]:
    """What to measure, by name."""
    kind, count, quick = wanted.clock, wanted.threads, wanted.quick

    def repeats(name: str) -> int:
        return 2 if quick else REPEATS[name]

    def trained(name: str) -> Callable[[], list[Figure]]:
        return lambda: training.figures(WORKS[name], repeats(name), kind, count, quick)

    if wanted.command == "frameworks":
        frameworks.install()
        return {"frameworks": lambda: frameworks.figures(kind, count, quick)}
    parts = {
        **{name: trained(name) for name in ("A", "B", "C")},
        "D": lambda: mixing.figures(repeats("D"), kind, count, quick),
        "E": lambda: scale.figures(repeats("E"), kind, count, quick),
        "F": trained("F"),
        "G": lambda: ranks.figures(repeats("G"), kind, count, quick),
        "H": lambda: adapters.figures(count, quick),
        "T": lambda: crowd.figures(repeats("T"), kind, count, quick),
        "threads": lambda: threads.figures(repeats("threads"), quick),
        "run": lambda: whole.figures(kind, count, quick),
    }
    return {name: part for name, part in parts.items() if name in wanted.only}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("measure", "render", "frameworks"))
    parser.add_argument("--only", type=_only, default=PARTS, help=f"some of {','.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer clients and repeats")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu, with --threads 1: for a machine that others use at the same time",
    )
    parser.add_argument("--out", type=Path, help=f"the JSON file; default {RESULT}")
    parser.add_argument(
        "--mixed", action="store_true", help="render figures of several editions, row by row"
    )
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="what render writes to")
    wanted = parser.parse_args()
    # What is measured quickly never stands beside what was measured in full.
    wanted.out = wanted.out or (QUICK_RESULT if wanted.quick else RESULT)
    return wanted


def _only(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(PARTS)}")
    return names


def _about(wanted: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "threads": wanted.threads,
        "clock": wanted.clock,
        "quick": wanted.quick,
        "load": machine.load(),
    }


if __name__ == "__main__":
    main()
