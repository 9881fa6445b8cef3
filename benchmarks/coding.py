"""Part of work D: an exchange of eight-bit messages against the same exchange of whole ones."""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

from benchmarks.child import ChildFailed, measure
from benchmarks.clock import CLOCKS, Kind, interleaved
from benchmarks.figures import Figure, ratio
from quiverfl import Quantize, keep_freed_memory
from quiverfl.engine.exchange.compression import CompressionStage
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct
from quiverfl.support.environment import use_large_pages
from quiverfl.topologies import random_push

CLIENTS, PARAMETERS, NEIGHBORS = 1_000, 100_000, 10
TIME, BYTES = 1.3, 0.26


def figures(repeats: int, kind: Kind, threads: int, quick: bool) -> list[Figure]:
    parameters = PARAMETERS // 10 if quick else PARAMETERS
    place = f"m = {CLIENTS:,}, d = {parameters:,}"
    name = f"exchange with 8 bits / without, {place}"
    size = Quantize(bits=8).coded_bytes(parameters, 4) / (4 * parameters)
    weight = Figure("D", f"bytes with 8 bits / without, {place}", size, "≤", BYTES)
    try:
        child = measure("benchmarks.coding", parameters, repeats, kind, threads=threads)
    except ChildFailed as error:
        return [Figure("D", name, None, note=str(error)), weight]
    details = {"over": "coded", "under": "whole", "seconds": child}
    found = ratio(child["coded"], child["whole"])
    return [Figure("D", name, found, "≤", TIME, details=details), weight]


def main() -> None:
    """The measuring process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parameters", type=int)
    parser.add_argument("repeats", type=int)
    parser.add_argument("kind", choices=list(CLOCKS))
    wanted = parser.parse_args()
    keep_freed_memory()
    graph = random_push(CLIENTS, NEIGHBORS)(0)
    leaf = use_large_pages(torch.empty(CLIENTS, wanted.parameters)).uniform_(-1, 1)
    mass = torch.ones(CLIENTS, dtype=torch.float64)

    def exchanged(through: Exchange) -> None:
        through.push(0, graph, {"u": leaf, "mu": mass.clone()})
        through.collect(0)

    every = np.arange(CLIENTS)
    core = MatrixProduct()
    stage = CompressionStage(core, Quantize(bits=8), 0, every, "mu", False, fused=True)
    coded, whole = Exchange(core, [stage]), Exchange(MatrixProduct())
    contestants = {"coded": lambda: exchanged(coded), "whole": lambda: exchanged(whole)}
    print(json.dumps(interleaved(contestants, wanted.repeats, wanted.kind)))


if __name__ == "__main__":
    main()
