"""What a peer does not take: refused, counted, and nothing changed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT, Transfer
from quiverfl.peer.context import Agreement
from quiverfl.peer.control import SOCKET, NotRunning, make_order
from quiverfl.peer.link import identity, wire
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.link import open_channel
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import SERVICE, Announcement, Greeting, Hello, Order, Reply, Voucher
from quiverfl.peer.node import Node

from .swarm import Options, build, make_folders

SIZE = 100
PAYLOAD = np.arange(SIZE, dtype="<f4").tobytes()


@asynccontextmanager
async def running(folder: Path, **changes: Any) -> AsyncIterator[Node]:
    """A peer that has finished its rounds and only answers."""
    options = Options(size=SIZE, rounds=0, linger=3600.0, **changes)
    node = build(folder, options)
    task = asyncio.create_task(node.run())
    while node.state != "finished":
        await asyncio.sleep(0.01)
        if task.done():
            task.result()
    try:
        yield node
    finally:
        node.stop()
        await task
        node.store.close()


class Caller:
    """Somebody with a certificate, who says what he likes."""

    def __init__(self, agreement: Agreement, address: str, papers: Identity) -> None:
        self.agreement, self.name = agreement, "peer-1"
        self.met = "0" * 16  # the other's store, once it has said hello
        self.vouchers: list[Voucher] = []
        self.channel, self.papers = open_channel(address, "peer-0", papers), papers

    async def hello(self, **changes: Any) -> Greeting:
        agreement = self.agreement
        values = {
            "protocol": wire.PROTOCOL,
            "run": agreement.run,
            "configuration": agreement.configuration,
            "manifest": agreement.manifest.hash,
            "sender": self.name,
            "receiver": "peer-0",
            "incarnation": "1" * 16,
            "nonce": "0" * 64,
            "sent": 0,
            "acknowledged": 0,
            "received": 0,
            "round": 0,
            **changes,
        }
        call = self.channel.unary_unary(f"/{SERVICE}/Hello")
        greeting = wire.decode(Greeting, await call(wire.encode(Hello(**values)), timeout=5))
        if greeting.hello is not None:
            self.met = greeting.hello.incarnation
        return greeting

    def announcement(self, payload: bytes, **changes: Any) -> Announcement:
        values = {
            "agreement": self.agreement.hash,
            "sender": self.name,
            "receiver": "peer-0",
            "incarnation": "1" * 16,
            "seq": 1,
            "round": 0,
            "units": UNIT // 4,
            "nbytes": len(payload),
            "digest": hashlib.sha256(payload).hexdigest(),
            **changes,
        }
        if "proof" not in changes:
            names = ("sender", "receiver", "seq", "round", "units", "digest")
            transfer = Transfer(*(values[name] for name in names), 0.0)
            agreed, stores = values["agreement"], (values["incarnation"], self.met)
            values["proof"] = signing.sign_transfer(self.papers, "share", transfer, agreed, stores)
        return Announcement(**values)

    async def push(
        self, payload: bytes = PAYLOAD, frames: list[bytes] | None = None, **changes: Any
    ) -> Reply:
        """The last word of the peer on this transfer."""
        first = wire.encode(self.announcement(payload, **changes))
        return await self.raw(first, list(wire.split_frames(payload)) if frames is None else frames)

    async def raw(self, first: bytes, frames: list[bytes]) -> Reply:
        call = self.channel.stream_stream(f"/{SERVICE}/Push")()
        await call.write(first)
        reply = wire.decode(Reply, await call.read())
        while reply.word == "show":
            shown = self.vouchers[reply.rows : reply.rows + wire.VOUCHERS]
            await call.write(wire.encode(wire.Evidence(vouchers=shown)))
            reply = wire.decode(Reply, await call.read())
        if reply.word == "proceed":
            for frame in frames:
                await call.write(frame)
            await call.done_writing()
            reply = wire.decode(Reply, await call.read())
        if reply.word == "staged":
            reply = wire.decode(Reply, await call.read())
        call.cancel()
        return reply


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return make_folders(tmp_path, 3)


def address(folder: Path) -> str:
    return Roster.read(folder / ROSTER).member(folder.name).address


def test_who_is_not_known_is_not_answered(tmp_path: Path, folders: list[Path]) -> None:
    identity.create_authority(tmp_path / "other", "test")
    identity.issue_certificate(tmp_path / "other", "peer-1", tmp_path / "forged")
    identity.issue_certificate(tmp_path / "authority", "stranger", tmp_path / "stranger")
    identity.issue_certificate(tmp_path / "authority", "peer-1", tmp_path / "second-key")
    forged = Identity.read(tmp_path / "forged")
    genuine = Identity.read(folders[1])

    async def attempt(node: Node, papers: Identity) -> grpc.StatusCode:
        caller = Caller(node.agreement, address(folders[0]), papers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await caller.hello()
        await caller.channel.close()
        return caught.value.code()

    async def bare(node: Node) -> grpc.StatusCode:
        credentials = grpc.ssl_channel_credentials(genuine.authority)
        options = [("grpc.ssl_target_name_override", "peer-0")]
        async with grpc.aio.secure_channel(address(folders[0]), credentials, options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=5)
            return caught.value.code()

    async def plain(node: Node) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(address(folders[0])) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Hello")(b"", timeout=5)
            return caught.value.code()

    async def scenario() -> None:
        async with running(folders[0]) as node:
            before = node.transactions.accounts
            closed = grpc.StatusCode.UNAVAILABLE
            assert await bare(node) is closed
            assert await plain(node) is closed
            mixed = Identity(genuine.authority, forged.certificate, forged.key)
            assert await attempt(node, mixed) is closed
            denied = grpc.StatusCode.PERMISSION_DENIED
            assert await attempt(node, Identity.read(tmp_path / "stranger")) is denied
            assert await attempt(node, Identity.read(tmp_path / "second-key")) is denied
            assert node.metrics.refusals["identity"] == 2
            assert node.transactions.accounts == before

    asyncio.run(scenario())


def test_the_caller_refuses_a_server_with_another_name(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]):
            channel = open_channel(address(folders[0]), "peer-2", Identity.read(folders[1]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/Hello")(b"{}", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await channel.close()

    asyncio.run(scenario())


def test_greetings_of_another_run_are_refused(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            before = node.transactions.accounts
            for changes, word in [
                ({"protocol": 1}, "protocol"),
                ({"run": "another"}, "run"),
                ({"configuration": "0" * 64}, "configuration"),
                ({"manifest": "0" * 64}, "manifest"),
                ({"sender": "peer-2"}, "peer-2"),
                ({"receiver": "peer-2"}, "peer-1"),
            ]:
                greeting = await caller.hello(**changes)
                assert greeting.hello is None
                assert word in greeting.refusal
            assert node.metrics.refusals["hello"] == 6
            assert node.transactions.accounts == before
            old = caller.channel.unary_unary(f"/{SERVICE}/Hello")
            answer = wire.decode(Greeting, await old(b'{"protocol": 1, "run": "test"}', timeout=5))
            assert "speaks protocol 1, this peer protocol 3" in answer.refusal
            greeting = await caller.hello()
            assert greeting.hello is not None
            other = await caller.hello(incarnation="2" * 16)
            assert "another store" in other.refusal
            await caller.channel.close()

    asyncio.run(scenario())


def test_transfers_that_are_refused_change_nothing(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            assert (await caller.push()).reason.startswith("stranger")
            await caller.hello()
            before = node.transactions.accounts
            good = list(wire.split_frames(PAYLOAD))
            damaged = [good[0][:-1] + bytes([good[0][-1] ^ 1])]
            larger = np.arange(SIZE + 1, dtype="<f4").tobytes()
            for reply, word, reason in [
                (await caller.push(sender="peer-2"), "denied", "impostor"),
                (await caller.push(receiver="peer-2"), "denied", "misdelivered"),
                (await caller.push(agreement="0" * 64), "denied", "agreement"),
                (await caller.push(incarnation="9" * 16), "denied", "incarnation"),
                (await caller.push(payload=larger), "denied", "size"),
                (await caller.push(frames=list(wire.split_frames(larger))), "denied", "more bytes"),
                (await caller.push(seq=3), "denied", "gap"),
                (await caller.push(frames=[]), "retry", "ended early"),
                (await caller.push(frames=[good[0][:50]]), "retry", "damaged"),
                (await caller.push(frames=damaged), "retry", "damaged"),
                (await caller.push(digest="0" * 64), "retry", "announced"),
                (await caller.raw(b"\x00garbage", []), "denied", "not a Announcement"),
                (await caller.raw(b"{" * 20_000, []), "denied", "too long"),
            ]:
                assert reply.word == word
                assert reason in reply.reason
            assert node.transactions.accounts == before
            assert sum(node.metrics.refusals.values()) == 14
            await caller.channel.close()

    asyncio.run(scenario())


def test_replays_are_acknowledged_and_not_counted_twice(folders: list[Path]) -> None:
    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            assert (await caller.push()).word == "applied"
            assert node.transactions.accounts.units == UNIT + UNIT // 4
            after = node.transactions.accounts
            assert (await caller.push()).word == "applied"
            other = np.ones(SIZE, dtype="<f4").tobytes()
            assert (await caller.push(payload=other)).reason == "stale"
            assert node.transactions.accounts == after
            assert node.metrics.counts["duplicates"] == 1
            assert (await caller.push(payload=other, seq=2)).word == "applied"
            assert (await caller.push()).reason == "stale"  # an old one, out of order
            assert node.transactions.accounts.units == UNIT + UNIT // 2
            await caller.channel.close()
        assert audit([read_statement(folders[0] / "store")]).passed

    asyncio.run(scenario())


def test_content_that_is_refused_is_refused_for_good(folders: list[Path]) -> None:
    poison = np.full(SIZE, np.nan, dtype="<f4").tobytes()
    huge = np.full(SIZE, 1e9, dtype="<f4").tobytes()

    async def scenario() -> None:
        limits = {"mass_cap": UNIT, "outlier": "refuse"}
        async with running(folders[0], limits=limits) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            await caller.hello()
            for seq, payload, units, reason in [
                (1, poison, 5, "not finite"),
                (2, PAYLOAD, 2 * UNIT, "mass above the cap"),
                (3, huge, UNIT, "outlier"),
            ]:
                for _ in range(2):  # the second time from the tombstone
                    reply = await caller.push(payload=payload, seq=seq, units=units)
                    assert (reply.word, reply.reason) == ("refused", reason)
            assert node.transactions.accounts.units == UNIT
            await caller.channel.close()
        again = read_statement(folders[0] / "store")
        assert [line.refusal for line in again.received] == [
            "not finite",
            "mass above the cap",
            "outlier",
        ]
        assert audit([again]).passed

    asyncio.run(scenario())


def test_only_its_owner_orders_a_peer(folders: list[Path]) -> None:
    """Orders come over a socket in its folder; the network has no method for them."""

    async def scenario() -> None:
        async with running(folders[0]) as node:
            caller = Caller(node.agreement, address(folders[0]), Identity.read(folders[1]))
            call = caller.channel.unary_unary(f"/{SERVICE}/Order")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(wire.encode(Order(action="stop")), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert not node.stopping
            assert (folders[0] / SOCKET).stat().st_mode & 0o777 == 0o600
            assert (await make_order(folders[0], Order(action="status")))["name"] == "peer-0"
            with pytest.raises(QuiverError, match="name another member"):
                await make_order(folders[0], Order(action="evict", peer="nobody"))
            await caller.channel.close()
        with pytest.raises(NotRunning, match="quiver peer run"):
            await make_order(folders[0], Order(action="status"))

    asyncio.run(scenario())


def test_a_socket_in_a_folder_of_a_long_path(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 100) / ("b" * 100)
    folders = make_folders(deep, 3)

    async def scenario() -> None:
        async with running(folders[0]):
            assert (await make_order(folders[0], Order(action="status")))["name"] == "peer-0"

    asyncio.run(scenario())
