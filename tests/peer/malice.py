"""Members that are malicious in one of twelve ways: an honest peer with one dishonest hand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import shutil
import socket
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.ledger import UNIT, Transfer
from quiverfl.peer.link import identity, wire
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.link import open_channel
from quiverfl.peer.link.roster import ROSTER, Member, Roster
from quiverfl.peer.link.wire import SERVICE, Announcement, EvictionNotice
from quiverfl.peer.node import Node

from .swarm import Options, build, free_ports
from .test_life import until

Progress = Callable[[], int]
"""The round that the slowest honest peer is in."""
Way = Callable[[Path, Options, Progress], Awaitable[None]]
"""Misbehaves with this folder's keys until it is cancelled."""
Write = Callable[[bytes], Awaitable[None]]
TRUSTING = {"trust_store": True}


@asynccontextmanager
async def member(
    folder: Path, options: Options, spoil: Callable[[Node], None] = lambda node: None
) -> AsyncIterator[Node]:
    """A peer that runs for ever, with something about it spoilt."""
    node = build(folder, replace(options, rounds=1_000_000, dishonest=True))
    spoil(node)
    task = asyncio.create_task(node.run())
    try:
        yield node
    finally:
        node.stop()
        await asyncio.wait({task}, timeout=20)
        node.store.close()
        problem = task.exception() if task.done() and not task.cancelled() else None
        if problem is not None and not isinstance(problem, QuiverError):
            raise problem  # then it has done no harm: the way itself is broken


def spoilt(spoil: Callable[[Node], None]) -> Way:
    async def way(folder: Path, options: Options, progress: Progress) -> None:
        async with member(folder, options, spoil):
            await asyncio.Event().wait()

    return way


