"""What an operator does to a run without stopping it; and peers that only dial out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.folder import Outcome
from quiverfl.peer.link.roster import DIALS_OUT, ROSTER, Roster
from quiverfl.peer.link.wire import PROTOCOL, Terms
from quiverfl.peer.node import Node

from .swarm import Options, build, make_folders
from .test_life import ENDLESS, finish, until

SYNC = Options(size=20, rounds=6, mode="sync", seconds=0.0, deadline=20.0, linger=10.0)


async def ended(nodes: Sequence[Node], seconds: float = 60.0) -> list[Outcome]:
    outcomes = await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), seconds)
    for node in nodes:
        node.store.close()
    return outcomes


def exact(folders: Sequence[Path], complete: bool = True) -> None:
    is_genuine = signing.signature_check(Roster.read(folders[0] / ROSTER))
    report = audit([read_statement(folder / "store") for folder in folders], is_genuine=is_genuine)
    assert report.passed, report.problems
    assert report.complete == complete


def models(nodes: Sequence[Node]) -> list[np.ndarray]:
    return [node.transactions.memory.message["u"] for node in nodes]


# Two versions of the protocol


def test_two_versions_of_the_protocol_run_side_by_side(tmp_path: Path) -> None:
    """One peer speaks a newer version; it falls back to the one that the others know."""
    folders = make_folders(tmp_path, 3)
    heard: list[bytes] = []

    async def scenario() -> list[Node]:
        versions = (PROTOCOL, PROTOCOL + 1, PROTOCOL)
        nodes = [build(f, replace(SYNC, newest=v)) for f, v in zip(folders, versions, strict=True)]
        nodes[1].metrics.tap = heard.append
        assert all(outcome.finished for outcome in await ended(nodes))
        return nodes

    nodes = asyncio.run(scenario())
    exact(folders)
    greetings = [frame for frame in heard if b'"nonce"' in frame]
    newest, common = (f'"protocol":{PROTOCOL + n}'.encode() for n in (1, 0))
    assert any(newest in frame for frame in greetings)
    assert any(common in frame for frame in greetings)
    assert nodes[1].metrics.refusals == {}
    assert set(nodes[0].metrics.refusals) <= {"hello"}
    plain = make_folders(tmp_path / "plain", 3)

    async def same() -> list[Node]:
        nodes = [build(folder, SYNC) for folder in plain]
        await ended(nodes)
        return nodes

    for mixed, new in zip(models(nodes), models(asyncio.run(same())), strict=True):
        assert np.array_equal(mixed, new)


# Amendments


def test_a_run_is_extended_and_slowed_down_by_agreement(tmp_path: Path) -> None:
    """All sign the same terms; all change in the same round, as if it had been so planned."""
    terms = Terms(since=3, rounds=8, lr=0.05)

    def changed_at(node: Node) -> None:
        """The same by hand: what a plan from the beginning would have come to."""
        train = node.learner.train

        def training(round: int, *values: Any) -> None:
            node.learner.change_run(0.05 if round >= 3 else None, 8)
            train(round, *values)

        node.learner.train = training  # type: ignore[method-assign]

    async def agreed(folders: list[Path]) -> list[Node]:
        nodes = [build(folder, SYNC) for folder in folders]
        for node in nodes:
            await node.changes.propose(terms, 0)
        assert all(outcome.finished for outcome in await ended(nodes))
        return nodes

    async def planned(folders: list[Path]) -> list[Node]:
        nodes = [build(folder, replace(SYNC, rounds=8)) for folder in folders]
        for node in nodes:
            changed_at(node)
        await ended(nodes)
        return nodes

    folders = make_folders(tmp_path / "agreed", 3)
    one = asyncio.run(agreed(folders))
    exact(folders)
    assert [node.transactions.accounts.round for node in one] == [8, 8, 8]
    assert one[0].status()["amendments"] == ["from round 3: rounds = 8, lr = 0.05 (agreed)"]
    other = asyncio.run(planned(make_folders(tmp_path / "planned", 3)))
    for mine, theirs in zip(models(one), models(other), strict=True):
        assert np.array_equal(mine, theirs)


def test_what_one_member_does_not_sign_changes_nothing(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, replace(SYNC, deadline=0.5)) for folder in folders]
        for node in nodes[:2]:
            await node.changes.propose(Terms(since=2, rounds=100), 0)
        await ended(nodes)
        assert [node.transactions.accounts.round for node in nodes] == [6, 6, 6]
        told = "from round 2: rounds = 100 (not yet by peer-2)"
        assert nodes[0].status()["amendments"] == [told]

    asyncio.run(scenario())
    exact(folders)


def test_a_finished_run_is_taken_up_again_and_stays_so_after_a_restart(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 2)
    options = replace(SYNC, neighbours=1, rounds=2, linger=60.0)

    async def scenario() -> None:
        nodes = [build(folder, options) for folder in folders]
        nodes[1].stop()  # it is away: the other one waits for it
        await nodes[1].run()
        nodes[1].store.close()
        task = asyncio.create_task(nodes[0].run())
        again = build(folders[1], options)
        await again.changes.propose(Terms(since=2, rounds=5), 0)
        await nodes[0].changes.propose(Terms(since=2, rounds=5), 0)
        await asyncio.wait_for(asyncio.gather(task, again.run()), 60)
        assert again.transactions.accounts.round == 5
        for node in (nodes[0], again):
            node.store.close()
        later = build(folders[0], options)
        later.stop()
        await later.run()
        await later.apply_changes()
        assert later.settings.rounds == 5
        later.store.close()

    asyncio.run(scenario())
    exact(folders)


def test_terms_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        node = build(folders[0], SYNC)
        for terms, words in [
            (Terms(since=5), "nothing is to change"),
            (Terms(since=2, lr=0.1), "round 2 has begun here"),
            (Terms(since=5, rounds=4), "would be over before"),
            (Terms(since=7, lr=0.1), "ends after 6 rounds"),
        ]:
            with pytest.raises(QuiverError, match=words):
                await node.changes.propose(terms, 2)
        assert node.status()["amendments"] == []
        node.store.close()

    asyncio.run(scenario())


# Peers that only dial out


def hidden(folders: list[Path], *names: str) -> None:
    """These members cannot be called."""
    roster = Roster.read(folders[0] / ROSTER)
    members = tuple(replace(m, address=DIALS_OUT) if m.name in names else m for m in roster.members)
    for folder in folders:
        replace(roster, members=members).write(folder / ROSTER)


def test_a_peer_behind_nat_fetches_its_shares(tmp_path: Path) -> None:
    """It is never called, and computes what it would compute if it were."""

    async def run(folders: list[Path]) -> list[Node]:
        nodes = [build(folder, SYNC) for folder in folders]
        assert all(outcome.finished for outcome in await ended(nodes))
        return nodes

    open_to_all, behind = make_folders(tmp_path / "a", 3), make_folders(tmp_path / "b", 3)
    hidden(behind, "peer-1")
    one, other = asyncio.run(run(open_to_all)), asyncio.run(run(behind))
    exact(behind)
    for mine, theirs in zip(models(one), models(other), strict=True):
        assert np.array_equal(mine, theirs)
    assert other[1].metrics.counts["transfers"] > 0


def test_two_that_cannot_be_called_trade_by_way_of_the_others(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 4)
    hidden(folders, "peer-1", "peer-3")

    async def scenario() -> None:
        nodes = [build(folder, SYNC) for folder in folders]
        assert all(outcome.finished for outcome in await ended(nodes))
        assert "peer-3" not in nodes[1].transactions.accounts.links

    asyncio.run(scenario())
    exact(folders)


def test_a_peer_behind_nat_that_restarts_loses_nothing(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)
    hidden(folders, "peer-2")

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(node.run()) for node in nodes]
        for _ in range(2):
            taken = nodes[2].metrics.counts
            await until(lambda taken=taken: taken["received_bytes"] > 2000)
            await finish(nodes[2], tasks=[tasks[2]])
            nodes[2] = build(folders[2], ENDLESS)
            tasks[2] = asyncio.create_task(nodes[2].run())
        nodes[2].leave()  # it gives everything away, and the others hear of it
        assert (await asyncio.wait_for(tasks[2], 30)).left
        await finish(*nodes[:2], tasks=tasks[:2])
        nodes[2].store.close()

    asyncio.run(scenario())
    exact(folders)


# Revocation


def test_a_revoked_member_is_shut_out_of_connections_it_has_open(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.metrics.counts["transfers"] > 3 for node in nodes))
        roster = Roster.read(folders[0] / ROSTER).without_keys("peer-2")
        for folder in folders[:2]:
            roster.write(folder / ROSTER)
        await until(lambda: all(node.metrics.refusals["identity"] > 0 for node in nodes[:2]))
        taken = [node.transactions.accounts.link("peer-2").received for node in nodes[:2]]
        rounds = [node.transactions.accounts.round for node in nodes[:2]]
        await until(
            lambda: all(
                n.transactions.accounts.round > r + 5
                for n, r in zip(nodes[:2], rounds, strict=True)
            )
        )
        after = [node.transactions.accounts.link("peer-2").received for node in nodes[:2]]
        assert after == taken
        assert "was revoked" in str(nodes[2].status()["problems"])
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    exact(folders)
