"""The schedule of a run without waiting: train, push shares, take what has come, train again.

Jobs are worked off in stretches, each as array operations: all that end before any job can end that
has not begun.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np

from quiverfl.clock.devices import NEVER, Devices
from quiverfl.clock.schedule import SLOWEST, WHOLE, Jobs, Schedule, count_up, list_ranges
from quiverfl.engine.exchange.fixed_point import UNIT, split_mass, to_units
from quiverfl.errors import QuiverError
from quiverfl.topologies.graph import Graph
from quiverfl.types import AnyArray, Floats, Integers

LEAST = UNIT // 16
"""A client with less mass gives nothing before something has come, as async peers do."""
KNOWN_ROUNDS = 512
"""Graphs that are kept: clients are in different rounds."""


class _Ended(NamedTuple):
    """Jobs that ended together, and where what they took lies."""

    whole: tuple[Integers, ...]
    own: Floats
    begins: Integers
    counts: Integers


class Push(Schedule):
    """Nobody waits."""

    def __init__(
        self,
        devices: Devices,
        steps: Integers,
        payload: Integers,
        topology: Callable[[int], Graph],
    ) -> None:
        super().__init__(devices, steps, payload)
        clients = devices.clients
        everybody = np.arange(clients)
        self._columns, self._shares = _Columns(topology), _Shares(clients)
        self._up_free, self._down_free = np.zeros((2, clients), dtype=np.int64)
        self._heard = np.ones(clients, dtype=bool)
        self._held = np.full(clients, UNIT)
        self._shortest, self._begun = int(self._work.min()), 0
        # The running job of every client; where what it takes begins among all that is taken.
        self._number, self._round, self._begins, self._counts = np.zeros((4, clients), np.int64)
        self._start, self._finish = np.zeros((2, clients), dtype=np.int64)
        self._units, self._round[:] = self._held.copy(), -1
        self._taken: list[tuple[Integers, Floats]] = []
        self._filled = 0
        self._begin(everybody, np.zeros(clients, dtype=np.int64))

    @property
    def running(self) -> Jobs:
        everybody = np.arange(len(self._work))
        jobs = (everybody, np.ones(len(everybody)), np.zeros(len(everybody), dtype=np.int64))
        return self._read([self._describe_jobs(*jobs)])

    def jobs_until(self, t: int) -> Jobs:
        ended = []
        while (first := int(self._finish.min())) <= t:
            last = min(t, first + self._shortest - 1)
            clients = np.flatnonzero(self._finish <= last)
            clients = clients[np.argsort(self._finish[clients], kind="stable")]
            ended.append(self._end(clients))
        jobs = self._read(ended)
        self._forget()
        return jobs

    def _forget(self) -> None:
        """Keep what running jobs take: the rest has been read."""
        sources, weights = self._all_taken()
        takes = list_ranges(self._begins, self._counts)
        self._taken, self._filled = [(sources[takes], weights[takes])], len(takes)
        self._begins = np.cumsum(self._counts) - self._counts
        self._shares.forget_taken()

    def mass(self) -> tuple[int, int]:
        return _add(self._held), _add(self._shares.units[self._shares.flying()])

    def _end(self, clients: Integers) -> _Ended:
        """End the jobs of some clients, in the order of their ends, and begin the next ones."""
        self.busy[clients] += self._work[clients]
        self.trained[clients] += self._steps[clients]
        now = self._finish[clients]
        own, gives = self._push(clients, now)
        ended = self._describe_jobs(clients, own, gives)
        self._take(clients, now)
        self._begin(clients, now)
        return ended

    def _describe_jobs(self, clients: Integers, own: Floats, gives: Integers) -> _Ended:
        columns = (self._round, self._start, self._finish, self._units)
        named = (self._number[clients], clients, *(column[clients] for column in columns))
        return _Ended((*named, gives), own, self._begins[clients], self._counts[clients])

    def _read(self, ended: list[_Ended]) -> Jobs:
        if not ended:
            return Jobs.of([])
        columns = [np.concatenate(parts) for parts in zip(*(e.whole for e in ended), strict=True)]
        own, begins, counts = (
            np.concatenate(parts) for parts in list(zip(*ended, strict=True))[1:]
        )
        takes = list_ranges(begins, counts)
        sources, weights = self._all_taken()
        return Jobs(
            **dict(zip(WHOLE, columns, strict=True)),
            own=own, begins=count_up(counts), sources=sources[takes], weights=weights[takes],
        )  # fmt: skip

    def _all_taken(self) -> tuple[Integers, Floats]:
        if len(self._taken) != 1:
            none = (np.zeros(0, dtype=np.int64), np.zeros(0))
            sources, weights = zip(none, *self._taken, strict=True)
            self._taken = [(np.concatenate(sources), np.concatenate(weights))]
        return self._taken[0]

    def _push(self, clients: Integers, now: Integers) -> tuple[Floats, Integers]:
        """Give shares away: what stays of each message, and how many others get a part."""
        own, gives = np.ones(len(clients)), np.zeros(len(clients), dtype=np.int64)
        enough = (self._units[clients] >= LEAST) | self._heard[clients]
        places = np.flatnonzero((self._up_free[clients] <= now) & enough)
        if not len(places):
            return own, gives
        senders, units = clients[places], self._units[clients[places]]
        split = self._columns.split(senders, self._round[senders], units)
        gives[places] = count = split.counts
        own[places] = np.where(count > 0, split.own, 1.0)
        self._heard[senders[count > 0]] = False
        turn = list_ranges(np.zeros(len(places), dtype=np.int64), count)
        sender, begin = np.repeat(senders, count), np.repeat(now[places], count)
        begin = begin + turn * self._out[sender]
        left = begin + self._out[sender] + self._late
        size = self._payload[sender]
        take = np.minimum(size * self._in[split.receivers] + 0.999999, SLOWEST).astype(np.int64)
        arrived = self._arrive(split.receivers, begin + self._late, take, left)
        some = count > 0
        self._up_free[senders[some]] = (now[places] + count * self._out[senders])[some]
        self.sent[senders] += self._payload[senders] * count
        np.add.at(self.received, split.receivers, size)
        np.subtract.at(self._held, sender, split.units)
        number = self._number[sender]
        self._shares.add(split.receivers, arrived, sender, number, split.parts, split.units)
        return own, gives

    def _arrive(
        self, receivers: Integers, first: Integers, take: Integers, left: Integers
    ) -> Integers:
        """When messages have arrived: first come, first served on every downlink."""
        arrived, free = np.empty_like(first), self._down_free
        if self.devices.traces:
            rows = zip(
                receivers.tolist(), first.tolist(), take.tolist(), left.tolist(), strict=True
            )
            for place, (receiver, at, length, earliest) in enumerate(rows):
                end = max(max(at, int(free[receiver])) + length, earliest)
                free[receiver] = arrived[place] = self.devices.traces[receiver].next_there(end)
            return arrived
        order = np.argsort(receivers, kind="stable")
        begins = np.flatnonzero(np.diff(receivers[order], prepend=-1))
        counts = np.diff(begins, append=len(order))
        longest = np.argsort(-counts, kind="stable")
        begins, counts = begins[longest], counts[longest]
        for turn in range(int(counts.max(initial=0))):
            one = order[begins[: int((counts > turn).sum())] + turn]
            receiver = receivers[one]
            end = np.maximum(np.maximum(first[one], free[receiver]) + take[one], left[one])
            free[receiver] = arrived[one] = np.minimum(end, NEVER)
        return arrived

    def _take(self, clients: Integers, now: Integers) -> None:
        """Give each client's next job the shares that have arrived by the end of its last job."""
        shares = self._shares
        slots, places = shares.take(clients, now)
        keys = (shares.number[slots], shares.sender[slots], shares.arrived[slots], places)
        order = np.lexsort(keys)
        slots, places = slots[order], places[order]
        np.add.at(self._held, clients[places], shares.units[slots])
        counts = np.bincount(places, minlength=len(clients))
        self._heard[clients[counts > 0]] = True
        self._begins[clients] = self._filled + np.cumsum(counts) - counts
        self._counts[clients] = counts
        self._taken.append((shares.number[slots], shares.parts[slots]))
        self._filled += len(slots)
        if (self._held[clients] >= NEVER).any():
            client = int(clients[np.argmax(self._held[clients])])
            raise QuiverError(
                f"client {client} holds the mass of more than {NEVER // UNIT:,} clients, more than "
                "can be counted exactly: take a graph in which clients also give."
            )

    def _begin(self, clients: Integers, now: Integers) -> None:
        self._number[clients] = self._begun + np.arange(len(clients))
        self._begun += len(clients)
        self._round[clients] += 1
        self._units[clients] = self._held[clients]
        if self.devices.traces:
            for client, t in zip(clients.tolist(), now.tolist(), strict=True):
                self._start[client], self._finish[client] = self._time(client, t)
        else:
            self._start[clients], self._finish[clients] = now, now + self._work[clients]


