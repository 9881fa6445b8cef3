"""A federation small enough to compute by hand: six clients, ragged data, a model with a head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quiverfl.data.federated import FederatedData
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import split_task
from quiverfl.methods.state import replicated_fields
from quiverfl.runs.run import Run
from quiverfl.runs.simulate import simulate
from quiverfl.seeds import stream
from quiverfl.task import Params, Task
from quiverfl.topologies import (
    Topology,
    isolated,
    participating,
    random_pull,
    random_push,
    random_regular,
    star,
)
from quiverfl.training import Training
from quiverfl.types import Floats

CLIENTS = 6
SIZES = (5, 7, 11, 9, 6, 8)

TRAINING = Training(
    lr=0.1,
    personal_lr=0.05,
    lr_decay=0.99,
    momentum=0.9,
    weight_decay=5e-4,
    batch_size=4,
    clip_norm=1.0,
)


class TinyModel(nn.Module):
    """Six numbers in, three classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def tiny_task() -> Task:
    return Task(model=TinyModel, personal=("head",))


def tiny_data(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> FederatedData:
    """One more test sample than training samples for every client."""
    random = np.random.default_rng(seed)

    def pair(size: int) -> tuple[Any, Any]:
        return random.normal(size=(size, 6)), random.integers(0, 3, size)

    return FederatedData.from_arrays(
        [pair(n) for n in sizes], [pair(n + 1) for n in sizes], classes=3
    )


@dataclass(frozen=True, eq=False)
class Case:
    """A method on the small federation over one topology.

    Every shard and run gets a copy of the method. A method that remembers something outside of
    its states then starts without it, as it would in another process.
    """

    method: Method
    topology: Topology
    training: Training = TRAINING

    def shard(self, clients: Sequence[int] | None = None) -> Shard:
        """All clients or some, before the first round."""
        data = tiny_data() if clients is None else tiny_data().select(clients)
        settings = RunSettings(rounds=3, dtype=torch.float64)
        method = copy.deepcopy(self.method)
        task = split_task(method, tiny_task())
        return Shard(task, data, method, self.training, settings, clients=clients)

    def run(self, rounds: int = 3, **options: Any) -> Run:
        return simulate(
            tiny_task(),
            tiny_data(),
            method=copy.deepcopy(self.method),
            topology=self.topology,
            training=self.training,
            **{"rounds": rounds, "seed": 0, "dtype": torch.float64, "threads": 1, **options},
        )


def training_for(method: Method, training: Training = TRAINING) -> Training:
    """The same settings without those that the method has no use for."""
    usual = Training()
    return replace(training, **{key: getattr(usual, key) for key in method.unused})


def topologies_for(method: Method, state: type | None = None) -> list[Topology]:
    """Graphs that a method must work on, the usual one first.

    `state` is the type of its state; without it the graphs for methods without server state.
    """
    regular = random_regular(clients=CLIENTS, neighbors=2, seed=0)
    pull = random_pull(clients=CLIENTS, neighbors=2, seed=0)
    if method.topology == "isolated":
        return [isolated(clients=CLIENTS), regular]
    if method.mass is not None:
        push = random_push(clients=CLIENTS, neighbors=2, seed=0)
        both = [push, participating(push, fraction=0.5, seed=1)]
        return both if method.delay else [*both, pull]
    if method.topology == "star":
        server = star(clients=CLIENTS, sampled=CLIENTS // 2, seed=0)
        # Copies of server state are equal only where all clients receive the same.
        return [server] if state and replicated_fields(state) else [server, pull]
    return [regular, participating(regular, fraction=0.5, seed=1), pull]


def fields(shard: Shard) -> dict[str, Tensor]:
    """Copies of all fields of all clients' states."""
    return {name: leaf.clone() for name, leaf in shard.state._asdict().items()}


def models(shard: Shard) -> Params:
    """Copies of the models that all clients would use now."""
    return Params(*(part.clone() for part in vmap_clients(shard.method.personal)(shard.state)))


@dataclass(frozen=True)
class Difference:
    """The largest difference between two sets of stacked tensors, and where it is."""

    name: str
    client: int
    size: float

    @classmethod
    def between(cls, first: dict[str, Tensor], second: dict[str, Tensor]) -> Difference:
        """What is not a number differs infinitely."""
        largest = cls("", 0, 0.0)
        for name, leaf in first.items():
            if not leaf.numel():
                continue
            apart = (leaf - second[name]).abs().double().reshape(len(leaf), -1).amax(dim=1)
            apart = torch.nan_to_num(apart, nan=float("inf"))
            client = int(apart.argmax())
            if float(apart[client]) > largest.size:
                largest = cls(name, client, float(apart[client]))
        return largest

    def __str__(self) -> str:
        return f"{self.name!r} differs by {self.size:.2g} at client {self.client}"


# Quadratic losses with a known optimum: the test bed of decentralized optimization.


@dataclass(frozen=True, eq=False)
class Quadratics:
    """Least squares for every client: F_i(w) = mean over its rows of ½ (x·w - y)².

    `optima[i]` minimises F_i, `optimum` minimises their mean. Targets have the shape [n, 1], as a
    linear layer without bias gives them. There is no noise: at its optimum a client's loss is 0.
    """

    data: FederatedData
    optima: Floats
    optimum: Floats


def quadratics(
    clients: int,
    dimension: int = 4,
    samples: int = 16,
    spread: float = 1.0,
    seed: int = 0,
) -> Quadratics:
    """`spread` is how far the clients' optima lie from their common centre."""
    if min(clients, dimension) < 1 or samples < dimension:
        raise QuiverError(
            f"quadratics with {clients} clients, dimension {dimension} and {samples} samples: use "
            "at least one of each, and as many samples as dimensions."
        )
    centre = stream(seed, "quadratics-centre").standard_normal(dimension)
    optima = np.empty((clients, dimension))
    curvature = np.zeros((dimension, dimension))
    pull = np.zeros(dimension)
    pairs: list[tuple[Floats, Floats]] = []
    for client in range(clients):
        generator = stream(seed, "quadratics-client", client)
        optima[client] = centre + spread * generator.standard_normal(dimension)
        x = generator.standard_normal((samples, dimension))
        y = x @ optima[client]
        curvature += x.T @ x
        pull += x.T @ y
        pairs.append((x, y[:, None]))
    data = FederatedData.from_arrays(train=pairs, test=pairs)
    optimum = np.linalg.solve(curvature, pull).astype(np.float64)
    return Quadratics(data, optima, optimum)
