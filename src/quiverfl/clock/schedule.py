"""Schedules of runs in which clients do not wait for all others. No tensor is touched here.

A client's job is one local round: take what has come, train, give away. When jobs begin and end and
what they take follows from devices, graphs, bytes and steps alone, so the whole schedule is a pure
function of the configuration. At one instant all clients give, then all clients take.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quiverfl.clock.devices import MICROSECONDS, NEVER, Devices, microseconds
from quiverfl.engine.exchange.fixed_point import UNIT
from quiverfl.seeds import stream
from quiverfl.types import Flags, Floats, Integers

SLOWEST = 1 << 48
"""Microseconds of a message at most, nine years: sums of them stay whole numbers of 64 bits."""


@dataclass(slots=True)
class Job:
    """One local round of one client. `takes` are (number of a job, weight), in the order added."""

    number: int
    client: int
    round: int
    start: int
    finish: int
    units: int
    """The mass with which it trains, in units of 2^-48, with what it takes before."""
    takes: list[tuple[int, float]] = field(default_factory=list)
    own: float = 1.0
    """The weight of its message that stays."""
    gives: int = 0
    """Number of other clients that take a part of its message."""


@dataclass(frozen=True, eq=False)
class Jobs:
    """Many jobs, as arrays. `begins[i]` is where the i-th one's `sources` and `weights` begin."""

    number: Integers
    client: Integers
    round: Integers
    start: Integers
    finish: Integers
    units: Integers
    own: Floats
    gives: Integers
    begins: Integers
    """One more than there are jobs."""
    sources: Integers
    weights: Floats

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Jobs:
        columns = {
            name: np.array([getattr(job, name) for job in jobs], dtype=np.int64) for name in WHOLE
        }
        takes = [take for job in jobs for take in job.takes]
        return cls(
            **columns,
            own=np.array([job.own for job in jobs], dtype=np.float64),
            begins=count_up(np.array([len(job.takes) for job in jobs], dtype=np.int64)),
            sources=np.array([number for number, _ in takes], dtype=np.int64),
            weights=np.array([weight for _, weight in takes], dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.number)

    def __iter__(self) -> Iterator[Job]:
        for place in range(len(self)):
            part = slice(self.begins[place], self.begins[place + 1])
            takes = zip(self.sources[part].tolist(), self.weights[part].tolist(), strict=True)
            whole = {name: int(getattr(self, name)[place]) for name in WHOLE}
            yield Job(**whole, takes=list(takes), own=float(self.own[place]))

    def pick(self, places: Integers | Flags) -> Jobs:
        """Some of them, in the order of `places`."""
        begins, ends = self.begins[:-1][places], self.begins[1:][places]
        counts = ends - begins
        takes = list_ranges(begins, counts)
        return Jobs(
            **{name: getattr(self, name)[places] for name in (*WHOLE, "own")},
            begins=count_up(counts),
            sources=self.sources[takes],
            weights=self.weights[takes],
        )


WHOLE = ("number", "client", "round", "start", "finish", "units", "gives")


def count_up(counts: Integers) -> Integers:
    """Offsets of consecutive ranges with these lengths, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(counts)])


def list_ranges(begins: Integers, counts: Integers) -> Integers:
    """The numbers from each of `begins` on, so many of each."""
    before = np.cumsum(counts) - counts
    return np.repeat(begins - before, counts) + np.arange(int(counts.sum()))


class Schedule:
    """Jobs in the order they end. Nothing is computed further than it is asked for."""

    def __init__(self, devices: Devices, steps: Integers, payload: Integers) -> None:
        clients = devices.clients
        self.devices, self._steps, self._payload = devices, steps, payload
        self._work = devices.work(steps)
        self._late = microseconds(devices.latency)
        leave = np.ceil(payload / devices.up * MICROSECONDS)
        self._out = np.minimum(leave, SLOWEST).astype(np.int64)
        self._in = MICROSECONDS / devices.down
        self.sent, self.received = np.zeros((2, clients), dtype=np.int64)
        self.busy, self.trained = np.zeros((2, clients), dtype=np.int64)
        """Microseconds of training and local steps, of the jobs that have ended."""

    @property
    def running(self) -> Jobs:
        """Every client's job that has not ended, in client order."""
        raise NotImplementedError

    @property
    def first_end(self) -> int:
        """When the first of the running jobs ends."""
        return int(self.running.finish.min())

    @property
    def fastest_message(self) -> int:
        """The least that any message takes."""
        into = float((self._payload * self._in).min())
        return int(self._late + max(int(self._out.min()), into))

    def jobs_until(self, t: int) -> Jobs:
        """The jobs that end up to and including t, after those that were asked for before."""
        raise NotImplementedError

    def mass(self) -> tuple[int, int]:
        """(units that clients hold, units under way); together always clients · 2^48."""
        return self.devices.clients * UNIT, 0

    def joules(self, t: int) -> Floats:
        """Joules that every client has used up to t; a job counts when it ends."""
        devices, busy = self.devices, self.busy / MICROSECONDS
        idle = np.maximum(0.0, t / MICROSECONDS - busy)
        joules: Floats = devices.watts * busy + devices.idle_watts * idle
        joules += devices.joules_per_mb * (self.sent + self.received) / 1e6
        return joules

    def _time(self, client: int, t: int) -> tuple[int, int]:
        """When a client begins and ends a job for which it is ready at t."""
        work = int(self._work[client])
        if not self.devices.traces:
            return t, t + work
        start = self.devices.traces[client].next_there(t)
        return start, self.devices.traces[client].finish(start, work)


class Pairs(Schedule):
    """A client that is done waits for the next one; the two average, and both train again."""

    def __init__(self, devices: Devices, steps: Integers, payload: Integers, seed: int = 0) -> None:
        super().__init__(devices, steps, payload)
        self._seed, self._waiting, self._begun = seed, list[Job](), 0
        clients = devices.clients
        self._up_free, self._down_free = [0] * clients, [0] * clients
        self._running: dict[int, Job] = {}
        self._ends: list[tuple[int, int]] = []
        for client in range(clients):
            self._begin(client, 0, 0, [])

    @property
    def running(self) -> Jobs:
        return Jobs.of([job for _, job in sorted(self._running.items())])

    def jobs_until(self, t: int) -> Jobs:
        ended: list[Job] = []
        while self._ends and self._ends[0][0] <= t:
            now, client = heapq.heappop(self._ends)
            together = [self._running[client]]
            while self._ends and self._ends[0][0] == now:
                together.append(self._running[heapq.heappop(self._ends)[1]])
            for job in together:
                self.busy[job.client] += self._work[job.client]
                self.trained[job.client] += self._steps[job.client]
            self._end(together, now)
            ended += together
        return Jobs.of(ended)

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
            self._begin(job.client, job.round + 1, end, [(taken.number, 0.5)])

    def _begin(self, client: int, round: int, t: int, takes: list[tuple[int, float]]) -> None:
        start, finish = self._time(client, t)
        self._running[client] = Job(self._begun, client, round, start, finish, UNIT, takes)
        self._begun += 1
        heapq.heappush(self._ends, (finish, client))

    def _send(self, sender: int, receiver: int, now: int) -> int:
        """When a message has arrived: first come, first served on both links."""
        size = int(self._payload[sender])
        begin = max(now, self._up_free[sender])
        self._up_free[sender] = left = begin + int(self._out[sender])
        first = max(begin + self._late, self._down_free[receiver])
        take = int(min(size * float(self._in[receiver]) + 0.999999, SLOWEST))
        arrived = min(max(first + take, left + self._late), NEVER)
        if self.devices.traces:
            arrived = self.devices.traces[receiver].next_there(arrived)
        self._down_free[receiver] = arrived
        self.sent[sender] += size
        self.received[receiver] += size
        return arrived
