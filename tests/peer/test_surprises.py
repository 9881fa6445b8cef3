"""Clocks that jump, disks that fail, files that vanish, links, bombs in codes, connections without
end: what is lost is one attempt, and the books stay exact."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import StoreError, read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.control import SOCKET, make_order
from quiverfl.peer.link.messages import Manifest
from quiverfl.peer.link.roster import ROSTER
from quiverfl.peer.link.wire import Order
from quiverfl.support import durable
from quiverfl.transforms.codec import MessageCodec, Origin
from quiverfl.transforms.compression import Quantize, RandomK, TopK

from .swarm import Options, build, make_folders
from .test_fairness import greeted
from .test_life import finish, until
from .test_refusals import address, running

PAIR = Options(size=50, rounds=1_000_000, neighbours=1, seconds=0.0)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_folders(tmp_path, 3)


def check_books(folders: list[Path]) -> None:
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.passed, report.problems
    assert report.units + report.in_flight == len(folders) * UNIT


def test_clocks_that_jump_by_years(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits, rates and deadlines follow a clock that nobody sets; only certificates have dates."""
    chance, real = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + chance.uniform(-1e9, 1e9))

    async def scenario() -> None:
        options = replace(PAIR, rounds=8, mode="sync", linger=10.0, neighbours=2)
        nodes = [build(folder, options) for folder in folders]
        ended = await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        assert all(outcome.finished for outcome in ended)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    check_books(folders)


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ENOSPC])
def test_a_disk_that_fails_in_mid_run(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """It ends with a sentence, nothing is lost, and it goes on when the disk is good again."""
    honest, broken = durable.replace_file, False

    def write(path: Path, content: bytes, mode: int = 0o666) -> None:
        if broken and "peer-0" in str(path):
            raise OSError(error, "the disk says no")
        honest(path, content, mode)

    monkeypatch.setattr(durable, "replace_file", write)

    async def scenario() -> None:
        nonlocal broken
        nodes = [build(folder, PAIR) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 3 for node in nodes))
        broken = True
        with pytest.raises(StoreError, match="the last commit stands"):
            await asyncio.wait_for(tasks[0], 30)
        nodes[0].store.close()
        broken = False
        nodes[0] = build(folders[0], PAIR)
        tasks[0] = asyncio.create_task(nodes[0].run())
        await until(lambda: nodes[0].metrics.counts["transfers"] > 3)
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    check_books(folders)


def test_a_share_that_was_deleted_ends_its_sender(folders: list[Path]) -> None:
    """The file belongs to the last commit: without it nothing else is sent or spent."""

    async def scenario() -> None:
        node = build(folders[0], PAIR)
        message, rest = node.learner.message(), node.learner.rest()
        await node.transactions.push(0, message, rest, {"peer-1": 1}, 1)
        next(node.store.folder.glob("share-*")).unlink()
        other = build(folders[1], PAIR)
        tasks = [asyncio.create_task(one.run()) for one in (node, other)]
        with pytest.raises(StoreError, match=r"cannot read .* belongs to the last commit"):
            await asyncio.wait_for(tasks[0], 30)
        assert node.transactions.accounts.pushes == 1
        node.store.close()
        await finish(other, tasks=tasks[1:])

    asyncio.run(scenario())


def test_links_in_the_folder(folders: list[Path], tmp_path: Path) -> None:
    """A store and a roster elsewhere; a link where the socket goes is replaced, not followed."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folders[0] / SOCKET).symlink_to(precious)
    (tmp_path / "elsewhere").mkdir()
    (folders[0] / "store").symlink_to(tmp_path / "elsewhere")
    (folders[0] / ROSTER).rename(tmp_path / ROSTER)
    (folders[0] / ROSTER).symlink_to(tmp_path / ROSTER)
    (tmp_path / "elsewhere" / "offer-old").symlink_to(precious)

    async def scenario() -> None:
        async with running(folders[0]) as node:
            assert (await make_order(folders[0], Order(action="status")))["name"] == "peer-0"
            caller = await greeted(folders[0], node)
            assert (await caller.push()).word == "applied"
            await caller.channel.close()

    asyncio.run(scenario())
    assert precious.read_text() == "mine"
    assert (tmp_path / "elsewhere" / "peer.sqlite").exists()


@pytest.mark.parametrize("compression", [Quantize(bits=4), TopK(0.1), RandomK(0.1)], ids=str)
def test_codes_of_any_bytes_have_the_size_of_the_manifest(compression: Any) -> None:
    """A bomb would have to make more of few bytes than the manifest says; sizes come from there."""
    size = 5000
    coding = MessageCodec(compression, seed=1)
    manifest = Manifest.of({"u": np.zeros(size, dtype=np.float32)}, coding=coding)
    chance = np.random.default_rng(0)
    sizes = [n for n in range(4 * size + 64) if manifest.allows_size(n)]
    assert len(sizes) == 2  # whole, or coded
    tracemalloc.start()
    for _ in range(200):
        body = bytearray(chance.bytes(min(sizes)))
        body[0] = 1
        body[1:9] = np.float64(chance.choice([0.5, 1.0, 1e-300, 2.0, np.nan])).tobytes()
        with contextlib.suppress(QuiverError):
            leaves = manifest.unpack(body, Origin(0, 0))
            assert [leaf.shape for leaf in leaves.values()] == [(size,)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * 4 * size


@contextlib.contextmanager
def flood(where: str, threads: int) -> Iterator[list[int]]:
    """Connections that are opened and closed, or left open, as fast as the machine allows."""
    host, _, port = where.rpartition(":")
    opened, ended = [0], threading.Event()

    def attack() -> None:
        held: list[socket.socket] = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                one = socket.create_connection((host, int(port)), timeout=1)
                opened[0] += 1
                one.send(b"\x16\x03\x01")
                held.append(one)
            if len(held) > 100:
                held.pop(random.randrange(len(held))).close()
        for one in held:
            one.close()

    workers = [threading.Thread(target=attack) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield opened
    finally:
        ended.set()
        for worker in workers:
            worker.join()


@pytest.mark.slow
def test_a_flood_of_connections_by_strangers(folders: list[Path]) -> None:
    """A member that comes while it goes on is served; one that was there stays."""

    async def scenario() -> None:
        async with running(folders[0]) as node:
            there = await greeted(folders[0], node)
            with flood(address(folders[0]), threads=3) as opened:
                await asyncio.sleep(3.0)
                assert (await asyncio.wait_for(there.push(), 30)).word == "applied"
                late = None
                end = time.monotonic() + 60
                while late is None and time.monotonic() < end:
                    with contextlib.suppress(Exception):
                        late = await greeted(folders[0], node, "peer-2")
                assert late is not None
                assert (await asyncio.wait_for(late.push(), 30)).word == "applied"
                assert (await make_order(folders[0], Order(action="status")))["name"] == "peer-0"
            assert opened[0] > 300
            await there.channel.close()
            await late.channel.close()

    asyncio.run(scenario())
