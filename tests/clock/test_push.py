"""The schedule without waiting, against one that goes from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from quiverfl.clock.devices import MICROSECONDS, NEVER, Devices, draw_traces
from quiverfl.clock.push import LEAST, Push
from quiverfl.engine.exchange.fixed_point import (
    UNIT,
    integer_weights,
    receiver_weights,
    split_mass,
)
from quiverfl.errors import QuiverError
from quiverfl.topologies import random_push
from quiverfl.topologies.graph import Graph

S = MICROSECONDS


def play_events(
    devices: Devices, work: list[int], size: int, topology: Callable[[int], Graph], until: int
) -> list[tuple[Any, ...]]:
    """(client, round, start, finish, units, takes, own, gives) of every job, in order.

    At an instant all who have trained give, then all take: a word for word version of the rules.
    """
    n = len(work)
    held, heard, up, down = [UNIT] * n, [True] * n, [0] * n, [0] * n
    numbers, inbox, ended = count(), [[] for _ in range(n)], []  # type: ignore[var-annotated]
    late = round(devices.latency * S)

    def begin(i: int, r: int, t: int, takes: list[tuple[int, float]]) -> dict[str, Any]:
        start = devices.trace(i).next_there(t)
        finish = devices.trace(i).finish(start, work[i])
        return {"n": next(numbers), "r": r, "start": start, "finish": finish,
                "units": held[i], "takes": takes}  # fmt: skip

    jobs = [begin(i, 0, 0, []) for i in range(n)]
    while (now := min(job["finish"] for job in jobs)) <= until:
        done = [i for i in range(n) if jobs[i]["finish"] == now]
        said = {}
        for i in done:
            job, own, gives = jobs[i], 1.0, 0
            if up[i] <= now and (job["units"] >= LEAST or heard[i]):
                parts = integer_weights(receiver_weights(topology(job["r"]), i))
                home = parts.pop(i, 0)
                shares, whole = split_mass(job["units"], parts, home)
                if shares:
                    own, gives, heard[i] = home / whole, len(shares), False
                for j, units in shares.items():
                    leave = max(now, up[i])
                    up[i] = leave + int(np.ceil(size / devices.up[i] * S))
                    take = int(size * (S / devices.down[j]) + 0.999999)
                    arrived = max(max(leave + late, down[j]) + take, up[i] + late)
                    down[j] = arrived = devices.trace(j).next_there(arrived)
                    heapq.heappush(inbox[j], (arrived, i, job["n"], parts[j] / whole, units))
                    held[i] -= units
            said[i] = (own, gives)
        for i in done:
            job, takes = jobs[i], []
            while inbox[i] and inbox[i][0][0] <= now:
                _, _, number, part, units = heapq.heappop(inbox[i])
                takes.append((number, part))
                held[i] += units
                heard[i] = True
            ended.append((i, job["r"], job["start"], job["finish"], job["units"], job["takes"],
                          *said[i]))  # fmt: skip
            jobs[i] = begin(i, job["r"] + 1, now, takes)
    return ended


def unequal(clients: int, seed: int) -> Callable[[int], Graph]:
    """Columns with unequal weights; some clients keep nothing of their own."""

    def graph(round: int) -> Graph:
        draw = np.random.default_rng((seed, round))
        weights = draw.random((clients, clients)) * (draw.random((clients, clients)) < 0.5)
        np.fill_diagonal(weights, draw.random(clients) * (draw.random(clients) < 0.7))
        weights[(np.arange(clients) + 1) % clients, np.arange(clients)] += 0.1
        return Graph(sp.csr_array(weights / weights.sum(axis=0)), np.ones(clients, bool), False)

    return graph


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(0, 999),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([100.0, 5e3, np.inf]),
    st.booleans(),
)
def test_stretches_give_the_schedule_that_events_give(
    clients: int, seed: int, latency: float, away: float, speed: float, equal: bool
) -> None:
    draw = np.random.default_rng(seed)
    step = np.round(np.exp(draw.normal(size=clients) * draw.choice([0.0, 1.0])), 2) + 0.05
    rates = [speed * np.exp(draw.normal(size=clients)) for _ in range(2)]
    traces = draw_traces(clients, away, 4.0, seed)
    devices = Devices(step, *rates, latency=latency, traces=traces)
    steps, size = draw.integers(1, 4, clients), int(draw.integers(1, 3000))
    some = int(draw.integers(1, clients))
    topology = random_push(clients, some, seed=seed) if equal else unequal(clients, seed)
    work = devices.work(steps).tolist()
    wanted = play_events(devices, work, size, topology, 9 * S)
    schedule = Push(devices, steps, np.full(clients, size), topology)
    found = []
    for t in (2.5, 2.5, 4.0, 9.0):
        found += [(j.client, j.round, j.start, j.finish, j.units, j.takes, j.own, j.gives)
                  for j in schedule.jobs_until(int(t * S))]  # fmt: skip
        assert sum(schedule.mass()) == clients * UNIT
    assert found == wanted


def test_a_message_that_never_comes_is_taken_by_nobody() -> None:
    """10^-12 bytes a second: more microseconds than 64 bits count."""
    devices = Devices(np.ones(4), 1e-12, 1e-12)  # type: ignore[arg-type]
    schedule = Push(devices, np.ones(4, np.int64), np.full(4, 10**6), random_push(4, 2))
    jobs = schedule.jobs_until(50 * S)
    assert len(jobs) == 200
    assert not len(jobs.sources)
    assert jobs.gives.tolist() == [2] * 4 + [0] * 196  # the uplink is busy ever after
    held, flying = schedule.mass()
    assert (held + flying, flying > 0) == (4 * UNIT, True)


def test_more_mass_at_one_client_than_can_be_counted_is_refused() -> None:
    clients = NEVER // UNIT + 2
    matrix = sp.lil_array((clients, clients))
    matrix[0] = 1.0
    graph = Graph(sp.csr_array(matrix), np.ones(clients, bool), False)
    devices = Devices(np.full(clients, 1.0), np.inf, np.inf)  # type: ignore[arg-type]
    schedule = Push(devices, np.ones(clients, np.int64), np.full(clients, 8), lambda _: graph)
    with pytest.raises(QuiverError, match="client 0 holds the mass of more than 16,384 clients"):
        schedule.jobs_until(3 * S)