class Split(NamedTuple):
    """Shares of some messages: all of the first one, in client order, then those of the next."""

    receivers: Integers
    parts: Floats
    units: Integers
    counts: Integers
    """Number of shares per message."""
    own: Floats
    """The part of each that stays."""


class _Columns:
    """Receivers and weights of a client in its own current round."""

    def __init__(self, topology: Callable[[int], Graph]) -> None:
        self._topology = topology
        self._known: OrderedDict[int, tuple[list[int], Integers, Floats | None]] = OrderedDict()

    def split(self, senders: Integers, rounds: Integers, units: Integers) -> Split:
        """The shares of messages with so much mass."""
        rows: list[Integers] = []
        unequal: dict[int, list[float]] = {}
        for client, round in zip(senders.tolist(), rounds.tolist(), strict=True):
            pointer, known, data = self._known.get(round) or self._add(round)
            part = slice(pointer[client], pointer[client + 1])
            if data is not None:
                unequal[len(rows)] = data[part].tolist()
            rows.append(known[part])
        count = len(senders)
        receivers = np.concatenate(rows)
        place = np.repeat(np.arange(count), [len(row) for row in rows])
        home = receivers == senders[place]
        keeps = np.bincount(place[home], minlength=count) > 0
        receivers, place = receivers[~home], place[~home]
        others = np.bincount(place, minlength=count)
        parts, shares = (1 / (others + 1))[place], (units // (others + 1))[place]
        own = 1 / (others + 1)
        begins = count_up(others)
        for one in range(count) if not keeps.all() else unequal:  # not the usual case
            if one in unequal or not keeps[one]:
                some = slice(begins[one], begins[one + 1])
                one_split = _split(
                    int(units[one]), int(senders[one]), rows[one].tolist(), unequal.get(one)
                )
                parts[some], shares[some], own[one] = one_split
        given = shares > 0
        counts = np.bincount(place[given], minlength=count)
        return Split(receivers[given], parts[given], shares[given], counts, own)

    def _add(self, round: int) -> tuple[list[int], Integers, Floats | None]:
        matrix = self._topology(round).sparse.tocsc()
        matrix.sort_indices()
        pointer, data = matrix.indptr, matrix.data
        filled = pointer[:-1] < pointer[1:]
        starts = pointer[:-1][filled]
        equal = bool((np.maximum.reduceat(data, starts) == np.minimum.reduceat(data, starts)).all())
        known = (pointer.tolist(), matrix.indices.astype(np.int64), None if equal else data)
        self._known[round] = known
        if len(self._known) > KNOWN_ROUNDS:
            self._known.popitem(last=False)
        return known


def _split(
    whole: int, client: int, receivers: list[int], weights: list[float] | None
) -> tuple[list[float], list[int], float]:
    """The part and the units of every share, 0 without any, and the part that stays."""
    units = [1] * len(receivers) if weights is None else map(to_units, weights)
    parts = dict(zip(receivers, units, strict=True))
    own = parts.pop(client, 0)
    shares, total = split_mass(whole, parts, own)
    counts = [shares.get(receiver, 0) for receiver in parts]
    return [part / total for part in parts.values()], counts, own / total


class _Shares:
    """Shares under way and not yet taken, by the client they are for."""

    def __init__(self, clients: int) -> None:
        self._inbox: list[list[int]] = [[] for _ in range(clients)]
        self._size = 0
        self.arrived, self.sender, self.number, self.units = np.zeros((4, 64), dtype=np.int64)
        self.parts = np.zeros(64)

    def add(self, receivers: Integers, *columns: AnyArray) -> None:
        """Columns: arrived, sender, number of its job, part of its message, units."""
        begin, self._size = self._size, self._size + len(receivers)
        if self._size > len(self.units):
            self._resize(np.arange(begin), 2 * self._size)
        for name, column in zip(_SHARE, columns, strict=True):
            getattr(self, name)[begin : self._size] = column
        for slot, receiver in enumerate(receivers.tolist(), begin):
            self._inbox[receiver].append(slot)

    def take(self, clients: Integers, now: Integers) -> tuple[Integers, Integers]:
        """The slots of all that has come to these clients by then, and for whom of them it is."""
        inbox = self._inbox
        waiting = [inbox[client] for client in clients.tolist()]
        counts = [len(slots) for slots in waiting]
        slots = np.fromiter(chain.from_iterable(waiting), np.int64, sum(counts))
        places = np.repeat(np.arange(len(clients)), counts)
        here = self.arrived[slots] <= now[places]
        for client in clients.tolist():
            inbox[client] = []
        late = zip(slots[~here].tolist(), clients[places[~here]].tolist(), strict=True)
        for slot, client in late:
            inbox[client].append(slot)
        return slots[here], places[here]

    def flying(self) -> Integers:
        """The slots of all that is not taken, by the clients it is for."""
        return np.fromiter(chain.from_iterable(self._inbox), np.int64)

    def forget_taken(self) -> None:
        slots = self.flying()
        self._resize(slots, 64 + 2 * len(slots))
        self._size, ends = len(slots), np.cumsum([len(some) for some in self._inbox]).tolist()
        begins = [0, *ends[:-1]]
        self._inbox = [list(range(*pair)) for pair in zip(begins, ends, strict=True)]

    def _resize(self, slots: Integers, room: int) -> None:
        for name in _SHARE:
            column = getattr(self, name)
            more = np.zeros(room, dtype=column.dtype)
            more[: len(slots)] = column[slots]
            setattr(self, name, more)


_SHARE = ("arrived", "sender", "number", "parts", "units")


def _add(units: Integers) -> int:
    """Their sum, which may need more than 64 bits."""
    return (int((units >> 32).sum()) << 32) + int((units & (1 << 32) - 1).sum())
