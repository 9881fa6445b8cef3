"""Async peers with a bound on staleness: nobody runs ahead, and nobody waits without a reason."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.node import Node

from .swarm import Options, build, make_folders
from .test_life import finish, until

BOUND = 2


def test_a_bound_on_staleness_costs_no_deadline(tmp_path: Path) -> None:
    """With one receiver a round, a neighbour may not push here for long; it is asked instead."""
    folders = make_folders(tmp_path, 5)
    options = Options(
        size=20, rounds=25, neighbours=1, deadline=30.0, settings={"staleness": BOUND}
    )
    ahead: list[int] = []

    async def watched(nodes: list[Node]) -> None:
        while True:
            rounds = [node.transactions.accounts.round for node in nodes]
            if max(rounds) < 25:
                ahead.append(max(rounds) - min(rounds))
            await asyncio.sleep(0.002)

    async def scenario() -> None:
        nodes = [build(folder, options) for folder in folders]
        nodes[0].learner._seconds = 0.05  # a slow one, whom the others may not leave behind
        watching = asyncio.create_task(watched(nodes))
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 25)
        watching.cancel()
        assert not any(node.neighbours.absent for node in nodes)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    assert 1 <= max(ahead) <= BOUND + 1  # who has finished round t waits before it starts the next
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.passed, report.problems


def test_a_dead_neighbour_costs_one_deadline_in_all(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)
    options = Options(
        size=20, rounds=1000, neighbours=1, deadline=1.0, settings={"staleness": BOUND}
    )

    async def scenario() -> None:
        nodes = [build(folder, options) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 4 for node in nodes))
        await finish(nodes[2], tasks=tasks[2:])
        began, rounds = time.monotonic(), nodes[0].transactions.accounts.round
        await until(lambda: nodes[0].transactions.accounts.round > rounds + 20, 10)
        assert time.monotonic() - began < 8.0
        assert nodes[0].neighbours.absent == {"peer-2"}
        await finish(*nodes[:2], tasks=tasks[:2])

    asyncio.run(scenario())
