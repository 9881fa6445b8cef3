"""Synchronous rounds on the clock: when every client has trained and mixed, bytes and joules.

    server      a round lasts until the slowest sampled client's message is in
    barrier     a client goes on when all clients are done
    undirected  a link is used when both its ends are ready, in both directions
    push        a client goes on when all messages that the round's graph sends it are here; it does
                not wait until its own messages are taken

The messages that a client sends in a round share its uplink equally, those that it receives its
downlink, and a message is as fast as the slower of the two parts. So every time is made of sums and
maxima of others, and nothing that becomes faster makes anything else later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from quiverfl.clock.devices import MICROSECONDS, NEVER, Devices, microseconds
from quiverfl.errors import QuiverError
from quiverfl.topologies.graph import TOLERANCE, Graph
from quiverfl.topologies.topology import build_graph, build_one_row_graph
from quiverfl.types import Flags, Floats, Integers

Kind: TypeAlias = Literal["server", "barrier", "undirected", "push"]


@dataclass(frozen=True, eq=False)
class RoundTimes:
    """One round. Times are microseconds since the start of the run, one for each client."""

    began: Integers
    trained: Integers
    mixed: Integers
    sent: Integers
    received: Integers
    joules: Floats
    graph: Graph
    """The round's graph, without what a deadline or absence left out."""

    def record(self) -> dict[str, float]:
        """Entries of a round's record: seconds when all have trained and mixed, and joules."""
        active = self.graph.active
        trained = self.trained[active] if active.any() else self.trained
        return {
            "clock_local": float(trained.max()) / MICROSECONDS,
            "clock": float(self.mixed.max()) / MICROSECONDS,
            "joules": float(self.joules.sum()),
        }


