"""Members that join a run under way, by a change that all have signed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import AuditReport, audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT, Statement
from quiverfl.peer.accounts.store import Store
from quiverfl.peer.accounts.transactions import make_first_entry
from quiverfl.peer.changes import check_joins, granted_terms
from quiverfl.peer.link import wire
from quiverfl.peer.link.identity import Identity, issue_certificate
from quiverfl.peer.link.joining import join_store
from quiverfl.peer.link.roster import ROSTER, Member, Roster
from quiverfl.peer.link.wire import Amendment, Terms
from quiverfl.peer.node import Node

from .swarm import Options, Quadratic, build, free_ports, make_folders
from .test_commands import prepare, quiver, start
from .test_life import finish, until
from .test_requests import status, wait

ENDLESS = Options(size=50, rounds=1_000_000, seconds=0.01, deadline=20.0, settings={"founders": 3})


def grow_roster(folders: list[Path], name: str) -> Path:
    """Admit one more; its folder, and the roster in all."""
    root = folders[0].parent
    key = issue_certificate(root / "authority", name, root / name)
    roster = Roster.read(folders[0] / ROSTER)
    member = Member(name, f"127.0.0.1:{free_ports(1)[0]}", (key,))
    for folder in (*folders, root / name):
        replace(roster, members=(*roster.members, member)).write(folder / ROSTER)
    return root / name


async def join(folder: Path, like: Node) -> Store:
    roster = Roster.read(folder / ROSTER)
    number = roster.number(folder.name)
    agreement = replace(like.agreement, name=folder.name)
    learner = Quadratic(number, 50)
    return await join_store(folder / "store", learner, agreement, roster, folder, founders=3)


def audited(folders: list[Path]) -> AuditReport:
    is_genuine = signing.signature_check(Roster.read(folders[0] / ROSTER))
    report = audit([read_statement(folder / "store") for folder in folders], is_genuine=is_genuine)
    assert report.passed, report.problems
    return report


@pytest.mark.parametrize(
    ("mode", "grant"),
    [
        ("async", UNIT // 64),
        pytest.param("async", UNIT, marks=pytest.mark.slow),
        pytest.param("sync", UNIT // 64, marks=pytest.mark.slow),
        pytest.param("sync", UNIT, marks=pytest.mark.slow),
    ],
)
def test_a_member_joins_a_run_under_way(tmp_path: Path, mode: Any, grant: int) -> None:
    """All sign, it asks several for the model, and from its round on it is one of four."""
    folders = make_folders(tmp_path, 3)
    options = replace(ENDLESS, mode=mode)

    async def scenario() -> None:
        nodes = [build(folder, options) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        newcomer = grow_roster(folders, "peer-3")
        with pytest.raises(QuiverError, match="have not agreed yet that 'peer-3' joins"):
            await join(newcomer, nodes[0])
        since = max(node.transactions.accounts.round for node in nodes) + 12
        for node in nodes:
            await node.propose(Terms(since=since, joins=("peer-3",), grant=grant))
        await until(lambda: all(node.changes.growth() == [since] for node in nodes))
        (await join(newcomer, nodes[0])).close()
        fourth = build(newcomer, options)
        assert fourth.transactions.accounts.units == grant
        assert fourth.transactions.accounts.round >= since
        tasks.append(asyncio.create_task(fourth.run()))
        assert nodes[0].status()["members"] == 3
        await until(lambda: fourth.metrics.counts["transfers"] > 5, 90)
        await until(lambda: fourth.transactions.accounts.link("peer-0").taken > 0, 90)
        assert all(node.status()["members"] == 4 for node in (*nodes, fourth))
        assert nodes[0].graph(since).clients == 4
        assert nodes[0].graph(since - 1).clients == 3
        await finish(*nodes, fourth, tasks=tasks)

    asyncio.run(scenario())
    report = audited([*folders, tmp_path / "peer-3"])
    assert report.units + report.in_flight == 3 * UNIT + grant
    assert report.expected == 3 * UNIT + grant


def test_a_newcomer_cannot_grant_itself_more(tmp_path: Path) -> None:
    """Its own records say 1, those of the others a sixteenth: the audit names it."""
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        newcomer = grow_roster(folders, "peer-3")
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        since = max(node.transactions.accounts.round for node in nodes) + 12
        terms = Terms(since=since, joins=("peer-3",), grant=UNIT // 16)
        for node in nodes:
            await node.propose(terms)
        await until(lambda: all(node.changes.growth() == [since] for node in nodes))
        store = await join(newcomer, nodes[0])
        store.save_terms([terms.model_copy(update={"grant": UNIT})])
        store._database.execute("UPDATE entries SET units = ?, units_in = ?", (UNIT, UNIT))
        store._database.execute(
            "UPDATE account SET body = replace(body, ?, ?)", (str(UNIT // 16), str(UNIT))
        )
        store.close()
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    books = [read_statement(folder / "store") for folder in (*folders, tmp_path / "peer-3")]
    report = audit(books)
    assert report.culprits == ["peer-3"]
    assert report.error == UNIT - UNIT // 16


def test_the_running_peers_come_back_with_what_was_agreed(tmp_path: Path) -> None:
    """Stopped after the change and started again, they know their number without signatures."""
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        grow_roster(folders, "peer-3")
        since = max(node.transactions.accounts.round for node in nodes) + 6
        for node in nodes:
            await node.propose(Terms(since=since, joins=("peer-3",)))
        await until(lambda: all(node.transactions.accounts.round > since for node in nodes), 90)
        await finish(*nodes, tasks=tasks)
        again = [build(folder, ENDLESS) for folder in folders]
        assert [node.changes.members(since) for node in again] == [4] * 3
        assert [node.changes.members(since - 1) for node in again] == [3] * 3
        for node in again:
            node.store.close()

    asyncio.run(scenario())


def test_members_may_join_in_the_same_round_by_two_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph has a place for both, and nobody waits for signatures of those that joined."""
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        since = max(node.transactions.accounts.round for node in nodes) + 40
        for number in (3, 4):
            grow_roster(folders, f"peer-{number}")
            for node in nodes:
                await node.propose(Terms(since=since, joins=(f"peer-{number}",)))
            members = number + 1
            await until(lambda m=members: all(n.changes.members(since) == m for n in nodes))  # type: ignore[misc]
            await until(lambda m=members: all(n.graph(since).clients == m for n in nodes))  # type: ignore[misc]
        await until(lambda: all(node.transactions.accounts.round > since for node in nodes), 90)
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    assert "not agreed in time" not in caplog.messages


