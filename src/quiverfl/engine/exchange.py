"""Who computes mixed_i = Σ_j P[i, j] · message_j: the product of all rows, and what is late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from quiverfl.engine.accounting import traffic
from quiverfl.engine.mixing import mix
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import offline

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Product = Callable[[Graph, Tensor], Tensor]
"""(graph, the messages of the rows that are here) → what those rows receive."""


class Exchange(Protocol):
    """Moves messages. What has been sent and not yet delivered belongs to every checkpoint."""

    def senders(self, graph: Graph) -> Integers | None:
        """Whose messages it wants; None for everybody's."""

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        """Bytes of every client's message as it travels; `payload` has those of the whole one."""

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        """What crossed the network in the round that was pushed last."""

    def push(self, round: int, graph: Graph, outbox: Message) -> None: ...
    def collect(self, round: int) -> Message: ...
    def in_flight(self) -> dict[str, Tensor]: ...
    def restore(self, tensors: dict[str, Tensor]) -> None: ...


class MatrixExchange:
    """A matrix product per leaf, in place where nothing is late. All clients are in one place,
    unless `rows` are the ones that are here and `product` has the others' messages brought.

    With a delay τ a client has its own share of round t at once and the others' shares of round
    t - τ; before round τ nothing arrives from others. Shares for a client that is offline when
    they are due wait for the next round in which it is there.
    """

    def __init__(
        self, delay: int = 0, product: Product = mix, rows: Integers | None = None
    ) -> None:
        self.delay, self.product = delay, product
        self._rows = slice(None) if rows is None else rows
        self._due: dict[int, Message] = {}
        self._waiting: Message = {}
        self._mixed: Message = {}
        self._graph: Graph | None = None

    def senders(self, graph: Graph) -> Integers | None:
        return graph.senders if graph.one_row and not self.delay else None

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        return payload

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        return traffic(graph, payload)

    def kept(self) -> Floats:
        """The share of its own message that every client kept in the round that was pushed last."""
        assert self._graph is not None
        found: Floats = self._graph.sparse.diagonal()
        return found

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        self._graph = graph
        if self.delay == 0:
            self._mixed = {name: self.product(graph, leaf) for name, leaf in outbox.items()}
            return
        own = torch.from_numpy(graph.sparse.diagonal()[self._rows])
        others = _without_diagonal(graph)
        self._due[round + self.delay] = {
            name: self.product(others, leaf.clone()) for name, leaf in outbox.items()
        }
        self._mixed = {name: leaf * _like(own, leaf) for name, leaf in outbox.items()}
        self._deliver(self._due.pop(round, {}), offline(graph))

    def _deliver(self, arriving: Message, away: Flags) -> None:
        """Add what is due, and what has waited, to the clients that are there."""
        for name, leaf in self._mixed.items():
            waiting = self._waiting.get(name)
            share = arriving.get(name)
            if share is None and waiting is None:
                continue
            total = share if waiting is None else waiting if share is None else share + waiting
            assert total is not None
            absent = _like(torch.from_numpy(away[self._rows].astype(np.float64)), total)
            leaf.add_(total * (1 - absent))
            if away.any():
                self._waiting[name] = total * absent
            else:
                self._waiting.pop(name, None)

    def collect(self, round: int) -> Message:
        mixed, self._mixed = self._mixed, {}
        return mixed

    def in_flight(self) -> dict[str, Tensor]:
        """Every share that has left its sender and not reached its receiver, by due round."""
        flying = {
            f"due/{round}/{name}": leaf
            for round, message in self._due.items()
            for name, leaf in message.items()
        }
        return {**flying, **{f"waiting/{name}": leaf for name, leaf in self._waiting.items()}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._due, self._waiting = {}, {}
        for key, leaf in tensors.items():
            kind, _, rest = key.partition("/")
            if kind == "waiting":
                self._waiting[rest] = leaf
            else:
                round, _, name = rest.partition("/")
                self._due.setdefault(int(round), {})[name] = leaf


def _without_diagonal(graph: Graph) -> Graph:
    links = graph.sparse.tocoo()
    across = links.row != links.col
    entries = (links.data[across], (links.row[across], links.col[across]))
    return Graph(sparse.csr_array(entries, shape=links.shape), graph.active)


def _like(column: Tensor, leaf: Tensor) -> Tensor:
    """One number per client, shaped to multiply a leaf."""
    shape = (-1,) + (1,) * (leaf.ndim - 1)
    return column.to(dtype=leaf.dtype, device=leaf.device).view(shape)
