"""Runs in which not everybody waits: what happens when. No tensor is touched here.

A client's job is one local round: take what has come, train, give away. When jobs begin and end and
what they take follows from devices, graphs, bytes and steps alone, so the whole schedule is a pure
function of the configuration. At one instant everybody gives, then everybody takes.
"""

from __future__ import annotations

import gc
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from quiverfl.clock.devices import MICROSECONDS, Devices, microseconds
from quiverfl.engine.exchange.fixed_point import UNIT, split_mass, to_units
from quiverfl.seeds import stream
from quiverfl.topologies.graph import Graph
from quiverfl.types import Floats, Integers

LEAST = UNIT // 16
"""A client with less mass gives nothing before something has come, as async peers do."""
KNOWN_ROUNDS = 512
"""Graphs that are kept: clients are in different rounds."""


class Job:
    """One local round of one client. `takes` are (number of a job, weight), in the order added."""

    __slots__ = ("client", "finish", "gives", "number", "own", "round", "start", "takes", "units")

    def __init__(
        self,
        number: int,
        client: int,
        round: int,
        start: int,
        finish: int,
        units: int,
        takes: list[tuple[int, float]],
    ) -> None:
        self.number, self.client, self.round = number, client, round
        self.start, self.finish = start, finish
        self.units, self.takes = units, takes
        """The mass with which it trains, in units of 2^-48, and what it takes before."""
        self.own, self.gives = 1.0, 0
        """The weight of its message that stays, and how many others take a part of it."""


class Schedule:
    """Jobs in the order they end. Nothing is computed further than it is asked for."""

    def __init__(self, devices: Devices, steps: Integers, payload: Integers) -> None:
        clients = devices.clients
        self.devices, self.jobs, self.transfers = devices, 0, 0
        self._steps = steps.tolist()
        self._work = devices.work(steps).tolist()
        self._payload = payload.tolist()
        self._late = microseconds(devices.latency)
        self._out = np.ceil(payload / devices.up * MICROSECONDS).astype(np.int64).tolist()
        self._in = (MICROSECONDS / devices.down).tolist()
        self.up_free, self._down_free = [0] * clients, [0] * clients
        self.sent, self.received = [0] * clients, [0] * clients
        self.busy, self.trained = [0] * clients, [0] * clients
        """Microseconds of training and local steps, of the jobs that have ended."""
        self.running: dict[int, Job] = {}
        self._ends: list[tuple[int, int]] = []
        for client in range(clients):
            self._begin(client, 0, 0, UNIT, [])

    @property
    def first_end(self) -> int:
        """When the first of the running jobs ends."""
        return int(self._ends[0][0])

    @property
    def fastest_message(self) -> int:
        """The least that any message takes."""
        into = min(size * pace for size, pace in zip(self._payload, self._in, strict=True))
        return int(self._late + max(min(self._out), into))

    def jobs_until(self, t: int) -> list[Job]:
        """The jobs that end up to and including t, after those that were asked for before."""
        with _without_collector():
            return self._play(t)

    def _play(self, t: int) -> list[Job]:
        ended: list[Job] = []
        while self._ends and self._ends[0][0] <= t:
            now, client = heapq.heappop(self._ends)
            together = [self.running[client]]
            while self._ends and self._ends[0][0] == now:
                together.append(self.running[heapq.heappop(self._ends)[1]])
            for job in together:
                self.busy[job.client] += self._work[job.client]
                self.trained[job.client] += self._steps[job.client]
            self._end(together, now)
            ended += together
        return ended

    def _end(self, jobs: list[Job], now: int) -> None:
        raise NotImplementedError

    def mass(self) -> tuple[int, int]:
        """(units that clients hold, units under way); together always clients · 2^48."""
        return self.devices.clients * UNIT, 0

    def joules(self, t: int) -> Floats:
        """What every client has drawn up to t; a job counts when it ends."""
        devices, busy = self.devices, np.array(self.busy) / MICROSECONDS
        traffic = np.array(self.sent) + np.array(self.received)
        idle = np.maximum(0.0, t / MICROSECONDS - busy)
        joules: Floats = devices.watts * busy + devices.idle_watts * idle
        joules += devices.joules_per_mb * traffic / 1e6
        return joules

    def _begin(
        self, client: int, round: int, t: int, units: int, takes: list[tuple[int, float]]
    ) -> None:
        start, finish = t, t + self._work[client]
        if self.devices.traces:
            trace = self.devices.traces[client]
            start = trace.next_there(t)
            finish = trace.finish(start, self._work[client])
        self.running[client] = Job(self.jobs, client, round, start, finish, units, takes)
        self.jobs += 1
        heapq.heappush(self._ends, (finish, client))

    def _send(self, sender: int, receiver: int, now: int) -> int:
        """When a message has arrived: first come, first served on both links."""
        begin, free, size = self.up_free[sender], self._down_free[receiver], self._payload[sender]
        if begin < now:
            begin = now
        self.up_free[sender] = out = begin + self._out[sender]
        first = begin + self._late
        if first < free:
            first = free
        arrived: int = first + int(size * self._in[receiver] + 0.999999)
        if arrived < out + self._late:
            arrived = out + self._late
        if self.devices.traces:
            arrived = self.devices.traces[receiver].next_there(arrived)
        self._down_free[receiver] = arrived
        self.sent[sender] += size
        self.received[receiver] += size
        self.transfers += 1
        return arrived


