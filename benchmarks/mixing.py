"""Work D: mixing alone against a memory copy of the same array, and the memory it takes."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch

from benchmarks import coding
from benchmarks.child import ChildFailed, measure, peak
from benchmarks.clock import CLOCKS, Kind, interleaved
from benchmarks.figures import Figure, ratio
from benchmarks.machine import available
from quiverfl import keep_freed_memory
from quiverfl.engine.exchange.matrix import mix
from quiverfl.support.environment import use_large_pages
from quiverfl.topologies import random_push

NEIGHBORS = 10
EXTRA_MEMORY = 50.0
MEGABYTE = 1e6


@dataclass(frozen=True)
class Size:
    clients: int
    parameters: int
    target: float

    @property
    def name(self) -> str:
        return f"m = {self.clients:,}, d = {self.parameters:,}"

    @property
    def bytes(self) -> int:
        return self.clients * self.parameters * 4


SIZES = (Size(100, 11_200_000, 3.0), Size(1_000, 60_000, 3.5), Size(10_000, 10_000, 4.5))


def figures(repeats: int, kind: Kind, threads: int, quick: bool) -> list[Figure]:
    """A ratio of times and an extra memory for every size."""
    found = []
    for size in SIZES:
        # Every size is larger than any cache; a tenth of the largest one still is.
        parameters = size.parameters // 10 if quick and size.clients == 100 else size.parameters
        found += _measured(Size(size.clients, parameters, size.target), repeats, kind, threads)
    return [*found, *coding.figures(repeats, kind, threads, quick)]


def _measured(size: Size, repeats: int, kind: Kind, threads: int) -> list[Figure]:
    names = f"mixing / memory copy, {size.name}", f"extra memory of mixing, {size.name}"
    free = available()
    if free is not None and free < 2.2 * size.bytes:
        why = f"needs {2.2 * size.bytes / 1e9:.1f} GB of free memory, {free / 1e9:.1f} GB are there"
        return [Figure("D", name, None, note=why) for name in names]
    try:
        child = measure(
            "benchmarks.mixing", size.clients, size.parameters, repeats, kind, threads=threads
        )
    except ChildFailed as error:
        return [Figure("D", name, None, note=str(error)) for name in names]
    seconds = child["seconds"]
    return [
        Figure(
            "D",
            names[0],
            ratio(seconds["ours"], seconds["copy"]),
            "≤",
            size.target,
            details={"over": "ours", "under": "copy", "seconds": seconds},
        ),
        Figure("D", names[1], child["extra"] / MEGABYTE, "≤", EXTRA_MEMORY, unit="MB"),
    ]


def main() -> None:
    """The measuring process: first the memory, while nothing else has raised the peak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", type=int)
    parser.add_argument("parameters", type=int)
    parser.add_argument("repeats", type=int)
    parser.add_argument("kind", choices=list(CLOCKS))
    wanted = parser.parse_args()
    keep_freed_memory()
    graph = random_push(wanted.clients, NEIGHBORS)(0)
    mix(graph, torch.ones(wanted.clients, 8))  # what a first product loads is not its memory
    leaf = use_large_pages(torch.empty(wanted.clients, wanted.parameters)).uniform_(-1, 1)
    before = peak()
    mix(graph, leaf)
    extra = peak() - before
    other = use_large_pages(torch.empty_like(leaf)).zero_()
    contestants = {"ours": lambda: mix(graph, leaf), "copy": lambda: other.copy_(leaf)}
    seconds = interleaved(contestants, wanted.repeats, wanted.kind)
    print(json.dumps({"extra": extra, "seconds": seconds}))


if __name__ == "__main__":
    main()
