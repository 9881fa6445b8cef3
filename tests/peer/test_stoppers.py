"""One member with a good key tries to stop, starve or hold up another: real servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.control import make_order
from quiverfl.peer.link import limits, link, wire
from quiverfl.peer.link.identity import AUTHORITY_CERTIFICATE, CERTIFICATE, KEY, Identity
from quiverfl.peer.link.link import RestoredBackup
from quiverfl.peer.link.wire import SERVICE, EvictionNotice, Order, Receipt, WireError

from .swarm import Options, Swarm, build, make_folders
from .test_fairness import greeted
from .test_late_peers import QUICK
from .test_life import finish, until
from .test_refusals import PAYLOAD, Caller, address, running


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_folders(tmp_path, 3)


# What a member says of another's store


def test_a_claim_in_a_greeting_ends_nobody(folders: list[Path], monkeypatch: Any) -> None:
    """Numbers up to 2^40, and a receipt that this peer has not signed."""
    asked: list[str] = []

    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = await greeted(folders[0], node)
            sender = node.neighbours.senders["peer-1"]

            async def forged() -> Receipt:
                asked.append("peer-1")
                signed = signing.sign_transfer(
                    Identity.read(folders[1]),
                    "applied",
                    wire.Receipt(word="applied", seq=9, digest="0" * 64).transfer(
                        "peer-1", "peer-0"
                    ),
                    node.agreement.hash,
                    ("1" * 16, node.ctx.incarnation),
                )
                return Receipt(word="applied", seq=9, digest="0" * 64, proof=signed)

            monkeypatch.setattr(sender.link, "fetch_receipt", forged)
            for claim in ({"received": 1 << 40}, {"acknowledged": 1 << 40, "sent": 1 << 40}):
                assert (await caller.hello(**claim)).hello is not None
            await until(lambda: bool(asked), 5)
            await asyncio.sleep(0.3)
            assert node.problem is None
            assert not node.stopping
            await caller.channel.close()

    asyncio.run(scenario())


def test_its_own_receipt_tells_a_peer_that_its_store_is_old(folders: list[Path]) -> None:
    """The backup lacks a share that it had acknowledged, and no push of its own."""

    async def scenario() -> None:
        options = replace(QUICK, rounds=0, linger=3600.0)
        node, other = build(folders[0], options), build(folders[1], options)
        await other.transactions.push(0, {"u": PAYLOAD_U}, other.learner.rest(), {"peer-0": 1}, 1)
        share = other.transactions.accounts.outbox["peer-0"]
        stores = (other.ctx.incarnation, node.ctx.incarnation)
        papers = Identity.read(folders[0])
        proof = signing.sign_transfer(papers, "applied", share, node.agreement.hash, stores)
        await other.transactions.acknowledge(replace(share, proof=proof))
        tasks = [asyncio.create_task(one.run()) for one in (node, other)]
        with pytest.raises(RestoredBackup, match="older than what it has signed to 'peer-1'"):
            await asyncio.wait_for(tasks[0], 20)
        node.store.close()
        await finish(other, tasks=tasks[1:])

    PAYLOAD_U = build_message()
    asyncio.run(scenario())


def build_message() -> Any:
    import numpy as np

    return np.zeros(QUICK.size, dtype=np.float32)


# Connections


def context_of(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / AUTHORITY_CERTIFICATE))
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    return context


@contextlib.contextmanager
def idle_connections(folder: Path, keys: Path | None, count: int) -> Iterator[list[Any]]:
    """Connections that say nothing; with keys, after a handshake that shows a good certificate."""
    host, _, port = address(folder).rpartition(":")
    held: list[Any] = []
    context = None if keys is None else context_of(keys)
    try:
        for _ in range(count):
            one = socket.create_connection((host, int(port)), timeout=10)
            held.append(one)
            if context is not None:
                with contextlib.suppress(OSError):
                    held[-1] = context.wrap_socket(one)
        yield held
    finally:
        for one in held:
            one.close()


@pytest.mark.parametrize(
    "certified", [pytest.param(True, marks=pytest.mark.slow), False], ids=["member", "stranger"]
)
def test_idle_connections_shut_nobody_out(folders: list[Path], certified: bool) -> None:
    """More than the peer accepts in all, from one address: members come in, the owner is heard."""
    swarm = Swarm.__new__(Swarm)
    swarm.folders = {folder.name: folder for folder in folders}
    swarm.options = Options(size=100, rounds=0, linger=3600.0, neighbours=1)
    swarm.processes = {}
    swarm.start("peer-0")
    keys = folders[1] if certified else None
    count = limits.acceptable_connections(3) + 20

    async def scenario() -> None:
        async def status() -> bool:
            with contextlib.suppress(Exception):
                return bool(await make_order(folders[0], Order(action="status"), timeout=2.0))
            return False

        end = time.monotonic() + 60
        while not await status():
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        with idle_connections(folders[0], keys, count):
            assert await status()
            channel = link.open_channel(address(folders[0]), "peer-0", Identity.read(folders[2]))
            began = time.monotonic()
            probe = channel.unary_unary(f"/{SERVICE}/Probe")
            await probe(b"", timeout=30, wait_for_ready=True)
            assert time.monotonic() - began < 15.0
            await channel.close()

    try:
        asyncio.run(scenario())
    finally:
        swarm.close()


def test_a_member_has_four_connections(folders: list[Path]) -> None:
    """A fifth ends the one it has used least lately; another member keeps its own."""

    async def scenario() -> None:
        async with running(folders[0]) as node:
            guard = node.service.guard
            assert guard is not None
            papers = Identity.read(folders[1])
            other = link.open_channel(address(folders[0]), "peer-0", Identity.read(folders[2]))
            await other.unary_unary(f"/{SERVICE}/Probe")(b"", timeout=5)
            channels = [
                link.open_channel(address(folders[0]), "peer-0", papers)
                for _ in range(limits.CONNECTIONS + 3)
            ]
            for channel in channels:
                await channel.unary_unary(f"/{SERVICE}/Probe")(b"", timeout=5)
            await until(lambda: guard.closed == 3, 5)
            states = [channel.get_state() for channel in channels]
            ready = grpc.ChannelConnectivity.READY
            await until(lambda: [c.get_state() for c in channels].count(ready) == 4, 5)
            assert channels[-1].get_state() is ready, states
            assert other.get_state() is ready
            for channel in (*channels, other):
                await channel.close()

    asyncio.run(scenario())


def test_callers_by_grpc_are_those_of_the_sockets() -> None:
    assert limits.parse_caller("ipv4:10.1.0.5:40312") == ("10.1.0.5", 40312)
    assert limits.parse_caller("ipv6:%5Bfe80::1%25eth0%5D:7") == ("fe80::1", 7)
    assert limits.parse_caller("ipv6:[::ffff:10.1.0.5]:7") == ("10.1.0.5", 7)
    assert limits.parse_caller("unix:") is None


# Requests


def test_every_kind_of_request_has_a_rate() -> None:
    budget = limits.RequestBudget()
    for kind, rate in [*limits.RATES.items(), ("Notices", limits.SELDOM)]:
        taken = 0
        for _ in range(10_000):
            with contextlib.suppress(WireError):
                budget.reserve("peer-1", kind, now=100.0)
                taken += 1
        assert taken == rate.burst + limits.LONGEST_WAIT * rate.a_second
        with pytest.raises(WireError, match="'peer-1' asks too often"):
            budget.reserve("peer-1", kind, now=100.0)
        assert budget.reserve("peer-2", kind, now=100.0) == 0.0  # of its own
        assert budget.reserve("peer-1", kind, now=200.0) == 0.0  # forgotten


def test_greetings_without_end_are_paced(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = await greeted(folders[0], node)
            results = await asyncio.gather(
                *(caller.hello() for _ in range(400)), return_exceptions=True
            )
            refused = [one for one in results if isinstance(one, grpc.aio.AioRpcError)]
            assert len(refused) >= 100
            assert {one.code() for one in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            other = await greeted(folders[0], node, "peer-2")
            assert (await other.push()).word == "applied"
            await caller.channel.close()
            await other.channel.close()

    asyncio.run(scenario())


def forged_notices(count: int) -> list[EvictionNotice]:
    point = "02" + "0" * 64
    return [
        EvictionNotice(
            by="peer-2", about="peer-0", store=f"{number:016x}", proof=f"{point} {'0' * 140}"
        )
        for number in range(count)
    ]


def test_news_of_a_member_takes_a_small_part_of_the_time(
    folders: list[Path], monkeypatch: Any
) -> None:
    """Another hash in every greeting, and a thousand forged notices each time it is asked."""
    fetched: list[float] = []

    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = await greeted(folders[0], node)

            async def forged(kind: Any) -> list[Any]:
                fetched.append(time.monotonic())
                return forged_notices(wire.STATEMENTS)

            monkeypatch.setattr(node.neighbours.senders["peer-1"].link, "fetch_statements", forged)
            end, number = time.monotonic() + 2.5, 0
            while time.monotonic() < end:
                number += 1
                await caller.hello(notices=f"{number:064x}")
                await asyncio.sleep(0.05)
            assert 1 <= len(fetched) <= 13
            assert not node.neighbours.evictions.statements()
            assert node.neighbours._work_seconds <= 0.25
            await caller.channel.close()

    asyncio.run(scenario())


def test_a_peer_that_is_stopped_waits_for_nobody(folders: list[Path], monkeypatch: Any) -> None:
    """A member announces notices and does not answer; another holds streams open."""

    async def scenario() -> None:
        node = build(folders[0], replace(QUICK, rounds=0, linger=3600.0))
        task = asyncio.create_task(node.run())
        await until(lambda: node.state == "finished")
        caller = await greeted(folders[0], node)

        async def silent(*_: Any) -> Any:
            await asyncio.sleep(3600)

        monkeypatch.setattr(node.neighbours.senders["peer-1"].link, "_ask", silent)
        await caller.hello(notices="1" * 64, amendments="2" * 64, acknowledged=7)
        streams = [caller.channel.stream_stream(f"/{SERVICE}/Push")() for _ in range(5)]
        streams += [caller.channel.stream_stream(f"/{SERVICE}/Collect")() for _ in range(5)]
        await asyncio.sleep(0.3)
        began = time.monotonic()
        await finish(node, tasks=[task])
        assert time.monotonic() - began < 3.0
        for stream in streams:
            stream.cancel()
        await caller.channel.close()

    asyncio.run(scenario())


def test_finishing_again_and_again_is_no_news(folders: list[Path]) -> None:
    async def scenario() -> None:
        options = replace(QUICK, rounds=0, linger=1.0)
        node = build(folders[0], options)
        task = asyncio.create_task(node.run())
        await until(lambda: node.state == "finished")
        caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
        began, turn = time.monotonic(), 0
        while not task.done() and time.monotonic() - began < 10.0:
            turn += 1
            with contextlib.suppress(grpc.aio.AioRpcError):
                await caller.hello(finished=bool(turn % 2))
            await asyncio.sleep(0.1)
        assert task.done()
        assert time.monotonic() - began < 6.0
        await caller.channel.close()
        node.store.close()

    asyncio.run(scenario())


# Evidence, bodies, health


def test_evidence_that_proves_nothing_comes_to_an_end(folders: list[Path]) -> None:
    """Vouchers that nobody has signed: a few messages, one commit, and the share goes back."""
    proof = f"{'2' * 16} {'1' * 16} 02{'0' * 64} {'0' * 140}"

    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = await greeted(folders[0], node)
            commits = 0
            honest = node.store.save_proofs

            def counted(sender: str, body: str) -> None:
                nonlocal commits
                commits += 1
                honest(sender, body)

            node.store.save_proofs = counted  # type: ignore[method-assign]
            caller.vouchers = [
                wire.Voucher(
                    sender="peer-2", seq=n + 1, round=0, units=UNIT, digest="0" * 64, proof=proof
                )
                for n in range(24 * 1000)
            ]
            reply = await caller.push(units=2 * UNIT)
            assert (reply.word, reply.reason) == ("refused", "mass it cannot show")
            assert commits == 1
            rows = node.receiver._proofs.proven_by("peer-1").rows
            assert rows <= 24 * 10
            await caller.channel.close()

    asyncio.run(scenario())


class Insatiable:
    """A neighbour that asks for more evidence, whatever it is shown."""

    def __init__(self, rows: Any) -> None:
        self._rows, self.asked, self.shown = rows, 0, 0

    async def write(self, frame: bytes) -> None:
        if self.asked:
            self.shown += len(wire.decode(wire.Evidence, frame).vouchers)

    async def read(self) -> bytes:
        self.asked += 1
        return wire.encode(wire.Reply(word="show", rows=self._rows(self.shown)))

    def cancel(self) -> None:
        pass


@pytest.mark.parametrize("rows", [lambda shown: 0, lambda shown: shown])
def test_a_neighbour_that_wants_evidence_without_end(folders: list[Path], rows: Any) -> None:
    async def scenario() -> None:
        node = build(folders[0], QUICK)
        await node.transactions.register_store("peer-1", "1" * 16)
        message, rest = node.learner.message(), node.learner.rest()
        (share,) = await node.transactions.push(0, message, rest, {"peer-1": 1}, 1)
        call: Any = Insatiable(rows)
        sender = node.neighbours.senders["peer-1"]
        with pytest.raises(link.Unreachable, match="evidence"):
            await sender._converse(call, share)
        assert call.asked <= 3
        node.store.close()

    asyncio.run(scenario())


def test_a_body_in_single_bytes_is_refused(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = await greeted(folders[0], node)
            frames = [wire.make_frame(PAYLOAD[at : at + 1], at) for at in range(len(PAYLOAD))]
            with contextlib.suppress(grpc.aio.AioRpcError):  # it hangs up while bytes still come
                assert (await caller.push(frames=frames)).word == "denied"
            await until(lambda: node.metrics.refusals["malformed"] == 1, 5)
            assert (await caller.push()).word == "applied"
            await caller.channel.close()

    asyncio.run(scenario())


def test_forged_clocks_cost_a_few_checks(folders: list[Path], monkeypatch: Any) -> None:
    checks = 0

    async def scenario() -> None:
        nonlocal checks
        async with running(folders[0]) as node:
            caller = await greeted(folders[0], node)
            other = await greeted(folders[0], node, "peer-2")
            own = node.ctx.incarnation

            def count(clock: wire.Clock) -> bool:
                nonlocal checks
                checks += 1
                return False

            monkeypatch.setattr(node.neighbours, "_is_genuine", count)
            proof = f"02{'0' * 64} {'0' * 140}"
            clocks = [
                wire.Clock(peer="peer-2", store="1" * 16, pushes=n + 1, proof=proof)
                for n in range(12)
            ]
            clocks += [
                wire.Clock(peer="peer-0", store=own, pushes=n + 1, proof=proof) for n in range(12)
            ]
            assert (await caller.hello(clocks=clocks)).hello is not None
            await caller.channel.close()
            await other.channel.close()

    asyncio.run(scenario())
    assert checks <= 4


def test_health_asks_the_roster_and_holds_two_streams(tmp_path: Path, folders: list[Path]) -> None:
    from quiverfl.peer.link import identity

    identity.issue_certificate(tmp_path / "authority", "stranger", tmp_path / "stranger")
    service = "/grpc.health.v1.Health"

    async def scenario() -> None:
        async with running(folders[0]) as node:
            there = address(folders[0])
            channel = link.open_channel(there, "peer-0", Identity.read(tmp_path / "stranger"))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"{service}/Check")(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            await channel.close()
            caller = await greeted(folders[0], node)
            calls = [caller.channel.unary_stream(f"{service}/Watch")(b"") for _ in range(12)]
            ends: list[grpc.StatusCode] = []

            async def watch(call: Any) -> None:
                first = health_pb2.HealthCheckResponse.FromString(await call.read())
                assert first.status == health_pb2.HealthCheckResponse.SERVING
                with contextlib.suppress(asyncio.CancelledError):
                    ends.append(await call.code())

            tasks = [asyncio.create_task(watch(call)) for call in calls]
            await until(lambda: len(ends) == 10, 20)
            assert set(ends) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            for task in tasks:
                task.cancel()
            for call in calls:
                call.cancel()
            await caller.channel.close()

    asyncio.run(scenario())


def test_a_stop_leaves_no_traceback(tmp_path: Path) -> None:
    """Processes, stopped while shares, greetings and streams are under way."""
    swarm = Swarm(tmp_path, 3, Options(size=500, seconds=0.0))
    try:
        swarm.start_all()
        swarm.wait_for_round(5)
        for name in list(swarm.folders)[:2]:
            swarm.processes[name].terminate()
            swarm.processes[name].join(20)
            swarm.start(name)
        swarm.wait_for_round(15)
        swarm.stop_all()
    finally:
        swarm.close()
    assert not [name for name in swarm.folders if "Traceback" in swarm.log(name)]
