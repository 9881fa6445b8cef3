"""Coming, going, stalling, key changes and old backups."""

from __future__ import annotations

import asyncio
import datetime
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.context import Agreement
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.link import identity
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.joining import join_store
from quiverfl.peer.link.link import RestoredBackup, Unreachable, open_channel
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import Order
from quiverfl.peer.node import Node
from quiverfl.peer.setup import assemble

from .swarm import Options, Quadratic, build, make_folders
from .test_refusals import address


async def until(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


async def finish(*nodes: Node, tasks: list[asyncio.Task[Any]]) -> None:
    for node in nodes:
        node.stop()
    await asyncio.gather(*tasks, return_exceptions=True)
    for node in nodes:
        node.store.close()


def statements(folders: list[Path]) -> list[Any]:
    return [read_statement(folder / "store") for folder in folders]


ENDLESS = Options(size=50, rounds=1_000_000, seconds=0.01, linger=10.0)


def test_a_finished_peer_does_not_end_before_a_busy_one_knows(tmp_path: Path) -> None:
    """Who has finished and never hears that the other has, too, stays up for minutes."""
    folders = make_folders(tmp_path, 2)
    tried = 0

    async def scenario() -> None:
        options = Options(size=5, rounds=2, neighbours=1, mode="sync", linger=20.0)
        nodes = [build(folder, options) for folder in folders]
        contact = nodes[0].neighbours.senders["peer-1"].link
        honest = contact.greet

        async def greet(timeout: float | None = None) -> Any:
            nonlocal tried
            if nodes[0].finished:
                await until(lambda: "peer-1" in nodes[0].neighbours.done)
                tried += 1
                if tried < 3:
                    raise Unreachable("DEADLINE_EXCEEDED: busy")
            return await honest(timeout)

        contact.greet = greet  # type: ignore[method-assign]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    assert tried >= 3


def test_a_sync_peer_that_is_left_behind_is_not_drained(tmp_path: Path) -> None:
    """It starts when the others have given up waiting for it, and are in later rounds."""
    folders = make_folders(tmp_path, 3)
    options = Options(size=5, rounds=30, seconds=0.05, mode="sync", deadline=0.5, linger=20.0)

    async def scenario() -> None:
        nodes = [build(folder, options) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes[:2]]
        await until(lambda: all(n.transactions.accounts.round > 5 for n in nodes[:2]), 60)
        await asyncio.wait_for(asyncio.gather(nodes[2].run(), *tasks), 120)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    lines = (folders[2] / "history.jsonl").read_text().splitlines()
    masses = [json.loads(line)["mass"] for line in lines]
    assert len(masses) == 30
    assert min(masses) > 0.01, str(masses)
    report = audit(statements(folders))
    assert (report.problems, report.units) == ([], 3 * UNIT)


def test_a_leaving_peer_gives_everything_away(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 4)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 3 for node in nodes))
        nodes[0].leave()
        outcome = await asyncio.wait_for(tasks[0], 20)
        assert outcome.left
        gone = nodes[0].transactions.accounts.round
        await until(lambda: nodes[1].transactions.accounts.round > gone + 3)
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    found = statements(folders)
    assert found[0].units == 0
    report = audit(found)
    assert report.passed, report.problems
    rest = audit(found[1:])  # the leaver's books are not even needed
    assert rest.passed, rest.problems
    assert (report.missing, rest.missing) == ([], ["peer-0"])
    assert report.units + report.in_flight == 4 * UNIT
    assert (folders[0] / "store" / "personal.safetensors").exists()


def test_a_lost_peer_is_evicted_and_joins_with_a_new_store(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 3 for node in nodes))
        await finish(nodes[2], tasks=tasks[2:])
        shutil.rmtree(folders[2] / "store")  # its disk is lost
        handlers = [node.control for node in nodes[:2]]
        for handler in handlers:
            answer = await handler.handle_order(Order(action="evict", peer="peer-2"))
            assert answer["evicted"] == "peer-2"
        with pytest.raises(QuiverError, match="another member"):
            await handlers[0].handle_order(Order(action="evict", peer="nobody"))
        learner = Quadratic(2, 50)
        agreement = Agreement("test", "peer-2", "c" * 64, learner.manifest)
        roster = Roster.read(folders[2] / ROSTER)
        store = await join_store(folders[2] / "store", learner, agreement, roster, folders[2])
        assert store.accounts().units == UNIT
        pulled = store.memory().message["u"]
        assert np.abs(pulled).max() > 0
        store.close()
        back = build(folders[2], ENDLESS)
        task = asyncio.create_task(back.run())
        await until(lambda: back.metrics.counts["transfers"] > 3 and back.receiver.rounds)
        await finish(*nodes[:2], back, tasks=[*tasks[:2], task])

    asyncio.run(scenario())
    report = audit(statements(folders))
    assert report.passed, report.problems
    assert any("~" in name for name in report.evicted)  # the lost incarnation is on record
    assert report.complete  # which needs no store of it


