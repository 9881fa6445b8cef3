"""Async peers of unlike speed: those who finish first neither drain nor leave the late ones."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.link import FINISHED

from .swarm import Options, build, make_folders
from .test_life import finish, until
from .test_refusals import PAYLOAD, Caller, address

ROUNDS = 12
QUICK = Options(size=20, rounds=ROUNDS, seconds=0.0, linger=60.0)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_folders(tmp_path, 3)


def audited(folders: list[Path]) -> Any:
    report = audit([read_statement(folder / "store") for folder in folders])
    assert report.passed, report.problems
    return report


def test_nobody_pushes_to_a_peer_that_has_had_its_last_round(folders: list[Path]) -> None:
    """A peer that starts when all others have finished keeps its mass, and takes what waited."""
    masses: dict[str, float] = {}

    async def scenario() -> None:
        nodes = [build(folder, QUICK) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes[:2]]
        await until(lambda: all(node.state == "finished" for node in nodes[:2]))
        # Not all is said yet: what they have for the late peer is still in their outboxes.
        assert not any(node.finished for node in nodes[:2])
        ended = await asyncio.wait_for(asyncio.gather(nodes[2].run(), *tasks), 60)
        assert all(outcome.finished for outcome in ended)
        links = nodes[2].transactions.accounts.links
        assert {peer: (link.sent, link.given) for peer, link in links.items()} == {
            "peer-0": (0, 0),
            "peer-1": (0, 0),
        }
        assert all(links[peer].taken > 0 for peer in links)
        masses.update({node.agreement.name: node.transactions.mass for node in nodes})
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    assert masses["peer-2"] > 1.0
    assert audited(folders).units == 3 * UNIT


def test_a_finished_peer_sends_back_what_others_train_with(folders: list[Path]) -> None:
    """A share that was on its way goes home; one of a last round, or of who leaves, stays."""

    async def scenario() -> None:
        node = build(folders[0], QUICK)
        task = asyncio.create_task(node.run())
        await until(lambda: node.state == "finished")
        caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
        await caller.hello(round=3)
        before = node.transactions.accounts.units
        early = await caller.push(PAYLOAD[:80], seq=1, round=3)
        assert (early.word, early.reason.split(":")[0]) == ("refused", FINISHED)
        assert node.transactions.accounts.units == before
        last = await caller.push(PAYLOAD[:80], seq=2, round=ROUNDS - 1)
        assert last.word == "applied"
        assert node.transactions.accounts.units == before + UNIT // 4
        await caller.hello(round=4, sent=2, acknowledged=2, leaving=True)
        assert (await caller.push(PAYLOAD[:80], seq=3, round=4)).word == "applied"
        assert node.transactions.accounts.units == before + UNIT // 2
        await caller.channel.close()
        await finish(node, tasks=[task])

    asyncio.run(scenario())


def test_what_is_sent_back_is_with_its_sender_again(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late peer hears nothing of the others' rounds, so that it pushes to them all the same."""

    async def scenario() -> None:
        nodes = [build(folder, QUICK) for folder in folders]
        late = nodes[2]
        monkeypatch.setattr(late, "past_last_round", set)
        tasks = [asyncio.create_task(node.run()) for node in nodes[:2]]
        await until(lambda: all(node.state == "finished" for node in nodes[:2]))
        await asyncio.wait_for(asyncio.gather(late.run(), *tasks), 60)
        links = late.transactions.accounts.links
        assert sum(link.sent for link in links.values()) > 2
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    report = audited(folders)
    assert report.units == 3 * UNIT
    sent = read_statement(folders[2] / "store").sent
    assert {one.status for one in sent if one.transfer.round < ROUNDS - 1} == {"refunded"}
    assert {one.status for one in sent if one.transfer.round == ROUNDS - 1} <= {"acknowledged"}


def test_finished_peers_stay_while_a_late_one_trains(folders: list[Path]) -> None:
    """It pushes nothing to them, so they ask; it goes on only once they know of its last round."""
    asked = 0

    async def scenario() -> None:
        nonlocal asked
        options = replace(QUICK, rounds=6, linger=5.0)
        nodes = [build(folder, options) for folder in folders]
        late, others = nodes[2], nodes[:2]
        train = late.learner.train

        def wait_and_train(round: int, active: bool, share: float, keep: bool) -> None:
            nonlocal asked
            end = time.monotonic() + 4 * options.linger
            while any(node.receiver.rounds.get("peer-2", 0) < round for node in others):
                assert time.monotonic() < end, f"nobody has asked for round {round}"
                time.sleep(0.01)
            asked += 1
            train(round, active, share, keep)

        late.learner.train = wait_and_train  # type: ignore[method-assign]
        tasks = [asyncio.create_task(node.run()) for node in others]
        await until(lambda: all(node.state == "finished" for node in others))
        ended = await asyncio.wait_for(asyncio.gather(late.run(), *tasks), 120)
        assert all(outcome.finished for outcome in ended)
        assert all("peer-2" in node.neighbours.done for node in others)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    assert asked == 6


def test_who_leaves_gives_to_those_who_still_train(folders: list[Path]) -> None:
    async def scenario() -> None:
        endless = replace(QUICK, rounds=1_000_000, seconds=0.01)
        nodes = [build(folder, endless) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 5 for node in nodes))
        nodes[2].receiver.note_round("peer-0", endless.rounds)  # one past its last round says so
        later = nodes[2].transactions.accounts.round + 2
        await until(lambda: nodes[2].transactions.accounts.round > later)
        await until(lambda: nodes[2].neighbours.is_free("peer-0"))
        before = nodes[2].transactions.accounts.link("peer-0").sent
        nodes[2].leave()
        outcome = await asyncio.wait_for(tasks[2], 60)
        assert outcome.left
        assert nodes[2].transactions.accounts.link("peer-0").sent == before
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    report = audited(folders)
    assert report.units + report.in_flight == 3 * UNIT
