"""The clients of one rank, as the round loop knows a shard: asked and answering for all clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.distributed.columns import Columns
from quiverfl.distributed.measures import Measures
from quiverfl.distributed.placement import Placement
from quiverfl.distributed.ranks import Ranks
from quiverfl.engine.context import ClientGroup, Company
from quiverfl.engine.evaluation import Metrics
from quiverfl.engine.execution import Measured
from quiverfl.engine.history import Record
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.methods.contract import Message, Method
from quiverfl.task import Task
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.view import Looks, View
from quiverfl.training import Training
from quiverfl.transforms.privacy import DPSGD, check_budget

Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Federation:
    """What every rank knows of all clients."""

    placement: Placement
    train: Integers
    """How many training examples each client has."""
    test: Integers
    epochs: Integers | None
    """Each client's own, where they are not the method's."""

    def company(self, clients: Integers) -> Company:
        epochs = None if self.epochs is None else self.epochs[clients]
        return Company(self.train[clients], self.test[clients], epochs)


class RankShard(Shard):
    """Rows of state, buffers and kept models are this rank's; flags, steps, bytes and metrics that
    the round loop gives and takes are those of all clients, the same on every rank.

    Groups are those that one process would form: of each, a rank computes the clients it has, as
    wide as the whole group. What fails on one rank fails on all.
    """

    def __init__(
        self,
        task: Task,
        data: FederatedData,
        method: Method,
        training: Training,
        settings: RunSettings,
        federation: Federation,
        ranks: Ranks,
        looks: Looks | None = None,
        private: DPSGD | None = None,
        measured: Measured | None = None,
    ) -> None:
        """`data` is that of this rank's clients alone."""
        here = federation.placement.on(ranks.rank)
        epochs = settings.epochs_per_client
        own = None if epochs is None else tuple(epochs[client] for client in here)
        self._federation, self._ranks = federation, ranks
        self._chosen: Integers = np.arange(len(federation.train))
        super().__init__(
            task,
            data,
            method,
            training,
            replace(settings, epochs_per_client=own),
            clients=here.tolist(),
            looks=looks,
            private=private,
            measured=measured,
        )
        self._measures = Measures(ranks, federation.placement, Columns(ranks, federation.placement))

    @property
    def everybody(self) -> int:
        return len(self._federation.train)

    def groups(self, rows: Integers, width: int | None = None) -> Iterator[ClientGroup]:
        """Of the groups of all chosen clients, the rows that are here."""
        for clients in self.whole_groups(width):
            group = self.part(clients)
            if len(group.rows):
                yield group

    def whole_groups(self, width: int | None = None) -> Iterator[Integers]:
        """The groups that one process would form of the chosen clients, the same on every rank."""
        width = width or self._executor.chunk
        order = self._chosen[np.argsort(-self._federation.train[self._chosen], kind="stable")]
        for begin in range(0, len(order), width):
            yield order[begin : begin + width]

    def part(self, clients: Integers) -> ClientGroup:
        """Those of a group who are here, perhaps nobody."""
        rows = self._own(clients)
        return ClientGroup(rows, self.ids[rows], self._federation.company(clients))

    def train(self, round: int, active: Flags, share: float | None = None) -> None:
        self._chosen = np.flatnonzero(active)
        share = float(active.mean()) if share is None else share
        self._ranks.together(lambda: self._train(round, active[self.ids], share))
        if self.context.private is not None:
            visits = self._gathered(torch.from_numpy(self.visits)).numpy()
            check_budget(visits, self.context.private, round, np.arange(self.everybody))

    def hear(self, round: int, graph: Graph) -> Record:
        if self.sight is None:
            return {}
        telling = self._gathered(torch.from_numpy(self.sight.telling)).numpy()
        return self.sight.hear(round, graph, telling)

    def share_view(self) -> None:
        """After a checkpoint of its own clients every rank learns what the others' know."""
        if self.sight is not None:
            rows = self.sight.rows()
            known = {name: self._gathered(own).numpy() for name, own in rows.items()}
            self.sight.view = View(self.sight.looks, **known)

    def remember(self, chosen: Flags) -> None:
        super().remember(chosen[self.ids])

    def evaluate(self, round: int, stage: str) -> Metrics:
        known = self.local.metrics if stage == "local" else {}
        fresh = torch.tensor([row not in known for row in range(len(self.ids))])
        self._chosen = np.flatnonzero(self._gathered(fresh).numpy())
        own = super().evaluate
        found = self._ranks.together(lambda: own(round, stage))
        return {name: self._gathered(torch.from_numpy(v)).numpy() for name, v in found.items()}

    def record(self, round: int) -> Record:
        self._chosen = np.arange(len(self._federation.train))
        return self._measures.record(self, self._settings, round)

    def outbox(self, rows: Integers | None = None) -> Message:
        if rows is None:
            return super().outbox()
        own = self._own(rows)
        if len(own):
            return super().outbox(own)
        # vmap takes no empty stack: the shapes of a message without any.
        return {name: leaf[:0] for name, leaf in super().outbox(np.array([0])).items()}

    def payload(self, outbox: Message, rows: Integers | None = None) -> Integers:
        own = None if rows is None else self._own(rows)
        empty = own is not None and not len(own)
        sizes = super().payload({} if empty else outbox, own)
        found: Integers = self._gathered(torch.from_numpy(sizes)).numpy()
        return found

    def _own(self, clients: Integers) -> Integers:
        """The rows of those of some clients that are here."""
        return clients[np.isin(clients, self.ids)] - int(self.ids[0])

    def _gathered(self, own: Tensor) -> Tensor:
        return self._ranks.rows(own, self._federation.placement.counts)
