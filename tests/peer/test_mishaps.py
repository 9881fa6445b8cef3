"""Small troubles of a disk, a neighbour or an operator: none of them ends a run or misleads."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quiverfl.cli.peer_demo import Demo, write_report
from quiverfl.cli.peer_owner import format_status
from quiverfl.peer.accounts import ledger
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT, Transfer
from quiverfl.peer.accounts.store import NoStore, Store
from quiverfl.peer.accounts.transactions import Transactions
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.link.messages import Manifest, sum_message
from quiverfl.peer.link.wire import Order
from quiverfl.peer.setup import assemble

from .swarm import Options, Swarm, build, make_folders
from .test_life import ENDLESS, finish, until
from .test_store import U, V, create, push


def test_a_file_that_cannot_be_removed_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create(tmp_path / "s")
    unlink = Path.unlink

    def broken(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("state-"):
            raise OSError(errno.EIO, "Input/output error")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", broken)
        push(store)
    assert store.accounts().units == UNIT // 2
    assert len(list((tmp_path / "s").glob("state-*"))) == 2
    transfer = store.accounts().outbox["b"]
    store.acknowledge(ledger.acknowledge(store.accounts(), transfer), transfer)
    assert len(list((tmp_path / "s").glob("state-*"))) == 1  # it goes with the next commit
    store.close()
    assert audit([read_statement(tmp_path / "s")]).passed


def test_a_denied_share_is_tried_again_ever_more_rarely(tmp_path: Path) -> None:
    """The greeting is good, the share is not: a number that was used for something else."""
    folders = make_folders(tmp_path, 2)

    async def scenario() -> None:
        options = replace(ENDLESS, neighbours=1, limits={"retry_cap": 30.0})
        nodes = [build(folder, options) for folder in folders]
        learner = nodes[0].learner
        await nodes[0].transactions.push(0, learner.message(), learner.rest(), {"peer-1": 1}, 1)
        other = Transfer("peer-0", "peer-1", 1, 0, 5, "f" * 64, 0.0)
        await nodes[1].transactions.refuse(other, "not finite")
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: nodes[0].metrics.counts["retries"] >= 2)
        await asyncio.sleep(3.0)
        assert 2 <= nodes[0].metrics.counts["retries"] <= 7  # after 0.2, 0.4, 0.8, 1.6 s …
        assert "denied" in nodes[0].status()["problems"]["peer-1"]
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())


def test_a_refused_share_whose_receiver_is_evicted_is_written_off(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    manifest = Manifest.of(U)
    transactions = Transactions(store, manifest)

    async def scenario() -> None:
        await transactions.register_store("b", "first store")
        refused = (await transactions.push(0, U, V, {"b": 1}, 1))[0]
        await transactions.evict("b")
        share = Transfer("c", "a", 1, 0, 8, hashlib.sha256(b"").hexdigest(), sum_message(U))
        await transactions.absorb([(share, U)], [refused], finish=True)

    asyncio.run(scenario())
    assert transactions.accounts.units == UNIT // 2 + 8
    assert transactions.accounts.written_off == UNIT // 2
    store.close()
    report = audit([read_statement(tmp_path / "s")])
    assert report.passed, report.problems


def test_an_eviction_forgets_the_refund_that_was_due(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 2)

    async def scenario() -> None:
        options = replace(ENDLESS, neighbours=1)
        nodes = [build(folder, options) for folder in folders]
        refused = (
            await nodes[0].transactions.push(
                0, nodes[0].learner.message(), nodes[0].learner.rest(), {"peer-1": 1}, 1
            )
        )[0]
        sender = nodes[0].neighbours.senders["peer-1"]
        sender.refund = refused
        await nodes[0].control.handle_order(Order(action="evict", peer="peer-1"))
        assert sender.refund is None
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    one = Swarm(tmp_path, 2, Options(rounds=3, mode="sync", size=50, neighbours=1))
    yield one
    one.close()


@pytest.mark.parametrize("point", ["before start files", "before start commit"])
def test_a_peer_killed_while_its_store_is_made_starts_again(swarm: Swarm, point: str) -> None:
    swarm.start("peer-0", replace(swarm.options, crash_at=point))
    swarm.processes["peer-0"].join(30)
    assert swarm.processes["peer-0"].exitcode == 137
    assert (swarm.folders["peer-0"] / "store").exists()
    with pytest.raises(NoStore, match="never finished"):
        Store.open(swarm.folders["peer-0"] / "store")
    swarm.start_all()
    swarm.join_all(40)
    report = swarm.audit()
    assert report.passed, report.problems
    assert report.units == 2 * UNIT


def test_the_report_of_a_demo_shows_the_masses_of_its_audit(tmp_path: Path) -> None:
    demo = Demo(make_swarm(tmp_path / "demo", 3, 3, "async"))

    async def scenario() -> None:
        nodes = [await assemble(folder) for folder in demo.folders.values()]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 90)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    statements = [read_statement(folder.store) for folder in demo.folders.values()]
    report = audit(statements)
    text = write_report(tmp_path, demo, statements, report, 1.0).read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| peer-")]
    masses = [float(row[3]) for row in rows]
    assert masses == [round(s.units / UNIT, 4) for s in statements]
    assert f"| in flight | | {report.in_flight / UNIT:.4f} |" in text
    assert sum(masses) + report.in_flight / UNIT == pytest.approx(3.0, abs=2e-4)


def test_status_is_written_for_people() -> None:
    found = {
        "state": "waiting",
        "round": 12,
        "mass": 1.0833333333333333,
        "commit_seconds": 6.051999662304297e-06,
        "outbox_age_seconds": 93.25,
        "metrics": {"accuracy": 0.91234567, "loss": 1.5e-07},
        "counts": {"sent_bytes": 45_123_456, "retries": 3},
        "refusals": {},
        "absent": ["north"],
        "problems": {"south": "no answer"},
    }
    assert list(format_status(found)) == [
        ("state", "waiting"),
        ("round", "12"),
        ("mass", "1.0833"),
        ("commit", "0.0 s"),
        ("outbox age", "93.2 s"),
        ("accuracy", "0.9123"),
        ("loss", "0.0000"),
        ("sent", "45.1 MB"),
        ("retries", "3"),
        ("refusals", "none"),
        ("absent", "north"),
        ("problems", "south: no answer"),
    ]
