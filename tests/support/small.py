"""The small federation of the laws, and the methods of the package with graphs for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import quiverfl as qv
from quiverfl.laws.problem import CLIENTS, SIZES, TRAINING, TinyModel, tiny_data, tiny_task
from quiverfl.topologies import Topology

__all__ = ["CLIENTS", "SIZES", "TRAINING", "TinyModel", "tiny_data", "tiny_task"]

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
    (qv.OSGP(epochs=2, step="debiased"), [PUSH]),
    (qv.DisPFL(epochs=1), [REGULAR, SOME]),
    (qv.DisPFL(epochs=1, regrow="gradient"), [REGULAR]),
    (qv.DFedPGP(shared_epochs=2), [PUSH, PULL, AWAY]),
    (qv.DFedPGP(shared_epochs=2, step="debiased"), [PUSH, AWAY]),
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
    (qv.DFedSalt(shared_epochs=2), [REGULAR]),
    (qv.DFedSGPSM(epochs=2), [PUSH, AWAY]),
    (qv.DePRL(personal_steps=2), [REGULAR]),
    (qv.KGT(epochs=2, mixing_lr=0.8), [REGULAR, SOME]),
    (qv.FedALA(epochs=2), [STAR]),
    (qv.FedDBE(epochs=1, mean_weight=2.0), [STAR, SOME]),
    (qv.FedRoD(epochs=1), [STAR]),
    (qv.FedAS(epochs=1), [STAR, SOME]),
    (qv.ScaffoldP(epochs=2), [STAR, SOME]),
    (qv.FedBN(epochs=2), [STAR]),
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
    task = normed_task() if method.name == "fedbn" else tiny_task()
    return qv.simulate(
        task, tiny_data(), method=method, topology=topology, **{**settings, **options}
    )


def states(run: qv.Run) -> list[torch.Tensor]:
    """Every field of every client, stacked, as copies."""
    return [leaf.clone() for leaf in run._shard.state]


def distance(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True) if a.numel())


class TinyNormed(torch.nn.Module):
    """Six numbers in as two channels of three, BatchNorm, three classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(6, 6),
            torch.nn.Unflatten(1, (2, 3)),
            torch.nn.BatchNorm1d(2),
            torch.nn.Tanh(),
            torch.nn.Flatten(),
        )
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x))
        return logits


def normed_task(**options: Any) -> qv.Task:
    return qv.Task(TinyNormed, **options)
