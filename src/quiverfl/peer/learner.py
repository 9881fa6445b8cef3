"""What a peer trains, seen from the network: a message, a mass, and a rest that never leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.methods.state import roles
from quiverfl.peer.manifest import Array, Leaves, Manifest
from quiverfl.task import Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology


class Learner(Protocol):
    """One client's training. Called from one thread only, never from the event loop."""

    @property
    def manifest(self) -> Manifest: ...
    def train(self, round: int, active: bool, share: float) -> None:
        """`share` of all peers train in this round."""

    def message(self) -> Leaves:
        """What is pushed, without the mass; a copy."""

    def rest(self) -> Leaves:
        """Everything else that must survive a restart; a copy."""

    def merge(self, message: Mapping[str, Array], mass: float) -> None: ...
    def restore(self, rest: Mapping[str, Array]) -> None: ...
    def amend(self, lr: float | None, rounds: int) -> None:
        """The run was changed: it has so many rounds, and this learning rate if one is given."""

    def evaluate(self, round: int, stage: str) -> dict[str, float]: ...
    def model(self) -> Leaves:
        """The personal model, by parameter name."""


class ShardLearner:
    """A shard of one client behind the Learner's face: the same method objects as in simulation."""

    def __init__(self, shard: Shard, task: Task, method: Method) -> None:
        self._shard, self._task, self._mass = shard, task, method.mass
        outbox = shard.outbox()
        if outbox and method.mass not in outbox:
            raise QuiverError(
                f"method {method.name!r} carries no push-sum mass, which is what peers account "
                "for: use dfedpgp, osgp or local."
            )
        self._carries = bool(outbox)
        self.manifest = Manifest.of(self.message(), self._parameters())

    def _parameters(self) -> list[tuple[str, tuple[int, ...]]]:
        """The names and shapes inside the leaves, so that peers with other models do not talk."""
        layouts = {"shared": self._task.shared_layout, "personal": self._task.personal_layout}
        kinds = roles(type(self._shard.state))
        found: list[tuple[str, tuple[int, ...]]] = []
        for name, leaf in sorted(self.message().items()):
            layout = layouts.get(kinds.get(name, "any"))
            if layout is None:
                found.append((name, leaf.shape))
            else:
                parts = zip(layout.names, layout.shapes, strict=True)
                found += [(f"{name}.{part}", shape) for part, shape in parts]
        return found

    def train(self, round: int, active: bool, share: float) -> None:
        self._shard.train(round, np.array([active]), share=share)

    def message(self) -> Leaves:
        outbox = self._shard.outbox()
        return {name: _copied(leaf[0]) for name, leaf in outbox.items() if name != self._mass}

    def rest(self) -> Leaves:
        sent = {*self.message(), self._mass} if self._carries else set()
        fields = self._shard.state._asdict()
        return {name: _copied(leaf[0]) for name, leaf in fields.items() if name not in sent}

    def merge(self, message: Mapping[str, Array], mass: float) -> None:
        mixed = {name: torch.from_numpy(np.array(leaf))[None] for name, leaf in message.items()}
        if self._carries:
            assert self._mass is not None
            mixed[self._mass] = torch.tensor([mass], dtype=torch.float64)
        self._shard.deliver(mixed)

    def restore(self, rest: Mapping[str, Array]) -> None:
        fields = {name: torch.from_numpy(np.array(leaf))[None] for name, leaf in rest.items()}
        for name, leaf in fields.items():
            here = getattr(self._shard.state, name, None)
            if here is None or here.shape != leaf.shape:
                raise QuiverError(
                    "the model has another size than the one in the store: the data has other "
                    "classes or columns than before, or the model has changed. Put them back, or "
                    "start a new folder."
                )
        self._shard.state = self._shard.state._replace(**fields)

    def amend(self, lr: float | None, rounds: int) -> None:
        context = self._shard.context
        context.rounds = rounds
        if lr is not None:
            context.training = replace(context.training, lr=lr)

    def evaluate(self, round: int, stage: str) -> dict[str, float]:
        metrics = self._shard.evaluate(round, stage)
        return {name: float(values[0]) for name, values in metrics.items()}

    def model(self) -> Leaves:
        point = self._shard.model(0, "mixed")
        return {name: _copied(leaf) for name, leaf in self._task.named(point).items()}


def _copied(leaf: torch.Tensor) -> Array:
    copy: Array = leaf.detach().cpu().numpy().copy()
    return copy


def column(graph: Graph, names: list[str], me: int) -> dict[str, float]:
    """Whom this peer pushes to and with which weight, itself included."""
    if not graph.column_stochastic:
        raise QuiverError(
            "peers need a topology whose columns sum to 1 (each splits its own mass): random_push, "
            "random_regular, ring, exponential or another push topology."
        )
    links = graph.sparse.tocoo()
    mine = (links.col == me) & (links.data > 0)
    return {
        names[int(row)]: float(weight)
        for row, weight in zip(links.row[mine], links.data[mine], strict=True)
    }


def mutual_neighbours(topology: Topology, names: list[str], me: int) -> set[str]:
    """Who pushes to this peer and gets from it, in the first rounds of the graph."""
    gives: set[str] = set()
    gets: set[str] = set()
    for round in range(min(256, max(64, 8 * len(names)))):
        graph = topology(round)
        gives |= expected_senders(graph, names, me)
        gets |= set(column(graph, names, me))
    return gives & gets


def expected_senders(graph: Graph, names: list[str], me: int) -> set[str]:
    """Who pushes to this peer in a round."""
    links = graph.sparse.tocoo()
    here = (links.row == me) & (links.col != me) & (links.data > 0)
    return {names[int(sender)] for sender in links.col[here]}
