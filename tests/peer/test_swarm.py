"""Real processes over real gRPC: killed, stopped, lost, and never a grain of mass missing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.accounts.store import Store
from quiverfl.transforms.codec import MessageCodec
from quiverfl.transforms.compression import TopK

from .swarm import Options, Swarm, in_memory


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[type[Swarm]]:
    """Makes swarms and ends their processes, whatever happens."""
    made: list[Swarm] = []

    class Made(Swarm):
        def __init__(self, count: int, options: Options) -> None:
            super().__init__(tmp_path / str(len(made)), count, options)
            made.append(self)

    yield Made
    for one in made:
        one.close()


def drain(swarm: Swarm, seconds: float = 30.0) -> None:
    """Everybody back, no new rounds: what is on its way arrives."""
    swarm.stop_all()
    for name in swarm.folders:
        swarm.start(name, replace(swarm.options, rounds=0, linger=20.0))
    swarm.join_all(seconds)


def shared(swarm: Swarm) -> dict[str, np.ndarray]:
    found = {}
    for name, folder in swarm.folders.items():
        store = Store.open(folder / "store")
        found[name] = store.memory().message["u"]
        store.close()
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_four_peers_finish_and_everything_adds_up(swarm, mode: str) -> None:
    peers = swarm(4, Options(rounds=10, mode=mode))
    peers.start_all()
    peers.join_all(40)
    assert {process.exitcode for process in peers.processes.values()} == {0}
    report = peers.audit()
    assert report.passed, report.problems
    assert (report.units, report.in_flight, report.drift) == (4 * UNIT, 0, 0.0)
    if mode == "sync":
        assert report.transfers == 4 * 2 * 10


def _kill_loop(swarm, kills: int, peers: int, size: int) -> None:
    one = swarm(peers, Options(size=size))
    one.start_all()
    one.wait_for_round(1)
    chance = random.Random(kills)
    for number in range(kills):
        time.sleep(chance.uniform(0.0, 0.3))
        name = chance.choice(list(one.folders))
        one.kill(name)
        if chance.random() < 0.3:
            time.sleep(chance.uniform(0.0, 0.3))
        one.start(name)
        if number % 5 == 4:
            flying = one.frozen_audit()
            assert flying.passed, flying.problems
            assert flying.units + flying.in_flight == peers * UNIT
    drain(one)
    landed = one.audit()
    assert landed.passed, landed.problems
    assert (landed.units, landed.in_flight) == (peers * UNIT, 0)
    assert landed.drift < 1e-15
    assert landed.transfers > kills


def test_twenty_kills_at_random_moments_lose_nothing(swarm) -> None:
    _kill_loop(swarm, kills=20, peers=8, size=1000)


@pytest.mark.slow
def test_a_hundred_kills_over_eight_peers_lose_nothing(swarm) -> None:
    """QUIVER_KILLS says how many otherwise; `make kills` takes a thousand."""
    _kill_loop(swarm, kills=int(os.environ.get("QUIVER_KILLS", "100")), peers=8, size=100_000)


POINTS = [
    *(f"{when} {kind}" for kind in ("push", "absorb") for when in ("before", "after")),
    *("before ack", "after ack", "before send", "after send"),
]
COMMIT = {f"{w} {k}": f"{w} {k} commit" for w in ("before", "after") for k in ("push", "absorb")}


def crash_and_compare(swarm, points: list[str], **changes: Any) -> None:
    """Sync rounds are deterministic: with crashes the result is bitwise that without."""
    options = Options(rounds=4, mode="sync", size=50, seconds=0.0, neighbours=1, **changes)
    calm = swarm(2, options)
    calm.start_all()
    calm.join_all(40)
    expected = shared(calm)
    for point in points:
        rough = swarm(2, options)
        rough.start("peer-1")
        rough.start("peer-0", replace(options, crash_at=point, crash_after=1))
        rough.processes["peer-0"].join(30)
        assert rough.processes["peer-0"].exitcode == 137, (point, rough.log("peer-0")[-2000:])
        flying = rough.frozen_audit()
        assert flying.passed, (point, flying.problems)
        assert flying.units + flying.in_flight == 2 * UNIT, point
        rough.start("peer-0")
        rough.join_all(40)
        report = rough.audit()
        assert report.passed, (point, report.problems)
        assert (report.units, report.in_flight) == (2 * UNIT, 0), point
        found = shared(rough)
        assert all(np.array_equal(found[name], expected[name]) for name in expected), point


def test_a_crash_around_commits_acks_and_sends_changes_nothing_at_all(swarm) -> None:
    crash_and_compare(swarm, [COMMIT.get(point, point) for point in POINTS])


CODED = MessageCodec(TopK(fraction=0.1), seed=3)


def test_a_crash_after_the_push_of_coded_shares_changes_nothing_at_all(swarm) -> None:
    """What was not sent is in the same commit as what was; the same bytes go out again."""
    crash_and_compare(swarm, ["after push commit"], coding=CODED)


@pytest.mark.slow
def test_a_crash_at_any_other_point_with_coded_shares_changes_nothing_at_all(swarm) -> None:
    crash_and_compare(swarm, [COMMIT.get(point, point) for point in POINTS], coding=CODED)


@pytest.mark.slow
def test_a_crash_at_every_other_point_changes_nothing_at_all(swarm) -> None:
    points = [f"{w} acknowledge commit" for w in ("before", "after")]
    points += [f"before {kind} files" for kind in ("push", "absorb", "acknowledge")]
    crash_and_compare(swarm, points)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_peer_that_never_comes_back_does_not_stop_the_others(swarm, mode: str) -> None:
    peers = swarm(4, Options(rounds=12, mode=mode, deadline=1.0, linger=1.0))
    peers.start_all()
    peers.wait_for_round(2, names=["peer-3"])
    peers.kill("peer-3")
    peers.join_all(40)
    rest = ["peer-0", "peer-1", "peer-2"]
    assert all(len(peers.history(name)) == 12 for name in rest)
    report = peers.audit()
    assert report.passed, report.problems
    assert report.units + report.in_flight == 4 * UNIT


def test_sigterm_finishes_the_transaction_and_a_restart_goes_on(swarm) -> None:
    peers = swarm(3, Options(rounds=1000))
    peers.start_all()
    peers.wait_for_round(3)
    peers.stop_all()
    assert {process.exitcode for process in peers.processes.values()} == {0}
    before = {name: len(peers.history(name)) for name in peers.folders}
    assert peers.audit().passed
    started = time.time()
    peers.start_all()
    peers.wait_for_round(max(before.values()) + 3)
    first = min(line["at"] for line in peers.history("peer-0")[before["peer-0"] :])
    assert first - started < 5.0
    drain(peers)
    assert peers.audit().units == 3 * UNIT


@pytest.mark.slow
def test_sixty_four_peers_for_fifty_rounds() -> None:
    options = Options(rounds=50, mode="sync", size=2000, neighbours=4, linger=60.0)
    with in_memory() as root:  # a kill loses nothing that was written, on whatever file system
        peers = Swarm(root, 64, options)
        try:
            _sixty_four(peers)
        finally:
            peers.close()


def _sixty_four(peers: Swarm) -> None:
    peers.start_all()
    chance = random.Random(0)
    kills = dict.fromkeys(peers.folders, 0)
    for _ in range(20):
        time.sleep(1.0)
        name = chance.choice(list(peers.folders))
        if peers.processes[name].exitcode is None:
            peers.kill(name)
            peers.start(name)
            kills[name] += 1
    peers.join_all(500)
    assert {process.exitcode for process in peers.processes.values()} == {0}
    report = peers.audit()
    assert report.passed, report.problems
    assert (report.units, report.in_flight) == (64 * UNIT, 0)
    for name, times in kills.items():  # a kill between commit and record costs the round's line
        lines = peers.history(name)
        assert times or lines[-1]["round"] == 49
        assert len(lines) >= 50 - times


def test_freezing_is_not_failing(swarm) -> None:
    """A peer that stalls is late, not lost."""
    peers = swarm(3, Options(rounds=6, mode="sync", deadline=0.5, linger=5.0))
    peers.start_all()
    peers.wait_for_round(1)
    process = peers.processes["peer-1"]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(process.pid, signal.SIGCONT)
    peers.join_all(40)
    drain(peers)
    report = peers.audit()
    assert report.passed, report.problems
    assert (report.units, report.in_flight) == (3 * UNIT, 0)