class Tampered:
    """A call whose outgoing frames pass through dishonest hands."""

    def __init__(self, call: Any, tamper: Callable[[bytes, Write], Awaitable[None]]) -> None:
        self._call, self._tamper = call, tamper

    async def write(self, frame: bytes) -> None:
        await self._tamper(frame, self._call.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def tamper_with(node: Node, tamper: Callable[[Any, bytes, Write], Awaitable[None]]) -> None:
    """`tamper(sender, frame, write)` for every frame that leaves in a push."""
    for sender in node.neighbours.senders.values():
        honest = sender._converse

        async def converse(
            call: Any, transfer: Transfer, honest: Any = honest, sender: Any = sender
        ) -> None:
            await honest(Tampered(call, lambda f, w: tamper(sender, f, w)), transfer)

        sender._converse = converse  # type: ignore[method-assign]


def announced(frame: bytes) -> Announcement | None:
    return wire.decode(Announcement, frame) if frame.startswith(b'{"agreement"') else None


def resigned(a: Announcement, papers: Identity, towards: str, **changes: Any) -> bytes:
    """The announcement with something else in it, signed all the same."""
    a = a.model_copy(update=changes)
    transfer = Transfer(a.sender, a.receiver, a.seq, a.round, a.units, a.digest, 0.0)
    stores = (a.incarnation, towards)
    proof = signing.sign_transfer(papers, "share", transfer, a.agreement, stores)
    return wire.encode(a.model_copy(update={"proof": proof}))


async def never(*_: Any) -> None:
    await asyncio.Event().wait()


# Slow and silent


def _slow(node: Node) -> None:
    async def trickle(sender: Any, frame: bytes, write: Write) -> None:
        if announced(frame) or frame.startswith(b"{"):
            await write(frame)
            return
        body = frame[wire._HEADER.size :]
        for at in range(len(body)):
            await write(wire.make_frame(body[at : at + 1], at))
            await asyncio.sleep(0.5)

    tamper_with(node, trickle)


def _silent(node: Node) -> None:
    node.receiver.push = never  # type: ignore[method-assign]
    for sender in node.neighbours.senders.values():
        sender._attempt = never  # type: ignore[method-assign]


# What the books say


def _minting(extra: int) -> Way:
    """It opens its account with more than 1, and pays with it."""

    async def way(folder: Path, options: Options, progress: Progress) -> None:
        build(folder, options).store.close()
        _mint(folder / "store" / "peer.sqlite", extra)
        async with member(folder, options):
            await never()

    return way


def _mint(path: Path, extra: int) -> None:
    database = sqlite3.connect(path)
    database.execute("UPDATE entries SET units = units + ?, units_in = units_in + ?", (extra,) * 2)
    body = json.loads(database.execute("SELECT body FROM account").fetchone()[0])
    body["units"] += extra
    database.execute("UPDATE account SET body = ?", (json.dumps(body),))
    database.commit()
    database.close()


async def _double_spending(folder: Path, options: Options, progress: Progress) -> None:
    """Two clones of one store: each gives the same mass to another half of the others."""
    build(folder, options).store.close()
    clone = folder.parent / "clone" / folder.name
    shutil.copytree(folder, clone)
    roster = Roster.read(clone / ROSTER)
    there = f"127.0.0.1:{free_ports(1)[0]}"
    members = tuple(
        Member(m.name, there, m.keys) if m.name == folder.name else m for m in roster.members
    )
    replace(roster, members=members).write(clone / ROSTER)
    trusting = replace(options, settings={**options.settings, **TRUSTING})

    def gives_to(parity: int) -> Callable[[Node], None]:
        def spoil(node: Node) -> None:
            honest = node.neighbours.is_free
            node.neighbours.is_free = (  # type: ignore[method-assign]
                lambda peer: int(peer[-1]) % 2 == parity and honest(peer)
            )

        return spoil

    async with member(folder, trusting, gives_to(0)), member(clone, trusting, gives_to(1)):
        await never()


def _replaying(node: Node) -> None:
    """Everything it sends, it sends again: to the same peer and to the others."""
    said: dict[str, list[list[bytes]]] = {}
    background: set[asyncio.Task[None]] = set()

    async def record(sender: Any, frame: bytes, write: Write) -> None:
        pushes = said.setdefault(sender.peer, [])
        if announced(frame):
            pushes.append([])
            again = asyncio.create_task(repeat(random.choice(pushes)))
            background.add(again)
            again.add_done_callback(background.discard)
        pushes[-1].append(frame)
        await write(frame)

    async def repeat(frames: list[bytes]) -> None:
        for sender in node.neighbours.senders.values():
            with contextlib.suppress(Exception):
                call = sender.link.connect().stream_stream(f"/{SERVICE}/Push")()
                for frame in list(frames):
                    await call.write(frame)
                async with asyncio.timeout(2):
                    await call.read()
                call.cancel()

    tamper_with(node, record)


def _equivocating(node: Node) -> None:
    """Its books have one share, each receiver gets another under the same number; so its clocks."""
    papers = node.ctx.identity.refresh()
    store = node.store.meta("incarnation")
    chance = random.Random(0)

    async def lie(sender: Any, frame: bytes, write: Write) -> None:
        a = announced(frame)
        if a is None and frame.startswith(b"{"):
            await write(frame)
        elif a is None:
            await write(wire.make_frame(sender.lie, 0))
        else:
            truth = np.frombuffer(node.store.payload(a.digest), dtype="<f4")
            sender.lie = (truth + np.float32(chance.random())).tobytes()
            digest = hashlib.sha256(sender.lie).hexdigest()
            await write(resigned(a, papers, sender._stores()[1], digest=digest))

    tamper_with(node, lie)
    for sender in node.neighbours.senders.values():
        sender._attach_receipt = lambda reply, transfer: transfer  # type: ignore[method-assign]
        lie_about = hash(sender.peer) % 997
        clock = signing.sign_clock(
            papers, node.agreement.hash, node.agreement.name, store, lie_about
        )
        sender._list_clocks = lambda clock=clock: [clock]  # type: ignore[method-assign, misc]

    async def slander() -> None:
        await until(lambda: len(node.neighbours.greeted) == len(node.neighbours.senders), 60)
        for peer, link in node.transactions.accounts.links.items():
            notice = EvictionNotice(
                by=node.agreement.name, about=peer, store=link.incarnation, ban=True
            )
            await node.neighbours.sign(node.neighbours.evictions, notice)

    node.neighbours._start(slander())


async def _restored(folder: Path, options: Options, progress: Progress) -> None:
    """A few rounds, a backup, a few more; then the backup, and on."""
    rounds = options.rounds
    async with member(folder, options) as node:
        sent = node.metrics.counts
        await until(lambda: progress() >= rounds // 10 and sent["transfers"] > 0, 300)
    shutil.copytree(folder / "store", folder / "backup")
    async with member(folder, options) as node:
        sent = node.metrics.counts
        await until(lambda: progress() >= rounds // 4 and sent["transfers"] > 0, 300)
    shutil.rmtree(folder / "store")
    shutil.copytree(folder / "backup", folder / "store")
    trusting = replace(options, settings={**options.settings, **TRUSTING})
    async with member(folder, trusting):
        await never()


# What it sends


def _sends(value: float) -> Callable[[Node], None]:
    def spoil(node: Node) -> None:
        size = node.agreement.manifest.leaves[0].size
        message = {"u": np.full(size, value, dtype=np.float32)}
        node.learner.message = lambda _=None: message  # type: ignore[method-assign]

    return spoil


def _misshapen(node: Node) -> None:
    """Another size announced, a body that is too short, one that is too long, in turn."""
    turn = 0

    async def bend(sender: Any, frame: bytes, write: Write) -> None:
        nonlocal turn
        a = announced(frame)
        if a is not None:
            turn += 1
            extra = 4 if turn % 3 == 0 else 0
            await write(wire.encode(a.model_copy(update={"nbytes": a.nbytes + extra})))
        elif frame.startswith(b"{"):
            await write(frame)
        else:
            body = frame[wire._HEADER.size :]
            await write(wire.make_frame(body[:-4] if turn % 3 == 1 else body + b"\0" * 4, 0))

    tamper_with(node, bend)


async def _forging(folder: Path, options: Options, progress: Progress) -> None:
    """Shares and receipts signed with a key that is not the one in the roster."""
    other = folder.parent / "forged"
    identity.issue_certificate(folder.parent / "authority", folder.name, other)
    papers = Identity.read(other)

    def spoil(node: Node) -> None:
        async def forge(sender: Any, frame: bytes, write: Write) -> None:
            a = announced(frame)
            await write(resigned(a, papers, sender._stores()[1]) if a else frame)

        tamper_with(node, forge)
        forged: Any = _Papers(papers)
        node.receiver._ctx = replace(node.receiver._ctx, identity=forged)

    async with member(folder, options, spoil):
        await never()


class _Papers:
    def __init__(self, papers: Identity) -> None:
        self._papers = papers

    def refresh(self) -> Identity:
        return self._papers


async def _flooding(folder: Path, options: Options, progress: Progress) -> None:
    """Bare connections, streams that say nothing, and nonsense to every method, without end."""
    roster, papers = Roster.read(folder / ROSTER), Identity.read(folder)
    async with member(folder, options) as node:

        async def flood(peer: str) -> None:
            address = roster.member(peer).address
            bare = _connections(address, 100)
            channel = open_channel(address, peer, papers)
            while bare:
                silent = [channel.stream_stream(f"/{SERVICE}/Push")() for _ in range(20)]
                for method in ("Hello", "Notices", "LastReceipt", "Nonsense"):
                    call = channel.unary_unary(f"/{SERVICE}/{method}")
                    await _suppressed(call(random.randbytes(200), timeout=5) for _ in range(10))
                await asyncio.sleep(0.1)
                for call in silent:
                    call.cancel()

        await asyncio.gather(*(flood(peer) for peer in node.neighbours.senders))


async def _suppressed(calls: Iterable[Any]) -> None:
    for call in calls:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call


def _connections(address: str, count: int) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    found = []
    for _ in range(count):
        one = socket.socket()
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect((host, int(port)))
        found.append(one)
    return found


WAYS: dict[str, Way] = {
    "slow": spoilt(_slow),
    "silent": spoilt(_silent),
    "minting": _minting(999 * UNIT),
    "minting a little": _minting(2 * UNIT),
    "double spending": _double_spending,
    "replaying": spoilt(_replaying),
    "equivocating": spoilt(_equivocating),
    "flooding": _flooding,
    "huge norm": spoilt(_sends(1e30)),
    "largest number": spoilt(_sends(3e38)),
    "not a number": spoilt(_sends(float("nan"))),
    "wrong shape": spoilt(_misshapen),
    "forged signature": _forging,
    "restored store": _restored,
}
"""The norm in two ways: as large as it may be, and so large that sums overflow."""

TOLD_BY_THE_BOOKS = {
    "minting",
    "minting a little",
    "double spending",
    "equivocating",
    "not a number",
    "restored store",
}
