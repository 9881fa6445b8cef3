"""`python -m benchmarks.against CHECKOUT`: this tree's times over another checkout's, in turns.

Two processes are alive at a time and one of them works at a time, so that whatever the machine does
meanwhile meets both alike. Printed: the median over the pairs of this tree's time over the other's.
Meant for "before and after": `git worktree add ../before v0.1.0`, then name that folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]

PAIRS = {
    "A round": 20,
    "A evaluate": 60,
    "B round": 6,
    "B evaluate": 15,
    "C round": 8,
    "C evaluate": 40,
    "D 100 11200000": 12,
    "D 1000 60000": 60,
    "D 10000 10000": 40,
    "F round": 4,
}

CHILD = """
import sys, time
import torch
from benchmarks.product import Product
from benchmarks.works import WORKS
from quiverfl import keep_freed_memory
try:
    from quiverfl.engine.exchange.matrix import mix
except ImportError:  # a checkout from before the rooms
    from quiverfl.engine.mixing import mix
from quiverfl.topologies import random_push

def prepared(what):
    name, *rest = what.split()
    if name == "D":
        clients, size = map(int, rest)
        graph, leaf = random_push(clients, neighbors=10, seed=0)(0), torch.randn(clients, size)
        return lambda: mix(graph, leaf)
    return getattr(Product(WORKS[name]), rest[0])

keep_freed_memory()
work = prepared(sys.argv[1])
clock = time.process_time if sys.argv[2] == "cpu" else time.perf_counter
work()
for _ in sys.stdin:
    begin = clock()
    work()
    print(clock() - begin, flush=True)
"""
"""Runs in either tree, so it uses only what both have: their benchmarks, mixing and topologies."""


class Tree:
    """One checkout's process, which does one piece of work each time it is asked."""

    def __init__(self, root: Path, what: str, threads: int, clock: str) -> None:
        paths = os.pathsep.join((str(root / "src"), str(root)))
        count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, what, clock],
            cwd=root,
            env={**os.environ, **count, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"the process in {self._process.args} ended with {self._process.wait()}")
        return float(answer)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def ratios(what: str, other: Path, pairs: int, threads: int, clock: str) -> list[float]:
    """This tree's seconds over the other's; who begins alternates."""
    trees = {root: Tree(root, what, threads, clock) for root in (other, HERE)}
    for tree in trees.values():
        tree.seconds()
    found = []
    for number in range(pairs):
        order = (other, HERE) if number % 2 else (HERE, other)
        seconds = {root: trees[root].seconds() for root in order}
        found.append(seconds[HERE] / seconds[other])
    for tree in trees.values():
        tree.end()
    return found


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.against", description=__doc__)
    parser.add_argument("other", type=Path, help="another checkout of this repository")
    parser.add_argument("--only", default="A,B,C,D,F", help="works, comma-separated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    wanted = parser.parse_args()
    other = wanted.other.resolve()
    if not (other / "benchmarks" / "product.py").exists():
        sys.exit(f"{other} has no benchmarks/product.py: name a checkout of this repository.")
    print("| work | this / other, median | quartiles | pairs |\n|---|---|---|---|")
    for what, pairs in PAIRS.items():
        if what.split()[0] in wanted.only.split(","):
            found = ratios(what, other, pairs, wanted.threads, wanted.clock)
            low, middle, high = statistics.quantiles(found, n=4)
            print(f"| {what} | {middle:.2f} | {low:.2f} – {high:.2f} | {pairs} |", flush=True)


if __name__ == "__main__":
    main()