class RoundTimer:
    """Advances round by round: it knows when every client is ready for the next one."""

    def __init__(
        self,
        devices: Devices,
        kind: Kind,
        skip: bool = False,
        deadline: float | None = None,
        mass: bool = True,
    ) -> None:
        """`skip` and `deadline` leave out who is away and what is late. `mass`: whose weights those
        are, the sender's wherever they are shares."""
        self._mass = mass
        self._devices, self._kind, self._skip = devices, kind, skip
        self._deadline = None if deadline is None else microseconds(deadline)
        self._late = microseconds(devices.latency)
        self._ready = np.zeros(devices.clients, dtype=np.int64)
        self._up_free = np.zeros(devices.clients, dtype=np.int64)
        self.round = 0

    def advance(self, graph: Graph, steps: Integers, payload: Integers) -> RoundTimes:
        """The next round. `steps` and `payload` (bytes of a message) have a number per client."""
        began = self._ready
        if self._skip:
            began, graph = self._leave_out_absent(graph)
        trained = np.where(graph.active, self._work(began, self._devices.work(steps)), began)
        if self._kind == "server":
            graph, trained, mixed, sent, received = self._serve(graph, began, steps, payload)
        else:
            graph, mixed, sent, received = self._exchange(graph, trained, payload)
        self._check_ends(np.maximum(trained, mixed))
        busy = np.where(graph.active, self._devices.work(steps), 0)
        times = RoundTimes(
            began, trained, mixed, sent, received,
            self._energy(mixed - self._ready, busy, sent + received), graph,
        )  # fmt: skip
        self._ready = mixed
        self.round += 1
        return times

    def _work(self, begin: Integers, work: Integers) -> Integers:
        """When work that is begun at `begin` is over, absence included."""
        traces = self._devices.traces
        if not traces:
            return begin + work
        ends = [
            trace.finish(int(b), int(w)) for trace, b, w in zip(traces, begin, work, strict=True)
        ]
        return np.array(ends, dtype=np.int64)

    def _energy(self, elapsed: Integers, busy: Integers, moved: Integers) -> Floats:
        devices = self._devices
        idle = np.maximum(0, elapsed - busy) / MICROSECONDS
        joules: Floats = devices.watts * busy / MICROSECONDS + devices.idle_watts * idle
        joules += devices.joules_per_mb * moved / 1e6
        return joules

    def _exchange(
        self, graph: Graph, trained: Integers, payload: Integers
    ) -> tuple[Graph, Integers, Integers, Integers]:
        devices, clients = self._devices, graph.clients
        receivers, senders = list_links(graph)
        begin = np.maximum(trained, self._up_free)[senders]
        if self._kind == "undirected":
            begin = np.maximum(begin, np.maximum(trained, self._up_free)[receivers])
        out = np.bincount(senders, minlength=clients)
        into = np.bincount(receivers, minlength=clients)
        size = payload[senders]
        leave = np.ceil(size * out[senders] / devices.up[senders] * MICROSECONDS)
        take = np.ceil(size * into[receivers] / devices.down[receivers] * MICROSECONDS)
        left = begin + leave.astype(np.int64)
        first = np.maximum(begin + self._late, self._ready[receivers])
        arrived = first + np.maximum(leave, take).astype(np.int64)
        if devices.traces:
            arrived = np.array(
                [
                    devices.traces[receiver].next_there(t)
                    for receiver, t in zip(receivers.tolist(), arrived.tolist(), strict=True)
                ],
                dtype=np.int64,
            )
        mixed = trained.copy()
        if self._deadline is not None:
            end = trained[receivers] + self._deadline
            graph, kept = self._drop(graph, receivers, senders, arrived > end)
            np.maximum.at(mixed, receivers[~kept], end[~kept])  # it waits for what is late
            receivers, senders, left = receivers[kept], senders[kept], left[kept]
            arrived, size = arrived[kept], size[kept]
        np.maximum.at(self._up_free, senders, left)
        np.maximum.at(mixed, receivers, arrived)
        if self._kind == "undirected":
            np.maximum.at(mixed, senders, arrived)
        if self._kind == "barrier":
            mixed = np.full(clients, mixed.max())
        sent = np.bincount(senders, weights=size, minlength=clients).astype(np.int64)
        received = np.bincount(receivers, weights=size, minlength=clients).astype(np.int64)
        return graph, mixed, sent, received

    def _serve(
        self, graph: Graph, began: Integers, steps: Integers, payload: Integers
    ) -> tuple[Graph, Integers, Integers, Integers, Integers]:
        """Sampled clients load the model, train and send; the server's bandwidth is shared."""
        devices, active = self._devices, graph.active
        now, part = int(began.max()), devices.server / max(1, int(active.sum()))
        average = float(payload[active].mean()) if active.any() else 0.0
        load = np.ceil(average / np.minimum(devices.down, part) * MICROSECONDS).astype(np.int64)
        work = load + self._late + devices.work(steps)
        trained = np.where(active, self._work(np.full_like(began, now), work), began)
        send = np.ceil(payload / np.minimum(devices.up, part) * MICROSECONDS).astype(np.int64)
        arrived = np.where(active, self._work(trained, send) + self._late, now)
        if self._deadline is not None and active.any():
            limit = max(now + self._deadline, int(arrived[active].min()))  # it waits for the first
            late = active & (arrived > limit)
            graph = _without_late(graph, late)
            arrived = np.where(late, limit, arrived)
            trained = np.minimum(trained, np.where(late, limit, NEVER))
        mixed = np.full_like(began, max(int(arrived.max()), now))
        sent = np.where(active, payload, 0)
        return graph, trained, mixed, sent, np.where(active, round(average), 0).astype(np.int64)

    def _leave_out_absent(self, graph: Graph) -> tuple[Integers, Graph]:
        """Leave out clients that are away when a round is announced; all others begin."""
        ready = self._ready
        # Rounds are announced when half of the clients are ready: a late client does not delay it.
        announced = int(np.median(ready)) if self._kind in ("undirected", "push") else ready.max()
        begin = np.maximum(ready, announced)
        available = np.array(
            [self._devices.trace(i).next_there(int(t)) == t for i, t in enumerate(begin)]
        )
        if graph.hub:
            absent = graph.active & ~available
            if absent[graph.active].all():
                return ready, graph  # none is there: the server waits for those it sampled
            fewer = _without_late(graph, absent)
            return ready, Graph(fewer.matrix, graph.active & available, True)
        receivers, senders = list_links(graph)
        gone = ~(available[receivers] & available[senders])
        graph, _ = self._drop(graph, receivers, senders, gone)
        graph = Graph(graph.matrix, graph.active & available, graph.hub)
        return np.where(available, ready, begin), graph

    def _drop(
        self, graph: Graph, receivers: Integers, senders: Integers, gone: Flags
    ) -> tuple[Graph, Flags]:
        """The graph without some links, and which links are left; their weights stay at home."""
        if not gone.any():
            return graph, ~gone
        owner = senders if self._mass and graph.column_stochastic else receivers
        if self._kind == "undirected":  # an exchange needs both directions
            lost = set(zip(receivers[gone].tolist(), senders[gone].tolist(), strict=True))
            pairs = zip(receivers.tolist(), senders.tolist(), strict=True)
            gone = np.array([(r, s) in lost or (s, r) in lost for r, s in pairs])
            owner = receivers
        matrix = graph.sparse.tocoo()
        home = matrix.row == matrix.col
        weights = np.asarray(graph.sparse[receivers, senders]).ravel()
        rows = np.where(gone, owner, receivers)
        columns = np.where(gone, owner, senders)
        left = build_graph(
            graph.clients,
            np.concatenate([rows, matrix.row[home].astype(np.int64)]),
            np.concatenate([columns, matrix.col[home].astype(np.int64)]),
            np.concatenate([weights, matrix.data[home]]),
            active=graph.active,
        )
        return left, ~gone

    def _check_ends(self, times: Integers) -> None:
        over = np.flatnonzero(times >= NEVER)
        if len(over):
            client = int(over[0])
            last = self._devices.trace(client).ends[-1] / MICROSECONDS
            raise QuiverError(
                f"the trace of client {client} ends at {last:g} s, and round {self.round + 1} "
                "needs it later: give a longer trace, or one with a period, which repeats."
            )


def _without_late(graph: Graph, late: Flags) -> Graph:
    """The server's round without the messages of some clients; the rest weigh as much together."""
    row = graph.matrix[[0]]
    kept = ~late[row.indices]
    if not kept.any():
        return graph
    weights = row.data[kept] / row.data[kept].sum()
    return build_one_row_graph(row.indices[kept].astype(np.int64), weights, graph.active, hub=True)


def list_links(graph: Graph) -> tuple[Integers, Integers]:
    """(receivers, senders) of the messages of a round, in order."""
    links = graph.sparse.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    return links.row[across].astype(np.int64), links.col[across].astype(np.int64)


def choose_kind(graph: Graph, waits: str) -> Kind:
    """Choose the kind of a round with this graph; `waits` is "all" or "graph"."""
    if graph.hub:
        return "server"
    if waits == "all":
        return "barrier"
    symmetric = abs(graph.sparse - graph.sparse.T).max() <= TOLERANCE
    return "undirected" if symmetric else "push"


def time_rounds(
    timer: RoundTimer, graphs: Iterable[Graph], steps: Integers, payload: Integers
) -> list[RoundTimes]:
    """Rounds in which every client that trains takes the same steps and sends as much."""
    return [timer.advance(graph, steps, payload) for graph in graphs]
