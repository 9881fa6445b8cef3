# ruff: noqa: A005 - as a part of this package it hides nothing
"""Where the time of a round goes: `python -m benchmarks.profile A` (or B, C, F).

Writes what torch.profiler says about operators and what cProfile says about Python's own calls.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.product import Product
from benchmarks.works import WORKS, Work, smaller
from quiverfl import keep_freed_memory

LINES = 25


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.profile", description=__doc__)
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("--quick", action="store_true", help="a quarter of the clients")
    parser.add_argument("--evaluate", action="store_true", help="evaluation in place of a round")
    parser.add_argument("--threads", type=int, default=1, help="of others nothing is seen")
    parser.add_argument("--out", type=Path, default=None, help="default: runs/bench/profile-….txt")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    keep_freed_memory()
    work = smaller(WORKS[wanted.work]) if wanted.quick else WORKS[wanted.work]
    text = summary(work, wanted.evaluate)
    out = wanted.out or Path(f"runs/bench/profile-{wanted.work}.txt")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(text)
    print(f"written to {out}")


def summary(work: Work, evaluate: bool = False) -> str:
    product = Product(work)
    step = product.evaluate if evaluate else product.round
    step()
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        step()
    table = operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=LINES)
    calls = cProfile.Profile()
    calls.runcall(step)
    text = io.StringIO()
    pstats.Stats(calls, stream=text).sort_stats("tottime").print_stats(LINES)
    what = "evaluation" if evaluate else "round"
    title = f"{work.name}: {work.title}; one {what}, {torch.get_num_threads()} threads"
    return f"{title}\n\nOperators (torch.profiler)\n{table}\n\nCalls (cProfile)\n{text.getvalue()}"


if __name__ == "__main__":
    main()
