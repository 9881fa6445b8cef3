"""All clients of a federation, as one process reaches them: in this process, or on many ranks.

A shard and an exchange ask about clients that may be elsewhere. On several ranks all of them must
ask the same, in the same order; what they learn is the same to the bit wherever clients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.exchange.matrix import NARROWEST, mix
from quiverfl.engine.local.context import ClientGroup
from quiverfl.engine.local.workers import parallel_for
from quiverfl.engine.settings import RunSettings
from quiverfl.topologies.graph import Graph
from quiverfl.types import Flags, Integers

Answer = TypeVar("Answer")


class World(Protocol):
    """The clients on this rank, and answers about the clients of all ranks."""

    @property
    def ids(self) -> Integers:
        """The numbers of the clients here, in the order of a shard's rows."""

    @property
    def all_ids(self) -> Integers:
        """The numbers of all clients. Flags and answers about all are in this order."""

    @property
    def longest(self) -> int:
        """The number of training examples of the client with the most."""

    def rows_of(self, clients: Integers) -> Integers:
        """The rows here of some clients, given by their places among all."""

    def select_local(self, flags: Flags) -> Flags:
        """The flags of the clients here, from those of all."""

    def gather(self, own: Tensor) -> Tensor:
        """The rows of all clients, from all ranks."""

    def gather_group(self, own: Tensor, group: ClientGroup) -> Tensor:
        """The rows of all clients of a group, from all ranks, in the group's order."""

    def groups(self, chosen: Integers, width: int, blocks: int = 1) -> Iterator[ClientGroup]:
        """The groups that one process would form of the chosen clients: those of them here.

        Clients of like size are together, so that none waits for another. A group may have no
        client here. Up to `blocks` groups of like clients may be joined; no bit changes by it.
        """

    def sum_rows(self, leaf: Tensor) -> Tensor:
        """The sum of all clients' rows, in float64."""

    def sum_columns(
        self, leaf: Tensor, width: int, work: Callable[[Tensor], Tensor], total: Tensor
    ) -> Tensor:
        """`total` + Σ work(`width` columns of all clients' rows), added in the order of columns."""

    def mix(self, graph: Graph, leaf: Tensor, multiple: int = NARROWEST) -> Tensor:
        """The mixed messages of the clients here, as `matrix.mix` computes them for all clients."""

    def run_on_all(self, work: Callable[[], Answer]) -> Answer:
        """Do the work. What fails on one rank fails on all."""


class LocalWorld:
    """All clients are in one place; `sizes` says how many examples each has.

    Clients with equal rows of `kinds` have batches of equal sizes wherever they are computed.
    """

    def __init__(
        self, ids: Integers, sizes: Integers | None = None, kinds: Integers | None = None
    ) -> None:
        self.ids = self.all_ids = ids
        self._sizes = np.zeros(len(ids)) if sizes is None else sizes
        self._kinds = np.asarray(self._sizes[:, None] if kinds is None else kinds, dtype=np.int64)

    @classmethod
    def of_data(cls, ids: Integers, data: FederatedData, settings: RunSettings) -> LocalWorld:
        """Clients are alike if they have as many examples and epochs."""
        sizes, epochs = data.train.sizes, settings.epochs_per_client
        same = np.zeros(len(ids), dtype=np.int64) if epochs is None else np.asarray(epochs)
        return cls(ids, sizes, np.stack([sizes, data.test.sizes, same], axis=1))

    @property
    def longest(self) -> int:
        return int(self._sizes.max())

    def rows_of(self, clients: Integers) -> Integers:
        return clients

    def select_local(self, flags: Flags) -> Flags:
        return flags

    def gather(self, own: Tensor) -> Tensor:
        return own

    def gather_group(self, own: Tensor, group: ClientGroup) -> Tensor:
        return own

    def groups(self, chosen: Integers, width: int, blocks: int = 1) -> Iterator[ClientGroup]:
        order = chosen[np.argsort(-self._sizes[chosen], kind="stable")]
        for rows in cut_groups(order, self._kinds, width, blocks):
            yield ClientGroup(rows, self.ids[rows])

    def sum_rows(self, leaf: Tensor) -> Tensor:
        return leaf.sum(dim=0, dtype=torch.float64)

    def sum_columns(
        self, leaf: Tensor, width: int, work: Callable[[Tensor], Tensor], total: Tensor
    ) -> Tensor:
        return sum_columns(leaf, width, work, total)

    def mix(self, graph: Graph, leaf: Tensor, multiple: int = NARROWEST) -> Tensor:
        return mix(graph, leaf, multiple)

    @staticmethod
    def run_on_all(work: Callable[[], Any]) -> Any:
        return work()


LINE = 16
"""Rows, of whatever length, after which a row begins at the same place of a cache line again."""


def cut_groups(order: Integers, kinds: Integers, width: int, blocks: int) -> Iterator[Integers]:
    """Blocks of `width` clients; up to `blocks` of them are joined if all their clients are alike.

    The last bits of a product depend on where its matrices lie in a cache line. So a joined block
    begins at a multiple of `LINE` rows. The rows between two blocks are taken by clients of the
    first, each computed once more where it lies the same, with the same bits. The last block may be
    shorter than the others.
    """
    places = np.arange(-(-width // LINE) * LINE if blocks > 1 else width)
    places[width:] -= LINE
    begin = 0
    while begin < len(order):
        # How far clients are like the first.
        group_kinds = kinds[order[begin : begin + width * blocks]]
        like = np.flatnonzero((group_kinds != group_kinds[0]).any(axis=1))
        count = int(like[0] if len(like) else len(group_kinds)) // width
        end = begin + width * max(1, count)
        rest = order[end:] if not len(like) and count < blocks else order[:0]
        whole = order[begin:end]
        if count > 1 or (count and len(rest)):
            whole = whole.reshape(count, width)[:, places].ravel()
        yield np.concatenate([whole, rest])
        begin = end + len(rest)


def sum_columns(
    leaf: Tensor, width: int, work: Callable[[Tensor], Tensor], total: Tensor
) -> Tensor:
    """`total` + Σ work(all rows of `width` columns), added in the order of columns."""
    for columns in torch.split(leaf, width, dim=1):
        total = total + work(columns)
    return total


def compute_groups(
    world: World,
    work: Callable[[ClientGroup], None],
    chosen: Integers,
    width: int,
    workers: int,
    blocks: int = 1,
) -> None:
    """Do the work for all groups of the chosen clients, some of them side by side."""
    groups = [group for group in world.groups(chosen, width, blocks) if len(group.rows)]
    world.run_on_all(lambda: parallel_for(work, groups, workers))
