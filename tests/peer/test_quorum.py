"""Sync rounds that go on with a quorum, and a deadline that follows what was measured."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.folder import PeersSection, Settings
from quiverfl.peer.rounds import FEWEST, Patience

from .swarm import Options, build, make_folders
from .test_life import finish, until

SYNC = Options(size=20, rounds=1_000_000, mode="sync", seconds=0.0, neighbours=3, deadline=600.0)


def test_the_deadline_is_a_percentile_times_a_factor() -> None:
    patience = Patience()
    assert patience.deadline(0.9, 3.0, 1.0, 60.0) == 60.0  # nothing is known yet
    for round in range(10):
        patience.begin(round, now=100.0 * round)
        patience.note_arrival(round, now=100.0 * round + 1 + round)  # after 1, 2, … 10 s
    assert FEWEST <= 10
    assert patience.deadline(0.9, 3.0, 1.0, 60.0) == 27.0
    assert patience.deadline(0.5, 3.0, 1.0, 60.0) == 15.0
    assert patience.deadline(1.0, 3.0, 1.0, 20.0) == 20.0  # the ceiling
    assert patience.deadline(0.1, 1.0, 2.5, 20.0) == 2.5  # the floor
    patience.note_arrival(3, now=10_000.0)  # one that came very late counts as it is
    assert patience.deadline(1.0, 1.0, 1.0, 1e9) == 9700.0
    patience.note_arrival(11, now=0.0)  # one that was early cost nothing
    assert patience.deadline(0.01, 1.0, 0.0, 60.0) == 0.0


def play(folders: list[Path], options: Options, slow: float, rounds: int) -> tuple[float, Any]:
    """The time that three peers take for some rounds beside one that trains for `slow` seconds."""
    seen: dict[str, Any] = {}

    async def scenario() -> float:
        nodes = [build(folder, options) for folder in folders[:3]]
        nodes.append(build(folders[3], replace(options, seconds=slow)))
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round >= 2 for node in nodes))
        first, began = nodes[0].transactions.accounts.round, time.monotonic()
        while "peer-3" not in seen.get("waiting_for", ()) and time.monotonic() < began + 20:
            seen.update(nodes[0].status())
            await asyncio.sleep(0.01)
        await until(lambda: all(n.transactions.accounts.round >= first + rounds for n in nodes[:3]))
        took = time.monotonic() - began
        await finish(*nodes, tasks=tasks)
        return took

    took = asyncio.run(scenario())
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.passed, report.problems
    assert report.units + report.in_flight == 4 * UNIT
    return took, seen


@pytest.mark.parametrize("by", ["members", "mass"])
def test_a_quorum_does_not_wait_for_the_slowest(tmp_path: Path, by: str) -> None:
    """Two of three promised shares are enough; all are waited for without a quorum."""
    options = replace(SYNC, settings={"quorum": 0.6, "quorum_by": by})
    took, seen = play(make_folders(tmp_path, 4), options, slow=1.5, rounds=12)
    assert took < 12 * 1.5 / 2
    assert seen["state"]


def test_status_says_whom_a_round_waits_for(tmp_path: Path) -> None:
    took, seen = play(make_folders(tmp_path, 4), SYNC, slow=0.7, rounds=3)
    assert took >= 2 * 0.7
    assert "peer-3" in seen["waiting_for"]
    assert seen["deadline"] == 600.0


def test_a_silent_member_costs_one_measured_deadline(tmp_path: Path) -> None:
    """The ceiling is ten minutes; what was measured is milliseconds, so the floor holds."""
    folders = make_folders(tmp_path, 4)
    options = replace(SYNC, settings={"deadline_floor": 2.0})

    async def scenario() -> None:
        nodes = [build(folder, options) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round >= 5 for node in nodes))
        await finish(nodes[3], tasks=tasks[3:])
        round = max(node.transactions.accounts.round for node in nodes[:3])
        began = time.monotonic()
        await until(lambda: all(n.transactions.accounts.round > round + 5 for n in nodes[:3]), 120)
        assert time.monotonic() - began < 60.0
        assert all(node.neighbours.absent == {"peer-3"} for node in nodes[:3])
        assert nodes[0].status()["deadline"] < 600.0
        await finish(*nodes[:3], tasks=tasks[:3])

    asyncio.run(scenario())


def test_what_cannot_be_meant_is_refused() -> None:
    for values, words in [
        ({"mode": "async", "quorum": 0.5}, "async waits for nobody"),
        ({"mode": "async", "deadline_floor": 1.0}, "async waits for nobody"),
        ({"deadline_floor": 61.0}, "above deadline"),
        ({"quorum": 0.0}, "greater than 0"),
        ({"quorum": 1.1}, "less than or equal to 1"),
        ({"deadline_factor": 0.5}, "greater than or equal to 1"),
    ]:
        with pytest.raises((QuiverError, ValueError), match=words):
            PeersSection(**values)


def test_the_defaults_are_those_of_before() -> None:
    section, settings = PeersSection(), Settings(rounds=1)
    for name in ("quorum", "quorum_by", "deadline_floor", "deadline_percentile", "deadline_factor"):
        assert getattr(section, name) == getattr(settings, name)
    assert (section.quorum, section.deadline_floor) == (1.0, None)
