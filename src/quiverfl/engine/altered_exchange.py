"""An exchange of messages that are altered before they leave: forged, or blurred for privacy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.alterations import Alterations, Flags
from quiverfl.engine.exchange import Exchange
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import downloads, uploads

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class AlteredExchange:
    """Wraps the exchange that moves what was altered; `ids` are the clients of the rows here.

    Whoever claims a false mass deceives others, not itself: what it keeps of its message, and what
    is refused and comes home, has its true mass. `kept` gives that share of every client.
    """

    def __init__(
        self,
        inner: Exchange,
        alterations: Alterations,
        ids: Integers,
        kept: Callable[[], Floats] | None = None,
    ) -> None:
        self._inner, self._alterations, self._ids, self._kept = inner, alterations, ids, kept
        self._hidden: Message = {}
        self._there: Flags = np.ones(len(ids), dtype=bool)

    def senders(self, graph: Graph) -> None:
        """Everybody's: a client that does not send keeps what it has."""

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        return self._inner.weigh(outbox, payload)

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        sends = uploads(graph)[self._ids] > 0
        self._there = sends | (downloads(graph)[self._ids] > 0)
        true = {name: outbox[name].clone() for name in self._alterations.forges}
        self._alterations.alter(round, outbox, sends, self._there)
        self._hidden = {name: leaf - outbox[name] for name, leaf in true.items()}
        self._inner.push(round, graph, outbox)

    def collect(self, round: int) -> Message:
        mixed = self._inner.collect(round)
        for name, hidden in self._hidden.items():
            assert self._kept is not None
            share = torch.from_numpy(self._kept()[self._ids]).to(hidden)
            mixed[name] = mixed[name] + share * hidden
        self._alterations.received(mixed, self._there)
        return mixed

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        return {**self._inner.traffic(graph, payload), **self._alterations.record()}

    def in_flight(self) -> dict[str, Tensor]:
        return {**self._inner.in_flight(), **self._alterations.tensors()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._inner.restore(self._alterations.restore(tensors))
