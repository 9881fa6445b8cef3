"""Bad networks: slow links, cuts in mid-chunk, partitions, lost packets."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.node import Node

from .proxy import Proxy
from .swarm import Options, build, make_folders
from .test_life import finish, until

QUICK = {
    "retry_first": 0.05,
    "retry_cap": 0.5,
    "keepalive_seconds": 2.0,
    "hello_seconds": 2.0,
}


async def behind_proxies(folders: list[Path]) -> list[Proxy]:
    """Everybody reaches everybody through a proxy; the peers bind their true addresses."""
    roster = Roster.read(folders[0] / ROSTER)
    proxies = []
    for member in roster.members:
        proxy = Proxy(member.address)
        await proxy.start()
        proxies.append(proxy)
    members = tuple(
        replace(member, address=proxy.address)
        for member, proxy in zip(roster.members, proxies, strict=True)
    )
    for folder in folders:
        replace(roster, members=members).write(folder / ROSTER)
    return proxies


def start(folders: list[Path], options: Options, binds: list[str]) -> list[Node]:
    nodes = []
    for folder, bind in zip(folders, binds, strict=True):
        node = build(folder, options)
        node.settings = replace(node.settings, bind=bind)
        nodes.append(node)
    return nodes


def scene(tmp_path: Path, options: Options, play, peers: int = 3) -> None:
    """Nodes behind proxies; afterwards the books must balance."""
    folders = make_folders(tmp_path, peers)
    binds = [m.address for m in Roster.read(folders[0] / ROSTER).members]

    async def scenario() -> None:
        proxies = await behind_proxies(folders)
        nodes = start(folders, options, binds)
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        try:
            await play(nodes, proxies, tasks)
        finally:
            await finish(*nodes, tasks=tasks)
            for proxy in proxies:
                await proxy.stop()

    asyncio.run(scenario())
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.passed, report.problems
    assert report.units + report.in_flight == peers * UNIT


def test_connections_cut_in_mid_chunk(tmp_path: Path) -> None:
    options = Options(size=100_000, rounds=3, mode="sync", seconds=0.0, limits=QUICK, linger=5.0)

    async def play(nodes, proxies, tasks) -> None:
        for proxy in proxies:
            proxy.cut_after = 150_000  # a share has 400,000 bytes
        await until(lambda: sum(proxy.cuts for proxy in proxies) >= 5)
        for proxy in proxies:
            proxy.cut_after = None
        await asyncio.wait_for(asyncio.gather(*tasks), 30)
        assert all(node.finished for node in nodes)
        assert sum(node.metrics.counts["retries"] for node in nodes) >= 5

    scene(tmp_path, options, play)


def test_a_partition_heals(tmp_path: Path) -> None:
    _partition(tmp_path, seconds=4.0)


@pytest.mark.slow
def test_a_minute_of_partition_heals(tmp_path: Path) -> None:
    _partition(tmp_path, seconds=60.0)


def _partition(tmp_path: Path, seconds: float) -> None:
    options = Options(size=50, rounds=8, mode="sync", deadline=200.0, limits=QUICK, linger=10.0)

    async def play(nodes, proxies, tasks) -> None:
        await until(lambda: nodes[0].transactions.accounts.round >= 2)
        proxies[0].blackhole = True
        await asyncio.sleep(seconds)
        proxies[0].blackhole = False
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert all(node.finished for node in nodes)

    scene(tmp_path, options, play)


@pytest.mark.slow
def test_a_link_of_ten_megabits(tmp_path: Path) -> None:
    options = Options(size=500_000, rounds=3, mode="sync", deadline=300.0, linger=20.0)

    async def play(nodes, proxies, tasks) -> None:
        for proxy in proxies:
            proxy.rate = 10e6 / 8
        started = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*tasks), 240)
        assert all(node.finished for node in nodes)
        assert time.monotonic() - started > 3 * 2 * 2e6 / (10e6 / 8) / 3

    scene(tmp_path, options, play)


@pytest.mark.slow
def test_thirty_percent_of_packets_lost(tmp_path: Path) -> None:
    """Real packets, in a network namespace of its own: see lossy.py."""
    if not shutil.which("unshare") or not shutil.which("ip") or not Path("/dev/net/tun").exists():
        pytest.skip("unshare, ip and /dev/net/tun are needed to lose packets on purpose")
    probe = ["unshare", "-rn", "ip", "tuntap", "add", "dev", "lossy", "mode", "tun"]
    tried = subprocess.run(probe, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no tunnel device may be made here: {tried.stderr.strip()}")
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-m", f"{__package__}.lossy", "0.3", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "balanced" in done.stdout
