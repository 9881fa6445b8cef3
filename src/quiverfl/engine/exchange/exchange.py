"""An exchange: message stages around a core that computes mixed_i = Σ_j P[i, j] · message_j.

    before   every stage in order: changes the round's graph and the outgoing messages
    core     sums them: a matrix product, the columns of ranks, or the peers' fixed-point shares
    after    every stage in reverse order: changes what was received

Attack, privacy noise, robust aggregation and compression are stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import count_downloads, count_uploads
from quiverfl.types import Integers


class MessageStage:
    """One change of messages on their way. Every method has a default that changes nothing."""

    def before(self, round: int, graph: Graph, outbox: Message) -> tuple[Graph, Message]:
        """The graph and the messages that go on from here; tensors may be changed in place."""
        return graph, outbox

    def after(self, round: int, graph: Graph, mixed: Message) -> Message:
        """Change the received messages; `graph` is the one that the core mixed with."""
        return mixed

    def coded_sizes(self, outbox: Message, sizes: Integers) -> Integers:
        """Bytes of every client's message after this stage; `sizes` are those before it."""
        return sizes

    def record(self, graph: Graph, sizes: Integers) -> dict[str, Any]:
        """Entries that this stage adds to the round's record, or replaces in it."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """The stage's tensors for a checkpoint."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave, out of the tensors of a whole exchange."""


class Core(Protocol):
    """Sums messages. What was sent and not yet delivered belongs to every checkpoint."""

    def senders(self, graph: Graph) -> Integers | None:
        """The clients whose messages are needed; None for all."""

    def mix(self, round: int, graph: Graph, outbox: Message) -> Message:
        """The mixed message of every client here; the memory of `outbox` may be used."""

    def coded_sizes(self, outbox: Message, sizes: Integers) -> Integers: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def restore(self, tensors: dict[str, Tensor]) -> None: ...


class Exchange:
    """Stages around a core. `ids` are the clients of the rows here, if these are not all."""

    def __init__(
        self, core: Core, stages: Sequence[MessageStage] = (), ids: Integers | None = None
    ) -> None:
        self.core, self.stages = core, tuple(stages)
        self._ids = ids
        self._graph: Graph | None = None
        self._mixed: Message = {}

    def senders(self, graph: Graph) -> Integers | None:
        """The clients whose messages are needed; None for all, as stages change all of them."""
        return None if self.stages else self.core.senders(graph)

    def coded_sizes(self, outbox: Message, sizes: Integers) -> Integers:
        """Bytes of every client's message as it travels; `sizes` are those without any stage."""
        for stage in self.stages:
            sizes = stage.coded_sizes(outbox, sizes)
        return self.core.coded_sizes(outbox, sizes)

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        """Send the messages; their memory may be used."""
        for stage in self.stages:
            graph, outbox = stage.before(round, graph, outbox)
        if self.stages:
            outbox = self._select_senders(graph, outbox)
        self._graph, self._mixed = graph, self.core.mix(round, graph, outbox)

    def collect(self, round: int) -> Message:
        """The mixed message of every client in this round."""
        mixed, self._mixed = self._mixed, {}
        assert self._graph is not None
        for stage in reversed(self.stages):
            mixed = stage.after(round, self._graph, mixed)
        return mixed

    def record(self, graph: Graph, sizes: Integers) -> dict[str, Any]:
        """Bytes that crossed the network in the last round pushed, and entries of the stages."""
        record = traffic(graph, sizes)
        for stage in self.stages:
            record |= stage.record(graph, sizes)
        return record

    def tensors(self) -> dict[str, Tensor]:
        """Messages in flight and what stages keep between rounds."""
        tensors = self.core.tensors()
        for stage in self.stages:
            tensors |= stage.tensors()
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave."""
        self.core.restore(tensors)
        for stage in self.stages:
            stage.restore(tensors)

    def _select_senders(self, graph: Graph, outbox: Message) -> Message:
        """The rows that the core needs, if it does not need all rows here."""
        senders = self.core.senders(graph)
        if senders is None:
            return outbox
        ids = np.arange(graph.clients) if self._ids is None else self._ids
        rows = np.flatnonzero(np.isin(ids, senders))
        if len(rows) == len(ids):
            return outbox
        index = torch.from_numpy(rows)
        return {name: leaf[index] for name, leaf in outbox.items()}


def traffic(graph: Graph, payload: Integers) -> dict[str, Any]:
    """Bytes that cross the network; payload[i] is the size of client i's message.

    Over a star a sampled client sends its message and receives the average, which is as large as
    the messages are on average; the server handles both.
    """
    sent = count_uploads(graph) * payload
    if graph.hub:
        average = int(payload[graph.active].mean()) if graph.active.any() else 0
        received = count_downloads(graph) * average
        busiest = network = int(sent.sum() + received.sum())
    else:
        received = _count_received(graph, payload)
        busiest, network = int((sent + received).max()), int(sent.sum())
    return {
        "sent_bytes": sent.tolist(),
        "received_bytes": received.tolist(),
        "busiest_bytes": busiest,
        "network_bytes": network,
    }


def _count_received(graph: Graph, payload: Integers) -> Integers:
    if graph.one_row:  # all clients receive from the same senders, but not from themselves
        own = np.where(np.isin(np.arange(graph.clients), graph.senders), payload, 0)
        return int(payload[graph.senders].sum()) - own
    links = graph.sparse.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    received = np.bincount(
        links.row[across], weights=payload[links.col[across]], minlength=graph.clients
    )
    return received.astype(np.int64)
