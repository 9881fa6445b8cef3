"""Shares and receipts are signed, so the audit can say whose records are wrong."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import AuditReport, audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT, Entry, Received, Sent, Statement
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.roster import ROSTER, Roster

from .swarm import Options, build, make_folders
from .test_life import until
from .test_refusals import Caller, address, running


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three peers after four sync rounds."""
    folders = make_folders(tmp_path_factory.mktemp("run"), 3)

    async def scenario() -> None:
        options = Options(size=20, rounds=4, mode="sync", seconds=0.0, linger=5.0)
        nodes = [build(folder, options) for folder in folders]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 40)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    return folders


def checked(folders: list[Path], change: Callable[[dict[str, Statement]], None]) -> AuditReport:
    statements = {folder.name: read_statement(folder / "store") for folder in folders}
    change(statements)
    roster = Roster.read(folders[0] / ROSTER)
    return audit(statements.values(), is_genuine=signing.signature_check(roster))


def test_every_share_and_every_receipt_is_signed(finished: list[Path]) -> None:
    report = checked(finished, lambda statements: None)
    assert report.passed, report.problems
    assert report.transfers == 24
    assert report.signatures == 48
    assert audit([read_statement(f / "store") for f in finished]).signatures is None


def test_mass_minted_in_a_store_is_found_and_its_owner_named(
    finished: list[Path], tmp_path: Path
) -> None:
    """1,000 units of mass in the opening balance, and everything after it made to fit."""
    store = tmp_path / "peer-1"
    store.mkdir()
    for file in (finished[1] / "store").iterdir():
        if file.is_file():
            (store / file.name).write_bytes(file.read_bytes())
    database = sqlite3.connect(store / "peer.sqlite")
    extra = 1000 * UNIT
    database.execute("UPDATE entries SET units = units + ?", (extra,))
    database.execute("UPDATE entries SET units_in = units_in + ? WHERE number = 1", (extra,))
    body = json.loads(database.execute("SELECT body FROM account").fetchone()[0])
    body["units"] += extra
    database.execute("UPDATE account SET body = ?", (json.dumps(body),))
    database.commit()
    database.close()
    report = checked(
        finished, lambda statements: statements.update({"peer-1": read_statement(store)})
    )
    assert report.culprits == ["peer-1"]
    assert report.error == extra
    assert any("opened with 1001" in problem for problem in report.problems)
    assert "wrong records    peer-1" in list(report.lines())


def _settled(statement: Statement, units: int) -> Statement:
    """Records that add up again after somebody has changed what moved."""
    last = statement.entries[-1]
    entry = Entry(
        "absorb", last.round, last.units + units, max(units, 0), max(-units, 0),
        last.total, 0.0, 0.0, 0.0, last.scale,
    )  # fmt: skip
    return replace(statement, units=statement.units + units, entries=[*statement.entries, entry])


def _invents_a_receipt(statements: dict[str, Statement]) -> None:
    statement = statements["peer-1"]
    taken = statement.received[-1].transfer
    made_up = Received(replace(taken, seq=taken.seq + 1), "")
    statements["peer-1"] = _settled(
        replace(statement, received=[*statement.received, made_up]), taken.units
    )


def _inflates_a_receipt(statements: dict[str, Statement]) -> None:
    statement = statements["peer-1"]
    last = statement.received[-1]
    more = Received(replace(last.transfer, units=last.transfer.units + 5), "")
    statements["peer-1"] = _settled(
        replace(statement, received=[*statement.received[:-1], more]), 5
    )


def _forgets_what_it_took(statements: dict[str, Statement]) -> None:
    statement = statements["peer-1"]
    kept, last = statement.received[:-1], statement.received[-1]
    statements["peer-1"] = _settled(replace(statement, received=kept), -last.transfer.units)


def _spends_from_an_old_store(statements: dict[str, Statement]) -> None:
    statement = statements["peer-1"]
    kept, last = statement.sent[:-1], statement.sent[-1]
    statements["peer-1"] = _settled(replace(statement, sent=kept), last.transfer.units)


def _acknowledges_in_its_own_name(statements: dict[str, Statement]) -> None:
    """It claims to have given away what nobody took."""
    statement = statements["peer-1"]
    last = statement.sent[-1]
    gift = Sent(replace(last.transfer, seq=last.transfer.seq + 1), "acknowledged")
    statements["peer-1"] = _settled(
        replace(statement, sent=[*statement.sent, gift]), -last.transfer.units
    )


@pytest.mark.parametrize(
    "forge",
    [
        _invents_a_receipt,
        _inflates_a_receipt,
        _forgets_what_it_took,
        _spends_from_an_old_store,
        _acknowledges_in_its_own_name,
    ],
)
def test_the_audit_names_who_broke_the_books(
    finished: list[Path], forge: Callable[[dict[str, Statement]], None]
) -> None:
    report = checked(finished, forge)
    assert not report.passed
    assert report.culprits == ["peer-1"], report.problems


def test_what_a_dropped_key_signed_stays_signed(finished: list[Path]) -> None:
    roster = Roster.read(finished[0] / ROSTER).with_key("peer-1", "a" * 64, keep_old=False)
    roster.write(finished[0].parent / "rotated.toml")
    again = Roster.read(finished[0].parent / "rotated.toml")
    statements = [read_statement(folder / "store") for folder in finished]
    assert audit(statements, is_genuine=signing.signature_check(again)).passed
    transfer = statements[0].received[0].transfer
    assert transfer.sender == "peer-1"
    assert not signing.check_signature(
        again, "share", transfer, statements[0].agreement
    )  # but it is not let in


def test_shares_that_their_sender_did_not_sign_are_denied(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)
    other = Identity.read(folders[2])

    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            before = node.transactions.accounts
            good = caller.announcement(b"x" * 400)
            for proof in (
                "",
                good.proof[:-2] + "00",
                good.proof.replace(good.proof[34:100], other.point),
            ):
                reply = await caller.push(proof=proof)
                assert (reply.word, reply.reason[:9]) == ("denied", "signature")
            caller.papers = other  # signed by another member
            assert (await caller.push()).reason.startswith("signature")
            assert node.transactions.accounts == before
            assert node.metrics.refusals["signature"] == 4
            await caller.channel.close()

    asyncio.run(scenario())


def test_a_receipt_that_is_not_signed_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour that takes shares and signs nothing: they stay in the outbox."""
    folders = make_folders(tmp_path, 2)

    async def scenario() -> None:
        options = Options(size=20, neighbours=1)
        nodes = [build(folder, options) for folder in folders]
        monkeypatch.setattr(nodes[1].receiver, "_sign_receipt", lambda word, transfer: "")
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: "receipt" in nodes[0].status()["problems"].get("peer-1", ""))
        assert nodes[0].transactions.accounts.outbox["peer-1"].seq == 1
        for node in nodes:
            node.stop()
        await asyncio.gather(*tasks)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
