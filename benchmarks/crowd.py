"""Work T: a tiny model in a large crowd; against batched products, and by the number of clients.

The model is so small that arithmetic is not what a round consists of, unless clients are computed
many at a time. The whole of a run counts where clients are compared: graphs, training, mixing,
evaluation of both stages, the history and a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks import machine
from benchmarks.child import ChildFailed, measure, peak
from benchmarks.clock import CLOCKS, Kind, interleaved
from benchmarks.figures import Figure, ratio
from benchmarks.product import Product
from benchmarks.works import CLASSES, TRAINING, Work
from quiverfl import Callback, keep_freed_memory
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.history import Record
from quiverfl.engine.settings import RunSettings
from quiverfl.models import make_model
from quiverfl.runs.simulate import Simulation

INPUTS, HIDDEN = 20, 38
T = Work(
    "T",
    "MLP 20-38-10 (1,188 parameters), 100,000 clients × 10 samples, DFedPGP 1 + 1 epochs",
    partial(make_model, "mlp", (INPUTS,), CLASSES, hidden=(HIDDEN,)),
    (INPUTS,),
    clients=100_000,
    samples=10,
    test=2,
    personal_epochs=1,
    shared_epochs=1,
)
TOGETHER = 1_000
"""Clients whose products the bare loop computes at once: with it the loop is fastest."""
CROWDS = (10_000, 100_000, 1_000_000)
BYTES = 14_000
"""Of memory that a client takes in all, to know whether there is room to try."""
ROUNDS = 3
PRODUCT_TARGET, TIME_TARGET = 4.0, 1.3


def figures(repeats: int, kind: Kind, threads: int, quick: bool) -> list[Figure]:
    work = replace(T, clients=T.clients // 20) if quick else T
    contestants = {"ours": Product(work).round, "products": bare_products(work)}
    seconds = interleaved(contestants, repeats, kind)
    each = min(seconds["ours"]) / work.clients * 1e6
    name = f"ours / batched products, {work.clients:,} clients"
    value, details = ratio(seconds["ours"], seconds["products"]), {"microseconds_per_client": each}
    first = Figure("T", name, value, "≤", PRODUCT_TARGET, details={**details, "seconds": seconds})
    return [first, *_crowds(CROWDS[:-1] if quick else CROWDS, kind, threads)]


def _crowds(sizes: tuple[int, ...], kind: Kind, threads: int) -> list[Figure]:
    found, small = [], None
    for clients in sizes:
        time, memory = (
            f"whole round per client at {clients:,} / at {sizes[0]:,}",
            f"peak memory, {clients:,} clients",
        )
        try:
            room = machine.available()
            if room is not None and room < clients * BYTES:
                raise ChildFailed(f"{room / 1e9:.0f} GB of memory were free, too few to try")
            child = measure("benchmarks.crowd", clients, kind, threads=threads)
        except ChildFailed as error:
            found.append(Figure("T", time, None, note=str(error)))
            continue
        small = small or child["seconds"]
        if clients != sizes[0]:
            value = child["seconds"] / small
            found.append(Figure("T", time, value, "≤", TIME_TARGET, details=child))
        found.append(Figure("T", memory, child["peak"] / 1e9, unit="GB", details=child))
    return found


def bare_products(work: Work) -> Callable[[], None]:
    """Batched products of the same samples: a step of the heads, one of the bodies, no optimizer.

    Everything is laid out beforehand, and the parameters never change.
    """
    data, model = work.data(), work.model()
    shapes = [leaf.shape for leaf in model.parameters()]
    groups = []
    for begin in range(0, work.clients, TOGETHER):
        count = min(TOGETHER, work.clients - begin)
        rows = slice(begin * work.samples, (begin + count) * work.samples)
        x = data.train.x[rows].reshape(count, work.samples, INPUTS).clone()
        leaves = [torch.randn(count, *shape) * 0.1 for shape in shapes]
        groups.append((x, data.train.y[rows].clone(), leaves))

    def run() -> None:
        for x, y, (w1, b1, w2, b2) in groups:
            with torch.no_grad():
                features = _layer(x, w1, b1).relu()
            _differentiate(features, y, [w2, b2], partial(_head, w2, b2))
            _differentiate(x, y, [w1, b1], partial(_model, w1, b1, w2, b2))

    return run


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def _head(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return _layer(x, weight, bias)


def _model(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, x: Tensor) -> Tensor:
    return _layer(_layer(x, w1, b1).relu(), w2, b2)


def _differentiate(
    x: Tensor, y: Tensor, leaves: list[Tensor], model: Callable[[Tensor], Tensor]
) -> None:
    for leaf in leaves:
        leaf.requires_grad_(True)
    loss = cross_entropy(model(x).flatten(0, 1), y, reduction="sum") / x.shape[1]
    torch.autograd.grad(loss, leaves)
    for leaf in leaves:
        leaf.requires_grad_(False)


class _Watch(Callback):
    """Notes when a round is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.times: list[float] = []
        self._clock = clock

    def on_round_end(self, record: Record) -> None:
        self.times.append(self._clock())


def main() -> None:
    """The measuring process: seconds of a whole round per client, and the peak."""
    parser = argparse.ArgumentParser()
    parser.add_argument("clients", type=int)
    parser.add_argument("clock", choices=tuple(CLOCKS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    wanted = parser.parse_args()
    keep_freed_memory()
    clock = CLOCKS[wanted.clock]
    work, watch = replace(T, clients=wanted.clients), _Watch(clock)
    begin = clock()
    with tempfile.TemporaryDirectory() as folder:

        def save(checkpoint: Checkpoint) -> None:
            checkpoint.save(Path(folder))

        settings = RunSettings(wanted.rounds, keep_local=False, checkpoint_every=wanted.rounds)
        simulation = Simulation(
            work.task(),
            work.data(),
            work.method(),
            work.topology(),
            TRAINING,
            settings.for_clients(wanted.clients),
        )
        simulation.check()
        # As `quiver run` does it: a checkpoint is written from the run's own memory.
        simulation.run(checkpoint=save, callbacks=[watch])
        end = clock()
    seconds = (end - watch.times[0]) / (wanted.rounds - 1) / wanted.clients
    start = watch.times[0] - begin
    print(json.dumps({"seconds": seconds, "start": start, "peak": peak()}))


if __name__ == "__main__":
    main()
