"""A waiting peer is woken by what it waits for; it does not look again and again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from .swarm import Options, build, make_folders
from .test_life import finish, until

PAIR = Options(size=20, neighbours=1, seconds=0.0)


def test_a_wait_without_news_looks_twice_at_most(tmp_path: Path) -> None:
    """Once when it begins, and once more if something came between."""
    folder = make_folders(tmp_path, 2)[0]
    looks = 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return False

    async def scenario() -> None:
        node = build(folder, PAIR)
        await node.wait_until(look, 0.6)
        node.store.close()

    asyncio.run(scenario())
    assert looks <= 2


def test_every_kind_of_news_ends_a_wait(tmp_path: Path) -> None:
    """An acknowledgement, a share, a greeting, a stop: each long before the deadline of an hour."""
    folders = make_folders(tmp_path, 2)
    deadline = replace(PAIR, rounds=10**6, deadline=3600.0)

    async def scenario() -> None:
        nodes = [build(folder, deadline) for folder in folders]
        one, other = nodes
        greeted = asyncio.create_task(one.wait_until(lambda: "peer-1" in one.neighbours.greeted))
        shared = asyncio.create_task(one.wait_until(lambda: bool(one.receiver.staged)))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await asyncio.wait_for(greeted, 30)
        await asyncio.wait_for(shared, 30)
        await until(lambda: one.metrics.counts["transfers"] > 3)
        await finish(one, other, tasks=tasks)
        alone = build(folders[0], deadline)
        stopped = asyncio.create_task(alone.wait_until(lambda: False))
        await asyncio.sleep(0)
        alone.stop()
        await asyncio.wait_for(stopped, 30)
        alone.store.close()

    asyncio.run(scenario())


def test_a_wait_for_an_acknowledgement_ends_with_it(tmp_path: Path) -> None:
    """Nothing else happens at that moment that could wake the waiting peer."""
    folder = make_folders(tmp_path, 2)[0]

    async def scenario() -> None:
        node = build(folder, PAIR)
        message, rest = node.learner.message(), node.learner.rest()
        (share,) = await node.transactions.push(0, message, rest, {"peer-1": 1}, 1)
        wait = asyncio.create_task(
            node.wait_until(lambda: node.neighbours.is_free("peer-1"), 3600.0)
        )
        await asyncio.sleep(0)
        assert not wait.done()
        await node.transactions.acknowledge(share)
        await asyncio.wait_for(wait, 30)
        node.store.close()

    asyncio.run(scenario())