@contextmanager
def _without_collector() -> Iterator[None]:
    """A schedule makes many small objects and no circles: looking for these costs more than it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Push(Schedule):
    """Nobody waits: train, push shares, take what has come, train again."""

    def __init__(
        self,
        devices: Devices,
        steps: Integers,
        payload: Integers,
        topology: Callable[[int], Graph],
    ) -> None:
        clients = devices.clients
        self._columns = _Columns(topology)
        self._inbox: list[list[tuple[int, int, int, float, int]]] = [[] for _ in range(clients)]
        self._heard, self._held = [True] * clients, [UNIT] * clients
        super().__init__(devices, steps, payload)

    def _end(self, jobs: list[Job], now: int) -> None:
        for job in jobs:
            self._push(job, now)
        for job in jobs:
            self._take(job, now)

    def _push(self, job: Job, now: int) -> None:
        client = job.client
        if self.up_free[client] > now or (job.units < LEAST and not self._heard[client]):
            return
        receivers, weights = self._columns.read(client, job.round)
        if weights is None and client in receivers:  # the usual case of what follows
            receivers.remove(client)
            whole = len(receivers) + 1
            part, units = 1 / whole, job.units // whole
            shares = [(receiver, part, units) for receiver in receivers if units]
            own = part
        else:
            shares, own = _split(job, receivers, weights)
        if not shares:
            return
        job.own, job.gives = own, len(shares)
        self._heard[client] = False
        inbox, number, send = self._inbox, job.number, self._send
        for receiver, part, units in shares:
            share = (send(client, receiver, now), client, number, part, units)
            heapq.heappush(inbox[receiver], share)
        self._held[client] -= sum(share[2] for share in shares)

    def _take(self, job: Job, now: int) -> None:
        client, inbox = job.client, self._inbox[job.client]
        takes = []
        while inbox and inbox[0][0] <= now:
            _, _, number, weight, units = heapq.heappop(inbox)
            takes.append((number, weight))
            self._held[client] += units
        if takes:
            self._heard[client] = True
        self._begin(client, job.round + 1, now, self._held[client], takes)

    def mass(self) -> tuple[int, int]:
        return sum(self._held), sum(share[-1] for inbox in self._inbox for share in inbox)


def _split(
    job: Job, receivers: list[int], weights: list[float] | None
) -> tuple[list[tuple[int, float, int]], float]:
    """(receiver, part, units) of every share that has any mass, and the part that stays."""
    units = [1] * len(receivers) if weights is None else map(to_units, weights)
    parts = dict(zip(receivers, units, strict=True))
    own_units = parts.pop(job.client, 0)
    shares, whole = split_mass(job.units, parts, own_units)
    return [(r, parts[r] / whole, count) for r, count in shares.items()], own_units / whole


class Pairs(Schedule):
    """Who is done waits for the next who is done; the two average, and both train again."""

    def __init__(self, devices: Devices, steps: Integers, payload: Integers, seed: int = 0) -> None:
        self._seed, self._waiting = seed, list[Job]()
        super().__init__(devices, steps, payload)

    def _end(self, jobs: list[Job], now: int) -> None:
        if len(jobs) > 1:  # whose number is lower meets whose is next, unless lots are drawn
            order = stream(self._seed, "pairs", now).permutation(len(jobs))
            jobs = [jobs[place] for place in order]
        for job in jobs:
            job.own, job.gives = 0.5, 1
            if self._waiting:
                self._meet(self._waiting.pop(), job, now)
            else:
                self._waiting.append(job)

    def _meet(self, one: Job, other: Job, now: int) -> None:
        end = max(
            self._send(one.client, other.client, now), self._send(other.client, one.client, now)
        )
        for job, taken in ((one, other), (other, one)):
            self._begin(job.client, job.round + 1, end, UNIT, [(taken.number, 0.5)])


class _Columns:
    """Who a client sends to in a round of its own, and with which weights."""

    def __init__(self, topology: Callable[[int], Graph]) -> None:
        self._topology = topology
        self._known: OrderedDict[int, tuple[Any, Any, Any]] = OrderedDict()

    def read(self, client: int, round: int) -> tuple[list[int], list[float] | None]:
        """Receivers in client order, itself included; no weights where all are equal."""
        pointer, rows, data = self._known.get(round) or self._add(round)
        part = slice(pointer[client], pointer[client + 1])
        return rows[part].tolist(), None if data is None else data[part].tolist()

    def _add(self, round: int) -> tuple[Any, Any, Any]:
        matrix = self._topology(round).sparse.tocsc()
        matrix.sort_indices()
        pointer, data = matrix.indptr, matrix.data
        filled = pointer[:-1] < pointer[1:]
        starts = pointer[:-1][filled]
        equal = bool((np.maximum.reduceat(data, starts) == np.minimum.reduceat(data, starts)).all())
        known = (pointer.tolist(), matrix.indices.astype(np.int32), None if equal else data)
        self._known[round] = known
        if len(self._known) > KNOWN_ROUNDS:
            self._known.popitem(last=False)
        return known
