"""Connections from whoever has no certificate: they cost a place for a while, and nothing else."""

from __future__ import annotations

import asyncio
import configparser
import resource
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link.identity import KEY
from quiverfl.peer.link.limits import acceptable_connections
from quiverfl.peer.link.roster import ROSTER, Roster

from .swarm import Options, Swarm, build, make_folders
from .test_life import ENDLESS, finish, until

FILES = 256


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    one = Swarm(tmp_path, 2, Options(size=50, neighbours=1, seconds=0.02, files=FILES))
    yield one
    one.close()


def flood(address: str, count: int) -> list[socket.socket]:
    """Connections that never say a word."""
    host, _, port = address.rpartition(":")
    return [socket.create_connection((host, int(port)), timeout=5) for _ in range(count)]


def test_idle_connections_beyond_the_limit_of_files_stop_nobody(swarm: Swarm) -> None:
    swarm.start_all()
    swarm.wait_for_round(3)
    address = Roster.read(swarm.folders["peer-0"] / ROSTER).member("peer-0").address
    held = flood(address, FILES + 100)
    try:
        reached = len(swarm.history("peer-0"))
        swarm.wait_for_round(reached + 30, names=["peer-0", "peer-1"])
        assert swarm.processes["peer-0"].exitcode is None
        assert b"Too many open files" not in (swarm.folders["peer-0"] / "log.txt").read_bytes()
        swarm.kill("peer-1")  # whoever comes back gets in when the silent ones are hung up on
        swarm.start("peer-1")
        here = swarm.audit(live=True).transfers
        end = time.monotonic() + 30
        while swarm.audit(live=True).transfers < here + 20:
            assert time.monotonic() < end, swarm.log("peer-1")[-2000:]
            time.sleep(0.2)
    finally:
        for one in held:
            one.close()
    swarm.stop_all()
    report = swarm.audit()
    assert report.passed, report.problems
    assert report.units + report.in_flight == 2 * UNIT


def test_too_few_files_are_refused_with_a_sentence() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert acceptable_connections(3) == 64 + 64 + 12
    with pytest.raises(QuiverError, match="ulimit -n"):
        acceptable_connections(hard)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft


def test_a_commit_waits_for_a_descriptor(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    relief = threading.Timer(0.5, resource.setrlimit, (resource.RLIMIT_NOFILE, limits))
    relief.start()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        write_durably(tmp_path / "state", b"content")
    finally:
        relief.join()
    assert (tmp_path / "state").read_bytes() == b"content"


def test_a_roster_and_a_key_that_cannot_be_read_for_a_moment(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 2)

    async def scenario() -> None:
        nodes = [build(folder, replace(ENDLESS, neighbours=1)) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 3 for node in nodes))
        for name in (ROSTER, KEY):
            shutil.move(folders[0] / name, folders[0] / f"{name}.away")
        for node in nodes:
            for sender in node.neighbours.senders.values():
                await sender.link.disconnect()
        counts = [node.metrics.counts["transfers"] for node in nodes]
        await until(
            lambda: all(
                node.metrics.counts["transfers"] > count + 5
                for node, count in zip(nodes, counts, strict=True)
            )
        )
        (folders[0] / ROSTER).write_text("not a roster [")
        await nodes[0].neighbours.announce({"peer-1"})
        assert nodes[0].ctx.roster.refresh().names == ["peer-0", "peer-1"]
        assert not any(task.done() for task in tasks)
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())


def test_the_unit_starts_a_peer_again_after_what_may_pass() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.read(Path(__file__).parents[2] / "docs" / "examples" / "quiver-peer.service")
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Service"]["RestartPreventExitStatus"].split() == ["3", "5"]
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
