"""The clients of all ranks, as the shard of one rank asks for them (engine/collective.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from quiverfl.distributed.columns import Columns
from quiverfl.distributed.ranks import Placement, Ranks
from quiverfl.engine.exchange.matrix import NARROWEST
from quiverfl.engine.local.context import ClientGroup, FullGroup
from quiverfl.topologies.graph import Graph
from quiverfl.types import Flags, Integers

Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Federation:
    """What every rank knows of all clients."""

    placement: Placement
    train: Integers
    """How many training examples each client has."""
    test: Integers
    epochs: Integers | None
    """Each client's own, where they are not the method's."""


@dataclass(frozen=True, eq=False)
class RankWorld:
    """All clients, of whom this rank has some.

    Groups are those that one process would form: of each, a rank computes the clients it has, as
    wide as the whole group.
    """

    ranks: Ranks
    federation: Federation

    @cached_property
    def ids(self) -> Integers:
        return self._placement.clients_of(self.ranks.rank)

    @cached_property
    def all_ids(self) -> Integers:
        return np.arange(self._placement.clients)

    @property
    def _placement(self) -> Placement:
        return self.federation.placement

    @cached_property
    def columns(self) -> Columns:
        return Columns(self.ranks, self._placement)

    @property
    def longest(self) -> int:
        return int(self.federation.train.max())

    def rows_of(self, clients: Integers) -> Integers:
        return clients[np.isin(clients, self.ids)] - int(self.ids[0])

    def select_local(self, flags: Flags) -> Flags:
        return flags[self.ids]

    def gather(self, own: Tensor) -> Tensor:
        return self.ranks.rows(own, self._placement.counts)

    def gather_group(self, own: Tensor, group: ClientGroup) -> Tensor:
        assert group.full_group is not None
        clients = group.full_group.clients
        # Gathered they are in the order of ranks.
        owner = np.searchsorted(self._placement.cuts, clients, side="right")
        back = torch.from_numpy(np.argsort(np.argsort(owner, kind="stable"), kind="stable"))
        return self.ranks.rows(own, self._placement.count_per_rank(clients))[back]

    def groups(self, chosen: Integers, width: int, blocks: int = 1) -> Iterator[ClientGroup]:
        federation = self.federation
        order = chosen[np.argsort(-federation.train[chosen], kind="stable")]
        for begin in range(0, len(order), width):
            clients = order[begin : begin + width]
            epochs = None if federation.epochs is None else federation.epochs[clients]
            sizes = federation.train[clients], federation.test[clients]
            rows = self.rows_of(clients)
            yield ClientGroup(rows, self.ids[rows], FullGroup(clients, *sizes, epochs))

    def sum_rows(self, leaf: Tensor) -> Tensor:
        """Columns are added up here and there, and put together everywhere."""
        total = leaf.new_zeros(leaf.shape[1], dtype=torch.float64)
        for block, whole in self.columns.deal_columns(leaf, NARROWEST):
            begin = block.cuts[self.ranks.rank]
            total[begin : begin + whole.shape[1]] = whole.sum(dim=0, dtype=torch.float64)
        return self.ranks.total(total)

    def sum_columns(
        self, leaf: Tensor, width: int, work: Callable[[Tensor], Tensor], total: Tensor
    ) -> Tensor:
        return self.columns.sum_columns(leaf, width, work, total)

    def mix(self, graph: Graph, leaf: Tensor, multiple: int = NARROWEST) -> Tensor:
        return self.columns.mix(graph, leaf, multiple)

    def run_on_all(self, work: Callable[[], Answer]) -> Answer:
        return self.ranks.run_on_all(work)
