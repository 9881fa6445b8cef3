"""A federation small enough to compute by hand: six clients, ragged data, a model with a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import quiverfl as qv
from quiverfl.topologies import Topology

CLIENTS = 6
SIZES = (5, 7, 11, 9, 6, 8)


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def tiny_task() -> qv.Task:
    return qv.Task(model=TinyModel, personal=("head",))


def tiny_data(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> qv.FederatedData:
    random = np.random.default_rng(seed)

    def pair(size: int) -> tuple[Any, Any]:
        return random.normal(size=(size, 6)), random.integers(0, 3, size)

    return qv.FederatedData.from_arrays(
        [pair(n) for n in sizes], [pair(n + 1) for n in sizes], classes=3
    )


TRAINING = qv.Training(
    lr=0.1,
    personal_lr=0.05,
    lr_decay=0.99,
    momentum=0.9,
    weight_decay=5e-4,
    batch_size=4,
    clip_norm=1.0,
)

Graphs = Callable[[int], Topology]

STAR: Graphs = lambda m: qv.star(clients=m, sampled=max(1, m // 2), seed=0)  # noqa: E731
REGULAR: Graphs = lambda m: qv.random_regular(clients=m, neighbors=2, seed=0)  # noqa: E731
PULL: Graphs = lambda m: qv.random_pull(clients=m, neighbors=2, seed=0)  # noqa: E731
PUSH: Graphs = lambda m: qv.random_push(clients=m, neighbors=2, seed=0)  # noqa: E731
AWAY: Graphs = lambda m: qv.participating(PUSH(m), fraction=0.5, seed=1)  # noqa: E731
SOME: Graphs = lambda m: qv.participating(REGULAR(m), fraction=0.5, seed=1)  # noqa: E731

METHODS: list[tuple[Any, list[Graphs]]] = [
    (qv.Local(epochs=2), [lambda m: qv.isolated(clients=m), SOME]),
    (qv.FedAvg(epochs=2), [STAR, PULL]),
    (qv.FedAvg(epochs=2, weighting="uniform"), [STAR]),
    (qv.FedPer(epochs=2), [STAR, PULL]),
    (qv.FedRep(personal_epochs=2, shared_epochs=1), [STAR, PULL]),
    (qv.FedBABU(epochs=2, finetune_epochs=1), [STAR, PULL]),
    (qv.Ditto(epochs=1, personal_epochs=2), [STAR, PULL]),
    (qv.DFedAvgM(epochs=2), [REGULAR, SOME]),
    (qv.DFedAvgMP(shared_epochs=2), [REGULAR, SOME]),
    (qv.DFedAvgMP(shared_epochs=2, alternating=False), [REGULAR]),
    (qv.OSGP(epochs=2), [PUSH, PULL, AWAY]),
    (qv.OSGP(epochs=2, delay=2), [PUSH, AWAY]),
    (qv.DisPFL(epochs=1), [REGULAR, SOME]),
    (qv.DisPFL(epochs=1, regrow="gradient"), [REGULAR]),
    (qv.DFedPGP(shared_epochs=2), [PUSH, PULL, AWAY]),
    (qv.FedProx(epochs=2, proximal=0.2), [STAR, PULL]),
    (qv.SCAFFOLD(epochs=2), [STAR, SOME]),
    (qv.MOON(epochs=1), [STAR, PULL]),
    (qv.FedProto(epochs=1), [STAR, SOME]),
    (qv.APFL(epochs=2), [STAR, PULL]),
    (qv.APFL(epochs=1, adaptive=False), [STAR]),
    (qv.PFedMe(steps=4, inner_steps=2, proximal=2.0), [STAR, PULL]),
    (qv.PerFedAvg(epochs=2, inner_lr=0.1), [STAR, PULL]),
    (qv.DFedSAM(epochs=2), [REGULAR, SOME]),
    (qv.DFedPGPSAM(shared_epochs=2), [PUSH, PULL, AWAY]),
    (qv.PushDIGing(), [PUSH, AWAY]),
]
"""One row per method: a new method is a row here, and every law below is tried on it."""


def simulate(method: Any, topology: Topology, **options: Any) -> qv.Run:
    settings: dict[str, Any] = {
        "training": TRAINING,
        "rounds": 3,
        "seed": 0,
        "dtype": torch.float64,
        "threads": 1,
    }
    return qv.simulate(
        tiny_task(), tiny_data(), method=method, topology=topology, **{**settings, **options}
    )


def states(run: qv.Run) -> list[torch.Tensor]:
    """Every field of every client, stacked, as copies."""
    return [leaf.clone() for leaf in run._shard.state]


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a.numel())