def test_a_new_store_under_an_old_name_is_not_accepted(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        await finish(nodes[2], tasks=tasks[2:])
        shutil.rmtree(folders[2] / "store")
        back = build(folders[2], ENDLESS)  # started anew by mistake: a second μ = 1
        task = asyncio.create_task(back.run())
        await until(lambda: any(node.metrics.refusals["hello"] for node in nodes[:2]))
        assert not back.metrics.counts["transfers"]
        await finish(*nodes[:2], back, tasks=[*tasks[:2], task])

    asyncio.run(scenario())


def test_a_restored_backup_is_noticed_before_it_does_harm(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        await finish(nodes[2], tasks=tasks[2:])
        shutil.copytree(folders[2] / "store", tmp_path / "backup")
        second = build(folders[2], ENDLESS)
        task = asyncio.create_task(second.run())
        await until(lambda: second.metrics.counts["transfers"] > 3)
        await finish(second, tasks=[task])
        shutil.rmtree(folders[2] / "store")
        shutil.copytree(tmp_path / "backup", folders[2] / "store")
        restored = build(folders[2], ENDLESS)
        before = restored.transactions.accounts.units
        with pytest.raises(RestoredBackup, match="restored from a backup"):
            await restored.run()
        assert restored.transactions.accounts.units == before
        restored.store.close()
        await finish(*nodes[:2], tasks=tasks[:2])

    asyncio.run(scenario())


def test_a_key_is_rotated_in_mid_run(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 3)
    roster = Roster.read(folders[0] / ROSTER)

    async def scenario() -> None:
        nodes = [build(folder, ENDLESS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.transactions.accounts.round > 2 for node in nodes))
        key = identity.issue_certificate(tmp_path / "authority", "peer-1", tmp_path / "fresh")
        for folder in folders:
            roster.with_key("peer-1", key).write(folder / ROSTER)
        for name in (identity.KEY, identity.CERTIFICATE):
            shutil.copy(tmp_path / "fresh" / name, folders[1] / name)
        for node in nodes:  # as if the network had hiccuped: everybody connects anew
            for sender in node.neighbours.senders.values():
                await sender.link.disconnect()
        counts = [node.metrics.counts["transfers"] for node in nodes]
        await until(
            lambda: all(
                node.metrics.counts["transfers"] > count + 5
                for node, count in zip(nodes, counts, strict=True)
            )
        )
        for folder in folders:  # now the old key is dropped: only the new one is good
            roster.with_key("peer-1", key, keep_old=False).write(folder / ROSTER)
        counts = [node.metrics.counts["transfers"] for node in nodes]
        await until(lambda: nodes[1].metrics.counts["transfers"] > counts[1] + 5)
        assert not any(node.metrics.refusals["identity"] for node in nodes)
        await finish(*nodes, tasks=tasks)

    asyncio.run(scenario())
    report = audit(statements(folders))
    assert report.passed, report.problems
    assert report.units + report.in_flight == 3 * UNIT


def test_clocks_and_expiry(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 1)
    papers = Identity.read(folders[0])
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    papers.check("peer-0", now - hour)  # a clock an hour off does no harm
    papers.check("peer-0", now + hour)
    with pytest.raises(QuiverError, match=r"expired on .* certs rotate peer-0"):
        papers.check("peer-0", now + datetime.timedelta(days=400))
    with pytest.raises(QuiverError, match="set this machine's clock"):
        papers.check("peer-0", now - datetime.timedelta(days=3))
    with pytest.raises(QuiverError, match="this peer is 'peer-1'"):
        papers.check("peer-1")
    identity.create_authority(tmp_path / "other", "test")
    stranger = Identity(
        (tmp_path / "other" / "ca.pem").read_bytes(), papers.certificate, papers.key
    )
    with pytest.raises(QuiverError, match="not issued by this run's authority"):
        stranger.check("peer-0")
    (folders[0] / identity.KEY).chmod(0o644)
    with pytest.raises(QuiverError, match="chmod 600"):
        Identity.read(folders[0])


def test_an_hour_between_clocks_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys made by a clock that is an hour ahead of those that check them, TLS included."""
    usual = identity.SLACK
    monkeypatch.setattr(identity, "SLACK", usual - datetime.timedelta(hours=1))
    folders = make_folders(tmp_path, 2)
    monkeypatch.setattr(identity, "SLACK", usual + datetime.timedelta(hours=1))  # and one behind
    identity.issue_certificate(tmp_path / "authority", "late", tmp_path / "late")

    async def scenario() -> None:
        options = Options(size=50, rounds=3, neighbours=1, mode="sync", linger=5.0)
        nodes = [build(folder, options) for folder in folders]
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 30)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    report = audit(statements(folders))
    assert report.passed, report.problems
    assert report.transfers == 6
    Identity.read(tmp_path / "late").check("late")


def test_an_expired_certificate_is_not_answered(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 2)
    identity.issue_certificate(tmp_path / "authority", "peer-1", tmp_path / "expired", days=-0.5)

    async def scenario() -> None:
        node = build(folders[0], Options(size=50, rounds=0, neighbours=1, linger=60.0))
        task = asyncio.create_task(node.run())
        await until(lambda: node.state == "finished")
        papers = Identity.read(tmp_path / "expired")
        channel = open_channel(address(folders[0]), "peer-0", papers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/quiver.Peer/Hello")(b"{}", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close()
        await finish(node, tasks=[task])

    asyncio.run(scenario())


def test_health_is_answered_while_it_trains(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 2)

    async def scenario() -> None:
        options = Options(size=50, rounds=3, seconds=1.5, neighbours=1, linger=0.5)
        node = build(folders[0], options)
        task = asyncio.create_task(node.run())
        await until(lambda: node.state == "training")
        channel = open_channel(address(folders[0]), "peer-0", Identity.read(folders[1]))
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        started = time.monotonic()
        answer = await check(health_pb2.HealthCheckRequest(service="quiver.Peer"), timeout=1)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert time.monotonic() - started < 1.0
        assert node.state == "training"
        await channel.close()
        await finish(node, tasks=[task])

    asyncio.run(scenario())


def test_metrics_are_served_on_loopback_only(tmp_path: Path) -> None:
    import urllib.request

    from quiverfl.peer.metrics import PeerMetrics, Sample, serve_metrics

    from .swarm import free_ports

    metrics = PeerMetrics()
    metrics.add("sent_bytes", 17)
    metrics.count_refusal("gap")
    port = free_ports(1)[0]
    server = serve_metrics(f"127.0.0.1:{port}", metrics, lambda: [Sample("mass", 0.5)])
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    server.shutdown()
    assert "quiver_sent_bytes_total 17.0" in text
    assert 'quiver_refusals_total{reason="gap"} 1.0' in text
    assert "quiver_mass 0.5" in text
    with pytest.raises(QuiverError, match="loopback only"):
        serve_metrics("0.0.0.0:1", metrics, list)


def test_the_personal_part_never_appears_on_the_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real DFedPGP clients; everything that either sends is read."""
    folders = make_swarm(tmp_path / "swarm", 2, rounds=3, mode="sync")
    wire = bytearray()
    heads: list[np.ndarray] = []
    bodies: list[np.ndarray] = []

    async def scenario() -> None:
        nodes = [await assemble(folder) for folder in folders.values()]
        for node in nodes:
            node.metrics.tap = wire.extend
            monkeypatch.setattr(node.learner, "train", _watched(node, heads, bodies))
        await asyncio.wait_for(asyncio.gather(*(node.run() for node in nodes)), 60)
        for node in nodes:
            node.store.close()

    asyncio.run(scenario())
    assert len(heads) >= 6
    assert len(wire) > 2 * 3 * bodies[0].nbytes
    half = [(body * np.float32(0.5)).tobytes() for body in bodies]
    assert any(share[:64] in wire for share in half)  # the search itself can find something
    for head in heads:
        assert all(head[at : at + 2].tobytes() not in wire for at in range(0, len(head) - 1, 2))


def _watched(
    node: Node, heads: list[np.ndarray], bodies: list[np.ndarray]
) -> Callable[[int, bool, float, bool], None]:
    """Training that keeps every personal and shared vector it makes."""
    train = node.learner.train

    def watched(round: int, active: bool, share: float, keep: bool) -> None:
        heads.append(node.learner.rest()["v"])
        train(round, active, share, keep)
        heads.append(node.learner.rest()["v"])
        bodies.append(node.learner.message()["u"])

    return watched
