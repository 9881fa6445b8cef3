"""A member that takes and never gives back gets a bounded part; the honest go on exchanging."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.learner import mutual_neighbours
from quiverfl.topologies import directed_ring, random_push, ring

from .swarm import Options, build, make_folders
from .test_life import finish, until


def test_a_sink_does_not_drain_the_honest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, Options(size=20, seconds=0.005)) for folder in folders]
        monkeypatch.setattr(nodes[2].neighbours, "is_free", lambda peer: False)
        honest = nodes[:2]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(n.transactions.accounts.round > 100 for n in honest), 60)
        kept = sum(node.transactions.mass for node in honest)
        flying = sum(
            t.units / UNIT for n in honest for t in n.transactions.accounts.outbox.values()
        )
        print(f"kept {kept:.3f}, in flight {flying:.3f}")
        assert kept + flying > 0.8
        assert all("peer-2" in node.status()["overdrawn"] for node in honest)
        links = [nodes[0].transactions.accounts.link("peer-1").sent,
                 nodes[1].transactions.accounts.link("peer-0").sent]  # fmt: skip
        assert min(links) > 20  # and they have not stopped
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.passed, report.problems
    assert report.units + report.in_flight == 3 * UNIT


def test_honest_peers_reach_the_same_point_with_the_bound(tmp_path: Path) -> None:
    """Nobody trains; everybody's first z differs, and all come to the average."""
    folders = make_folders(tmp_path, 4)

    async def scenario() -> float:
        options = Options(size=20, seconds=0.002, rate=0.0, neighbours=1, rounds=120)
        nodes = []
        for number, folder in enumerate(folders):
            node = build(folder, options)
            node.transactions.memory.message["u"][:] = number
            nodes.append(node)
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        points = [n.transactions.memory.message["u"][0] / n.transactions.mass for n in nodes]
        for node in nodes:
            node.store.close()
        return float(np.ptp(points))

    assert asyncio.run(scenario()) < 0.01  # of 3 at the start


def test_the_bound_is_for_neighbours_that_push_back() -> None:
    """On a one-way ring nobody can give back to whom it gets from."""
    names = [f"peer-{number}" for number in range(4)]
    assert mutual_neighbours(random_push(clients=4, neighbors=1), names, 0) == set(names[1:])
    assert mutual_neighbours(directed_ring(clients=4), names, 0) == set()
    assert mutual_neighbours(ring(clients=4), names, 0) == {"peer-1", "peer-3"}
