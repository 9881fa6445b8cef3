"""Work G: the rounds of A and B on two ranks against one process, and mixing between ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.child import ChildFailed, Worker, environment, serve
from benchmarks.clock import CLOCKS, Kind, interleaved
from benchmarks.figures import Figure, ratio
from benchmarks.product import Product
from benchmarks.works import TRAINING, WORKS, Work, smaller
from quiverfl import keep_freed_memory
from quiverfl.distributed.columns import Columns
from quiverfl.distributed.processes import STORE
from quiverfl.distributed.ranks import Placement, Ranks
from quiverfl.distributed.simulation import federation_of
from quiverfl.distributed.world import RankWorld
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct, mix
from quiverfl.engine.rounds import exchange_messages
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.support.environment import use_large_pages
from quiverfl.topologies import random_push

RANKS = 2
CLIENTS, PARAMETERS, NEIGHBORS = 1_000, 100_000, 10
ROUND_TARGET, MIXING_TARGET = 1.15, 5.0


def figures(repeats: int, kind: Kind, threads: int, quick: bool) -> list[Figure]:
    found = [_rounds(name, repeats, kind, threads, quick) for name in ("A", "B")]
    return [*found, _mixing(repeats, quick)]


def _rounds(name: str, repeats: int, kind: Kind, threads: int, quick: bool) -> Figure:
    each = max(1, threads // RANKS)
    title = f"round of {name}, {RANKS} ranks × {each} thread / one process × {threads}"
    return _figure(title, ROUND_TARGET, repeats, (name, kind, int(quick)), threads, each)


def _mixing(repeats: int, quick: bool) -> Figure:
    """Processor time, as the network is the machine's own memory here."""
    parameters = PARAMETERS // 10 if quick else PARAMETERS
    title = f"mixing between {RANKS} ranks / in memory, m = {CLIENTS:,}, d = {parameters:,}, cpu"
    return _figure(title, MIXING_TARGET, repeats, ("mixing", "cpu", parameters), 1, 1)


def _figure(
    title: str, target: float, repeats: int, what: tuple[object, ...], threads: int, each: int
) -> Figure:
    module = "benchmarks.ranks"
    try:
        with (
            Worker(module, 1, *what, threads=threads) as one,
            Worker(module, RANKS, *what, threads=each) as several,
        ):
            seconds = interleaved({"one": one, "ranks": several}, repeats)
    except ChildFailed as error:
        return Figure("G", title, None, note=str(error))
    details = {"over": "ranks", "under": "one", "seconds": seconds}
    return Figure("G", title, ratio(seconds["ranks"], seconds["one"]), "≤", target, details=details)


def main() -> None:
    """A contestant: one process, or rank 0, which starts the others and has them follow."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("work")
    parser.add_argument("kind", choices=list(CLOCKS))
    parser.add_argument("size", type=int)
    wanted = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if wanted.ranks == 1:
        serve(_alone(wanted.work, wanted.size), CLOCKS[wanted.kind])
        return
    with tempfile.TemporaryDirectory() as place:
        others = [] if "RANK" in os.environ else _others(wanted.ranks, Path(place))
        with Ranks.join() as ranks:
            _follow(ranks, _shared(ranks, wanted.work, wanted.size), wanted.kind)
        for process in others:
            process.wait()


def _others(count: int, place: Path) -> list[subprocess.Popen[bytes]]:
    common = {"WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo", STORE: str(place / "store")}
    os.environ.update({**common, "RANK": "0"})
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", *sys.argv[1:]],
            env={**environment(torch.get_num_threads()), "RANK": str(rank)},
            stdin=subprocess.DEVNULL,
        )
        for rank in range(1, count)
    ]


def _follow(ranks: Ranks, work: Callable[[], object], kind: Kind) -> None:
    """Rank 0 hears lines and has all work; the seconds are its own, or everybody's processors'."""

    def together() -> float:
        begin = CLOCKS[kind]()
        work()
        spent = torch.tensor([CLOCKS[kind]() - begin], dtype=torch.float64)
        every = ranks.total(spent)  # also waits for the slowest
        return float(every) if kind == "cpu" else CLOCKS[kind]() - begin

    if ranks.rank > 0:
        while ranks.from_first(None):
            together()
        return
    for _ in sys.stdin:
        ranks.from_first(True)
        print(together(), flush=True)
    ranks.from_first(False)


def _alone(work: str, size: int) -> Callable[[], object]:
    if work == "mixing":
        graph = random_push(CLIENTS, NEIGHBORS)(0)
        leaf = _leaf(CLIENTS, size)
        return lambda: mix(graph, leaf)
    return Product(_sized(work, size)).round


def _shared(ranks: Ranks, work: str, size: int) -> Callable[[], object]:
    if work == "mixing":
        placement = Placement.balance(np.ones(CLIENTS), ranks.size)
        graph, columns = random_push(CLIENTS, NEIGHBORS)(0), Columns(ranks, placement)
        leaf = _leaf(placement.counts[ranks.rank], size)
        return lambda: columns.mix(graph, leaf)
    return _Part(ranks, _sized(work, size)).round


def _leaf(rows: int, columns: int) -> torch.Tensor:
    return use_large_pages(torch.empty(rows, columns)).uniform_(-1, 1)


def _sized(name: str, quick: int) -> Work:
    return smaller(WORKS[name]) if quick else WORKS[name]


class _Part:
    """One rank's clients of a work, as `Product` is all of them."""

    def __init__(self, ranks: Ranks, work: Work) -> None:
        data, settings, method = work.data(), RunSettings(1_000), work.method()
        federation = federation_of(data.train.sizes, data.test.sizes, settings, ranks.size)
        world = RankWorld(ranks, federation)
        here = world.ids.tolist()
        self.shard = Shard(
            work.task(), data.select(here), method, TRAINING, settings, clients=here, world=world
        )
        self._exchange = Exchange(MatrixProduct(method.delay, world.columns.mix, self.shard.ids))
        self._topology, self._round = work.topology(), 0

    def round(self) -> None:
        graph = self._topology(self._round)
        self.shard.train(self._round, graph.active)
        exchange_messages(self.shard, self._exchange, graph, self._round)
        self._round += 1


if __name__ == "__main__":
    main()
