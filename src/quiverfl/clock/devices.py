"""Devices: how fast each client computes and communicates, what it draws, and when it is there.

Times are whole microseconds, so that two events at one instant are at one instant everywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quiverfl.errors import QuiverError, suggest
from quiverfl.options import refuse_old_names
from quiverfl.seeds import stream
from quiverfl.types import Floats, Integers

MICROSECONDS = 1_000_000
NEVER = 1 << 62
MOST_SECONDS = 1_000_000
"""Longest local step or message delay; longer ones would overflow whole microseconds."""
TURNS = 64
"""Times that a client comes and goes before a drawn trace repeats."""


def microseconds(seconds: float) -> int:
    return round(seconds * MICROSECONDS)


@dataclass(frozen=True)
class Trace:
    """Times when a client is present: from each of `begins` up to its `ends`, in microseconds.

    With a `period` the whole repeats. Without one, presence after the last end is unknown.
    """

    begins: tuple[int, ...] = (0,)
    ends: tuple[int, ...] = (NEVER,)
    period: int | None = None

    @classmethod
    def of(cls, intervals: Sequence[Sequence[float]], period: float | None, whose: str) -> Trace:
        """From intervals in seconds, in order; `whose` they are is said where they are refused."""
        if not intervals:
            raise QuiverError(f"{whose} is never there: its trace has no interval.")
        ends_at = NEVER if period is None else microseconds(period)
        begins: list[int] = []
        ends: list[int] = []
        for interval in intervals:
            if len(interval) != 2 or not all(np.isfinite(float(x)) for x in interval):
                raise QuiverError(f"{whose}: {interval!r} is no interval: give [begin, end].")
            begin, end = microseconds(float(interval[0])), microseconds(float(interval[1]))
            if not (ends[-1] if ends else 0) <= begin < end <= ends_at:
                raise QuiverError(
                    f"{whose}: the interval {interval[0]:g} … {interval[1]:g} s does not lie after "
                    "the one before it and inside the period: give them in order of time."
                )
            begins.append(begin)
            ends.append(end)
        return cls(tuple(begins), tuple(ends), None if period is None else ends_at)

    @property
    def always(self) -> bool:
        return self.begins == (0,) and self.ends == (NEVER,)

    def next_there(self, t: int) -> int:
        """The first instant from t on at which the client is there; NEVER after the last one."""
        base, place = self._locate(t)
        if place >= 0 and t - base < self.ends[place]:
            return t
        if place + 1 < len(self.begins):
            return base + self.begins[place + 1]
        return NEVER if self.period is None else base + self.period + self.begins[0]

    def finish(self, t: int, work: int) -> int:
        """When `work` microseconds of being there are over. Absence pauses work."""
        while True:
            t = self.next_there(t)
            if t >= NEVER:
                return NEVER
            base, place = self._locate(t)
            remaining = base + self.ends[place] - t
            if work <= remaining:
                return t + work
            t, work = t + remaining, work - remaining

    def _locate(self, t: int) -> tuple[int, int]:
        base = 0 if self.period is None else t // self.period * self.period
        return base, bisect_right(self.begins, t - base) - 1


@refuse_old_names(drawn="draw")
@dataclass(frozen=True, eq=False)
class Devices:
    """The devices and links of clients. A number holds for all of them, an array has one each.

    `step` is the seconds of a local step, `up` and `down` bytes a second, `latency` the seconds a
    message takes beside that. `server` is the bandwidth of a server in each direction. `watts` are
    drawn in training, `idle_watts` otherwise; every megabyte sent or received costs
    `joules_per_mb`. `traces` says when each client is there; without, they always are.
    """

    step: Floats
    up: Floats
    down: Floats
    latency: float = 0.0
    server: float = np.inf
    watts: Floats | float = 5.0
    idle_watts: Floats | float = 0.5
    joules_per_mb: float = 1.0
    traces: tuple[Trace, ...] = ()

    def __post_init__(self) -> None:
        given = {name: self._read_numbers(name) for name in _PER_CLIENT}
        for name in ("latency", "server", "joules_per_mb"):
            self._read_numbers(name)
        for trace in self.traces:
            if not isinstance(trace, Trace):
                raise QuiverError(
                    f"devices.traces holds {trace!r}: give a Trace for each client, such as "
                    "Trace.of([[0, 60]], 3600, 'client 0')."
                )
        clients = max(len(self.traces), *(array.size for array in given.values()))
        for name, array in given.items():
            if array.ndim > 1 or array.size not in (1, clients):
                raise QuiverError(
                    f"devices.{name} has {array.size} numbers for {clients} clients: give one for "
                    "all, or one for each."
                )
            object.__setattr__(self, name, np.broadcast_to(array.reshape(-1), (clients,)).copy())
        for name in ("step", "up", "down", "server"):
            self._check(name, "it must be above 0 for every client", lambda x: x > 0)
        for name in ("step", "latency"):
            words = f"it must be at most {MOST_SECONDS:,} seconds"
            self._check(name, words, lambda x: x <= MOST_SECONDS)
        for name in ("watts", "idle_watts", "latency", "joules_per_mb"):
            self._check(name, "it must be 0 or more", lambda x: (x >= 0) & np.isfinite(x))
        if self.traces and len(self.traces) != clients:
            raise QuiverError(
                f"{len(self.traces)} traces for {clients} clients: give one for each."
            )

    def _read_numbers(self, name: str) -> Floats:
        value = getattr(self, name)
        try:
            return np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError):
            raise QuiverError(
                f"devices.{name} = {value!r}: it must be a number, or one for each client."
            ) from None

    def _check(self, name: str, words: str, good: Any) -> None:
        values = np.atleast_1d(np.asarray(getattr(self, name), dtype=np.float64))
        wrong = np.flatnonzero(~good(values))
        if len(wrong):
            where = f" of client {wrong[0]}" if name in _PER_CLIENT and len(values) > 1 else ""
            raise QuiverError(f"devices: {name}{where} = {values[wrong[0]]:g}: {words}.")

    @property
    def clients(self) -> int:
        return len(self.step)

    def check_clients(self, clients: int) -> Devices:
        """The devices of a federation of so many clients."""
        if self.clients == clients:
            return self
        if self.clients == 1 and not self.traces:
            everybody: Any = {name: np.repeat(getattr(self, name), clients) for name in _PER_CLIENT}
            return replace(self, **everybody)
        raise QuiverError(
            f"{self.clients} devices for {clients} clients: give one for each client, in order."
        )

    def trace(self, client: int) -> Trace:
        return self.traces[client] if self.traces else ALWAYS

    def work(self, steps: Integers) -> Integers:
        """Microseconds that every client needs for so many local steps, at least one."""
        return np.maximum(1, np.round(steps * self.step * MICROSECONDS)).astype(np.int64)

    @classmethod
    def draw(
        cls,
        clients: int,
        *,
        step: float = 0.1,
        spread: float = 1.0,
        sigma: float | None = None,
        up: float = 1.25e6,
        down: float | None = None,
        link_spread: float = 1.0,
        away: float = 0.0,
        mean_on: float = 120.0,
        seed: int = 0,
        **others: Any,
    ) -> Devices:
        """Draw devices.

        Log-uniform: the slowest takes `step` seconds, the fastest is `spread` times as fast; the
        fastest link has `up` bytes a second, the slowest is `link_spread` times as slow. With
        `sigma` steps are log-normal with median `step`. `down` is four times `up` unless given.
        Clients are away for the fraction `away` of the time, and there for `mean_on` seconds on
        average.
        """
        for name, value, least in (
            ("clients", clients, 1),
            ("spread", spread, 1),
            ("link_spread", link_spread, 1),
            ("sigma", 0 if sigma is None else sigma, 0),
        ):
            if not (isinstance(value, int | float | np.number) and value >= least):
                raise QuiverError(
                    f"Devices.draw: {name} = {value!r}: it must be a number, {least} or more."
                )
        for name, value in (("step", step), ("up", up), ("down", up if down is None else down)):
            if not isinstance(value, int | float | np.number):
                raise QuiverError(f"Devices.draw: {name} = {value!r}: it must be a number.")
        for name in others:
            if name not in OTHERS:
                raise QuiverError(f"Devices.draw has no option {name!r}; {suggest(name, OTHERS)}")
        draw = stream(seed, "devices")
        places = (draw.permutation(clients) + 0.5) / clients
        slow = spread**-places if sigma is None else np.exp(sigma * draw.normal(size=clients))
        thin = link_spread ** -((draw.permutation(clients) + 0.5) / clients)
        wide = (4 * up if down is None else down) * thin
        traces = draw_traces(clients, away, mean_on, seed)
        return cls(step * slow, up * thin, wide, traces=traces, **others)


_PER_CLIENT = ("step", "up", "down", "watts", "idle_watts")
OTHERS = ("latency", "server", "watts", "idle_watts", "joules_per_mb")
"""Options that `draw` passes on unchanged."""
ALWAYS = Trace()


def draw_traces(clients: int, away: float, mean_on: float, seed: int) -> tuple[Trace, ...]:
    """Alternating exponential times of presence and absence; empty if no client is ever away."""
    if not 0 <= away < 1:
        raise QuiverError(f"devices.away = {away:g}: it must be in [0, 1); 1 is never there.")
    if not mean_on > 0:
        raise QuiverError(f"devices.mean_on = {mean_on:g}: it must be above 0 seconds.")
    if not away:
        return ()
    means = np.array([mean_on, mean_on * away / (1 - away)])
    return tuple(
        _draw_trace(stream(seed, "churn", client), means, away) for client in range(clients)
    )


def _draw_trace(draw: np.random.Generator, means: Floats, away: float) -> Trace:
    first_away = int(draw.random() < away)
    lengths = draw.exponential(np.roll(means, -first_away), size=(TURNS, 2))
    times = np.maximum(1, np.round(lengths * MICROSECONDS)).astype(np.int64).ravel().cumsum()
    edges = np.concatenate([[0], times])
    begins, ends = edges[first_away:-1:2], edges[first_away + 1 :: 2]
    return Trace(tuple(begins.tolist()), tuple(ends.tolist()), int(edges[-1]))
