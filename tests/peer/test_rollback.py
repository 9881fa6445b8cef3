"""An old store is found before it spends, also while the neighbour that remembers is down."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiverfl.peer.accounts import signing
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.link import RestoredBackup
from quiverfl.peer.node import Node

from .swarm import build, make_folders
from .test_life import ENDLESS, finish, until
from .test_refusals import Caller, address

OPTIONS = replace(ENDLESS, size=20, neighbours=1)
TRUSTING = replace(OPTIONS, settings={"trust_store": True})


def started(folder: Path, options: Any = OPTIONS) -> tuple[Node, asyncio.Task[Any]]:
    node = build(folder, options)
    return node, asyncio.create_task(node.run())


def test_a_restored_store_is_found_by_those_who_heard_of_it(tmp_path: Path) -> None:
    """peer-3 traded with peer-0 alone after its backup; then peer-0 goes down."""
    folders = make_folders(tmp_path, 4)
    here = folders[3] / "store"

    async def scenario() -> None:
        nodes, tasks = map(list, zip(*(started(folder) for folder in folders), strict=True))
        await until(lambda: all(node.transactions.accounts.round > 5 for node in nodes))
        await finish(*nodes[1:], tasks=tasks[1:])
        shutil.copytree(here, tmp_path / "backup")
        third, task = started(folders[3], TRUSTING)
        await until(lambda: third.metrics.counts["transfers"] > 1)
        spent = third.transactions.accounts.pushes
        await finish(third, tasks=[task])
        first, first_task = started(folders[1], TRUSTING)  # it hears of it from peer-0
        await until(lambda: first.transactions.known_pushes("peer-3") >= spent - 1)
        await finish(nodes[0], tasks=tasks[:1])
        second, second_task = started(folders[2])
        shutil.rmtree(here)
        shutil.copytree(tmp_path / "backup", here)
        restored = build(folders[3], OPTIONS)
        before = restored.transactions.accounts.pushes
        with pytest.raises(RestoredBackup, match="restored from a backup"):
            await asyncio.wait_for(restored.run(), 20)
        assert restored.transactions.accounts.pushes == before
        restored.store.close()
        await finish(first, second, tasks=[first_task, second_task])

    asyncio.run(scenario())


def test_a_peer_asks_before_it_spends(tmp_path: Path) -> None:
    """Started again with nobody there, it waits; two of three others are enough."""
    folders = make_folders(tmp_path, 4)

    async def scenario() -> None:
        nodes, tasks = map(list, zip(*(started(folder) for folder in folders), strict=True))
        await until(lambda: all(node.transactions.accounts.round > 3 for node in nodes))
        await finish(*nodes, tasks=tasks)
        alone, task = started(folders[0])
        await until(lambda: alone.state == "asking")
        before = alone.transactions.accounts
        await asyncio.sleep(1.0)
        assert alone.transactions.accounts.pushes == before.pushes
        assert alone.status()["state"] == "asking"
        second, second_task = started(folders[1])
        await asyncio.sleep(1.0)
        assert alone.transactions.accounts.pushes == before.pushes
        third, third_task = started(folders[2])
        await until(lambda: alone.transactions.accounts.pushes > before.pushes)
        await finish(alone, second, third, tasks=[task, second_task, third_task])

    asyncio.run(scenario())


def test_nobody_else_can_say_that_a_store_is_old(tmp_path: Path) -> None:
    """What a member claims to have heard counts in the peer's own hand only."""
    folders = make_folders(tmp_path, 2)

    async def scenario() -> None:
        node = build(folders[0], replace(OPTIONS, rounds=0, linger=60.0))
        task = asyncio.create_task(node.run())
        await until(lambda: node.state == "finished")
        caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
        store, agreed = node.store.meta("incarnation"), node.agreement.hash
        for folder, refused in ((folders[1], False), (folders[0], True)):
            papers = Identity.read(folder)
            clock = signing.sign_clock(papers, agreed, "peer-0", store, pushes=7)
            greeting = await caller.hello(clocks=[clock])
            assert ("restored from a backup" in greeting.refusal) is refused
        await caller.channel.close()
        with pytest.raises(RestoredBackup):
            await task
        node.store.close()

    asyncio.run(scenario())