def test_one_member_alone_does_not_send_a_newcomer_ahead(tmp_path: Path) -> None:
    """It says that it is in a far round; the newcomer waits for another one to come there."""
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        newcomer = grow_roster(folders, "peer-3")
        for node in nodes:
            await node.propose(Terms(since=100_000, joins=("peer-3",)))
        await until(lambda: all(node.changes.growth() == [100_000] for node in nodes))
        honest = nodes[2].neighbours.compose_hello
        nodes[2].neighbours.compose_hello = (  # type: ignore[method-assign]
            lambda peer, protocol: honest(peer, protocol).model_copy(update={"round": 2**40})
        )
        (await join(newcomer, nodes[0])).close()
        fourth = build(newcomer, ENDLESS)
        tasks.append(asyncio.create_task(fourth.run()))
        await until(lambda: fourth.receiver.rounds.get("peer-2") == 2**40)
        heard = nodes[2].transactions.accounts.round
        await until(lambda: fourth.receiver.rounds.get("peer-0", 0) > heard + 10)
        assert (fourth.state, fourth.transactions.accounts.pushes) == ("joining", 0)
        await finish(*nodes, fourth, tasks=tasks)

    asyncio.run(scenario())


def test_nothing_is_taken_of_a_member_that_has_not_joined(tmp_path: Path) -> None:
    """It is in the roster, and has opened an account of its own accord."""
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        alone = replace(ENDLESS, settings={"founders": 4, "trust_store": True})
        early = build(grow_roster(folders, "peer-3"), alone)
        tasks.append(asyncio.create_task(early.run()))
        problem = "not all have agreed yet that it joins"
        await until(lambda: any(problem in p for p in early._problems().values()))
        assert [node.transactions.accounts.link("peer-3").taken for node in nodes] == [0] * 3
        await finish(*nodes, early, tasks=tasks)

    asyncio.run(scenario())
    audited(folders)


def test_a_newcomer_finds_changes_that_others_agreed_on_before_they_were_many(
    tmp_path: Path,
) -> None:
    """Two founders let two join; those have not signed that, and all four let a fifth join."""
    folders = make_folders(tmp_path, 2)
    for number in (2, 3, 4):
        folders.append(grow_roster(folders, f"peer-{number}"))
    roster = Roster.read(folders[0] / ROSTER)
    papers, agreement = [Identity.read(folder) for folder in folders], "a" * 64

    def sign(terms: Terms, *numbers: int) -> list[Amendment]:
        signed = [Amendment(by=f"peer-{number}", terms=terms) for number in numbers]
        return [
            signing.sign_statement(papers[number], agreement, one)
            for number, one in zip(numbers, signed, strict=True)
        ]

    longer, pair = Terms(since=5, rounds=99), Terms(since=10, joins=("peer-2", "peer-3"))
    fifth, alone = Terms(since=20, joins=("peer-4",)), Terms(since=15, joins=("peer-1",))
    told = [*sign(longer, 0, 1), *sign(pair, 0, 1), *sign(fifth, 0, 1, 2, 3), *sign(alone, 0)]
    assert granted_terms(told, "peer-4", agreement, roster, 2) == [longer, pair, fifth]
    with pytest.raises(QuiverError, match="have not agreed yet"):
        granted_terms([*sign(pair, 0, 1), *sign(fifth, 0, 1)], "peer-4", agreement, roster, 2)


