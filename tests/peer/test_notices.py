"""Evictions reach whoever was away, in the hands of those who decided."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.transactions import evict_offline
from quiverfl.peer.changes import MAX_STATEMENTS, open_eviction_log
from quiverfl.peer.context import Agreement
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.joining import join_store
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import EvictionNotice, Order

from .swarm import Quadratic, build, make_folders
from .test_life import ENDLESS, finish, until
from .test_rollback import started

AGREED, STORE = "a" * 64, "2" * 16


def signed(folder: Path, by: str, **changes: object) -> EvictionNotice:
    values = {"by": by, "about": "peer-2", "store": STORE, **changes}
    return signing.sign_statement(Identity.read(folder), AGREED, EvictionNotice(**values))


def test_a_majority_of_the_others_decides(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 4)
    roster = Roster.read(folders[0] / ROSTER)
    notices = open_eviction_log(AGREED, [])
    assert notices.hash == ""
    assert notices.add(signed(folders[0], "peer-0"), roster)
    assert notices.add(signed(folders[0], "peer-0"), roster) == ""  # said already
    assert notices.add(signed(folders[2], "peer-2"), roster)  # about itself: counts for nothing
    assert notices.add(signed(folders[0], "peer-1"), roster) == ""  # in another's name
    assert notices.add(EvictionNotice(by="peer-1", about="peer-2", store=STORE), roster) == ""
    assert list(notices.decisions(roster.names)) == []
    body = notices.add(signed(folders[1], "peer-1", ban=True), roster)
    assert body
    assert list(notices.decisions(roster.names)) == [("peer-2", STORE, False)]  # not to ban it
    assert notices.add(signed(folders[3], "peer-3", ban=True), roster)
    assert list(notices.decisions(roster.names))[-1] == ("peer-2", STORE, True)
    kept = [notice.model_dump_json() for notice in notices.statements()]
    assert open_eviction_log(AGREED, kept).hash == notices.hash
    for number in range(2 * MAX_STATEMENTS):  # nobody fills another's disk
        notices.add(signed(folders[0], "peer-0", store=f"{number:016x}"), roster)
    written = [n for n in notices.statements() if n.by == "peer-0"]
    assert len(written) == MAX_STATEMENTS


def test_who_was_away_hears_of_an_eviction_before_it_trades(tmp_path: Path) -> None:
    """peer-3 is down while peer-2 loses its disk, is evicted by the others and joins again."""
    folders = make_folders(tmp_path, 4)

    async def scenario() -> None:
        nodes, tasks = map(list, zip(*(started(folder) for folder in folders), strict=True))
        await until(lambda: all(node.transactions.accounts.round > 8 for node in nodes))
        await finish(*nodes[2:], tasks=tasks[2:])
        shutil.rmtree(folders[2] / "store")
        for node in nodes[:2]:
            await node.control.handle_order(Order(action="evict", peer="peer-2"))
        learner = Quadratic(2, 20)
        agreement = Agreement("test", "peer-2", "c" * 64, learner.manifest)
        roster = Roster.read(folders[2] / ROSTER)
        store = await join_store(folders[2] / "store", learner, agreement, roster, folders[2])
        store.close()
        back, back_task = started(folders[2])
        await until(lambda: back.metrics.counts["transfers"] > 3)
        away, away_task = started(folders[3])
        await until(lambda: away.transactions.accounts.link("peer-2").incarnation
                    == back.store.meta("incarnation"))  # fmt: skip
        await until(lambda: away.transactions.accounts.link("peer-2").sent > 1)
        await finish(*nodes[:2], back, away, tasks=[*tasks[:2], back_task, away_task])

    asyncio.run(scenario())
    statements = [read_statement(folder / "store") for folder in folders]
    report = audit(statements, is_genuine=signing.signature_check(Roster.read(folders[0] / ROSTER)))
    assert report.passed, report.problems


def test_an_evicted_store_hears_it_and_stops(tmp_path: Path) -> None:
    """Evicted while it was down, by peers of which one was down as well."""
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes, tasks = map(list, zip(*(started(folder) for folder in folders), strict=True))
        await until(lambda: all(node.transactions.accounts.round > 3 for node in nodes))
        await finish(*nodes[1:], tasks=tasks[1:])
        await nodes[0].control.handle_order(Order(action="evict", peer="peer-2"))
        evict_offline(folders[1] / "store", "peer-2")
        second, second_task = started(folders[1])  # signs what was done while it did not run
        await until(lambda: len(nodes[0].neighbours.evictions.statements()) == 2)
        evicted = build(folders[2], replace(ENDLESS, size=20, neighbours=1))
        with pytest.raises(QuiverError, match="most others have evicted this store"):
            await asyncio.wait_for(evicted.run(), 20)
        evicted.store.close()
        await finish(nodes[0], second, tasks=[tasks[0], second_task])

    asyncio.run(scenario())