def test_the_audit_knows_a_grant_that_those_who_left_have_not_heard_of() -> None:
    """Three have left before; two others, and the newcomer itself, know what it brings."""
    grant = UNIT // 2

    def book(name: str, units: int, **known: Any) -> Statement:
        entry = make_first_entry("join" if units == grant else "start", {}, units=units)
        return Statement(name, units, 0, [entry], [], [], 0.0, **known)

    grants = {"f": grant}
    left = [replace(book(name, UNIT), units=0) for name in "abc"]
    stayed = [book(name, UNIT, grants=grants) for name in "de"]
    report = audit([*left, *stayed, book("f", grant, grants=grants)])
    assert "f" not in report.culprits, report.problems


def test_only_the_next_of_the_roster_can_join() -> None:
    names = ["a", "b", "c", "d", "e"]
    check_joins(Terms(since=9, joins=("d",)), [], names, 3)
    check_joins(Terms(since=9, joins=("d", "e")), [], names, 3)
    first = Terms(since=9, joins=("d",))
    check_joins(Terms(since=9, joins=("e",)), [first], names, 3)
    cases: list[tuple[Terms, list[Terms], str]] = [
        (Terms(since=9, joins=("e",)), [], "the next of the roster after its first 3 is d, e"),
        (Terms(since=9, joins=("f",)), [first], "is e"),
        (Terms(since=8, joins=("e",)), [first], "others join in round 9"),
    ]
    for terms, decided, words in cases:
        with pytest.raises(QuiverError, match=words):
            check_joins(terms, decided, names, 3)


def test_changes_without_members_are_written_as_before() -> None:
    """A peer of the version before reads them, and they have the same signatures."""
    terms = Terms(since=5, rounds=9)
    assert wire.encode(terms) == b'{"since":5,"rounds":9,"lr":null}'
    amendment = Amendment(by="a", terms=terms)
    assert amendment.signed_text("x") == b'quiver amendment\0["x", "a", 5, 9, null]'
    joined = Terms(since=5, joins=("d",), grant=7)
    assert wire.decode(Terms, wire.encode(joined)) == joined
    assert b'["d"], 7]' in Amendment(by="a", terms=joined).signed_text("x")


@pytest.mark.slow
def test_a_third_ward_joins_as_documented(tmp_path: Path) -> None:
    """Processes and commands alone; the newcomer brings data of its own and half a unit."""
    folders = prepare(tmp_path, rounds=100_000)
    newcomer, authority = tmp_path / "ward-2", tmp_path / "ca"
    processes = [start(folder) for folder in folders]
    try:
        wait(lambda: all(int(str(status(f).get("round", 0))) > 2 for f in folders))
        address = f"127.0.0.1:{free_ports(1)[0]}"
        quiver("certs", "issue", authority, "ward-2", "--address", address)
        for folder in folders:
            (folder / ROSTER).write_bytes((authority / ROSTER).read_bytes())
        common = ("--config", tmp_path / "run.toml", "--roster", authority / ROSTER)
        with pytest.raises(QuiverError, match="has no part for it"):
            quiver("init", newcomer, *common, "--keys", authority / "ward-2")
        quiver("init", newcomer, *common, "--keys", authority / "ward-2", "--data", "digits")
        with pytest.raises(QuiverError, match="the next of the roster"):
            quiver("amend", folders[0], "--since", 10**4, "--join", "nobody")
        since = int(str(status(folders[0])["round"])) + 25
        for folder in folders:
            quiver("amend", folder, "--since", since, "--join", "ward-2", "--mass", 0.5)
        processes.append(start(newcomer, "--join"))
        wait(lambda: status(newcomer).get("members") == 3, 240)
        wait(lambda: status(newcomer)["counts"].get("transfers", 0) > 3, 240)
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(60) for process in processes]
    assert codes == [0, 0, 0], (newcomer / "log").read_text()[-2000:]
    text = quiver("audit", *folders, newcomer)
    assert "mass expected    2.500000" in text
    assert "error            0 units" in text
    command = [sys.executable, "-m", "quiverfl", "report", *map(str, (*folders, newcomer))]
    made = subprocess.run([*command, "--out", str(tmp_path / "report")], capture_output=True)
    assert made.returncode == 0, made.stderr
