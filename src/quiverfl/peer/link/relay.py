"""Two members that both only dial out trade by way of a third, which carries ciphertext.

    caller ── Dial ──→ relay ←── Attend, Accept ── called

A member that cannot be called attends at each relay: it keeps a stream open, over which the relay
says who calls. For each call it opens another stream, and the relay passes bytes on between that
and the caller's. Through these bytes the two speak what all peers speak: gRPC over mutual TLS, with
the keys that the roster has of each. So a relay holds no key, and greetings, shares, receipts and
limits are those of a direct connection. It stores nothing: what is cut off goes out again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from quiverfl.peer.context import PeerContext
from quiverfl.peer.link.limits import StreamLimit
from quiverfl.peer.link.link import Unreachable, open_channel
from quiverfl.peer.link.wire import SERVICE, Accept, Dial, Ring, WireError, decode, encode

FRAME = 1 << 16
"""The most bytes that are passed on at once."""
SMALLEST = 1 << 14
"""A smaller frame counts as so many bytes of its member's part: each costs the relay time."""
LINES = 2
"""Lines from one member to another: one, and a second while it reconnects."""
RINGS = 64
"""Calls that wait until an attending member has read them; one more is refused."""
ANSWER_SECONDS = 10.0
"""Time that the called member may take to open its stream."""
PATIENCE_SECONDS = 90.0
"""A line without a byte for so long is ended; the two test it every 20 s themselves."""
RETRY_CAP = 5.0
"""The longest pause before a relay that cannot be reached is tried again."""
BURST_SECONDS = 2.0
"""A member may fall behind its rate by so much and catch up at once."""
STANDS = b"line"
"""The first frame of a line that stands; what follows belongs to the two."""

CallContext: TypeAlias = Any
"""grpc.aio.ServicerContext, whose published types are not its own."""
Read: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]
Write: TypeAlias = Callable[[bytes], Coroutine[Any, Any, Any]]


# The relay


@dataclass
class _Call:
    """A member calls another, which has to open its own stream."""

    caller: str
    target: str
    accepted: asyncio.Future[CallContext]
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Relay:
    """Passes bytes on between members that only dial out, as a relay does for them."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._attending: dict[str, asyncio.Queue[Ring]] = {}
        self._attendants, self._lines = StreamLimit(1), StreamLimit(LINES)
        self._calls: dict[str, _Call] = {}
        self._free_at: dict[str, float] = {}
        self.lines = 0

    @property
    def in_use(self) -> bool:
        """Whether members rely on this relay at the moment."""
        return bool(self._attending)

    def _check_member(self, member: str) -> None:
        roster, here = self._ctx.roster.refresh(), self._ctx.name
        if not roster.member(here).relays:
            raise WireError("relay", f"{here!r} relays for nobody: its roster does not say so.")
        if not roster.member(member).dials_out:
            raise WireError("relay", f"{member!r} can be called: {here!r} does not relay for it.")

    async def attend(self, member: str, write: Write) -> None:
        """Tell a member who calls it, for as long as it stays."""
        self._check_member(member)
        async with self._attendants.hold(member):
            queue = self._attending[member] = asyncio.Queue(RINGS)
            for peer, others in self._attending.items():
                with contextlib.suppress(asyncio.QueueFull):
                    if peer != member:
                        others.put_nowait(Ring(peer=member))
            try:
                await write(encode(Ring()))
                while True:
                    await write(encode(await queue.get()))
            finally:
                if self._attending.get(member) is queue:
                    del self._attending[member]

    async def dial(self, caller: str, context: CallContext) -> None:
        """Carry a line from its caller to the member that it names, until one of them ends it."""
        self._check_member(caller)
        target = decode(Dial, await _read_first(context)).target
        queue = self._attending.get(target)
        if queue is None:
            raise WireError("relay", f"{target!r} does not call this relay at the moment.")
        async with self._lines.hold(f"{caller} {target}"):
            token, accepted = secrets.token_hex(8), asyncio.get_running_loop().create_future()
            call = self._calls[token] = _Call(caller, target, accepted)
            try:
                queue.put_nowait(Ring(peer=caller, token=token))
                async with asyncio.timeout(ANSWER_SECONDS):
                    other = await accepted
                await context.write(STANDS)
                await self._carry(call, context, other)
            except asyncio.QueueFull:
                raise WireError("relay", f"too many calls wait for {target!r}.") from None
            except TimeoutError:
                raise WireError("relay", f"{target!r} does not take the call.") from None
            finally:
                call.ended.set()
                del self._calls[token]

    async def accept(self, member: str, context: CallContext) -> None:
        """Give the stream of a called member to the call that it belongs to."""
        self._check_member(member)
        call = self._calls.get(decode(Accept, await _read_first(context)).token)
        if call is None or call.target != member or call.accepted.done():
            raise WireError("relay", "there is no such call any more.")
        call.accepted.set_result(context)
        try:
            await call.ended.wait()
        finally:
            call.ended.set()

    async def _carry(self, call: _Call, one: CallContext, other: CallContext) -> None:
        self.lines += 1
        self._ctx.log("relays", caller=call.caller, called=call.target)
        try:
            await _run_until_one_ends(
                self._pass_on(call.caller, one.read, other.write),
                self._pass_on(call.target, other.read, one.write),
                call.ended.wait(),
            )
        finally:
            self.lines -= 1

    async def _pass_on(self, member: str, read: Read, write: Write) -> None:
        """Pass on what a member sends, no faster than its part, while the roster has its key."""
        while self._ctx.roster.current.member(member).keys:
            async with asyncio.timeout(PATIENCE_SECONDS):
                frame = await read()
            if not isinstance(frame, bytes) or not 0 < len(frame) <= FRAME:
                return
            await self._wait_for_turn(member, len(frame))
            async with asyncio.timeout(PATIENCE_SECONDS):
                await write(frame)
            self._ctx.metrics.add("relayed_bytes", len(frame))

    async def _wait_for_turn(self, member: str, nbytes: int) -> None:
        """Wait until a member's rate has room for a frame, on whichever line it came."""
        now = time.monotonic()
        at = max(self._free_at.get(member, 0.0), now - BURST_SECONDS)
        self._free_at[member] = at + max(nbytes, SMALLEST) / self._ctx.limits.relay_rate
        if at > now:
            await asyncio.sleep(at - now)


async def _read_first(context: CallContext) -> bytes:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            frame = await context.read()
    except TimeoutError:
        raise WireError("relay", "the stream says nothing.") from None
    if not isinstance(frame, bytes):
        raise WireError("relay", "the stream ended early.")
    return frame


async def _run_until_one_ends(*works: Coroutine[Any, Any, Any]) -> None:
    """Run these until the first of them ends, in whatever way; then end the rest."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# A member that only dials out


class RelayedLines:
    """The lines by which a member that only dials out reaches others of its kind.

    A connection to such a neighbour begins at a Unix socket of this process. What is written there
    goes to the neighbour by way of a relay, the next one at every new connection.
    """

    def __init__(self, ctx: PeerContext, wake: Callable[[str], None]) -> None:
        """`wake` is called with a neighbour that may be reached again."""
        self._ctx, self._wake = ctx, wake
        self._folder: Path | None = None
        self._doors: dict[str, Path] = {}
        self._channels: dict[str, Any] = {}
        self._incoming = StreamLimit(LINES)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._attendances: dict[str, asyncio.Task[None]] = {}
        self._next = 0
        self._own_address: tuple[str, int] | None = None
        self.problems: dict[str, str] = {}

    def relays(self) -> list[str]:
        """The members that offer to relay and may be called; none for who can be called itself."""
        roster, links = self._ctx.roster.current, self._ctx.transactions.accounts.links
        if not roster.member(self._ctx.name).dials_out:
            return []
        gone = {peer for peer, link in links.items() if link.gone or link.closed}
        return [name for name in roster.relays if name not in gone]

    def address_of(self, peer: str) -> str:
        """The local address at which a connection to a neighbour begins."""
        if not self.relays():
            raise Unreachable(f"{peer} only dials out, as this peer does, and no member relays")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="quiver-"))  # short, and its owner's alone
        if peer not in self._doors:
            path = self._doors[peer] = self._folder / str(len(self._doors))
            door = socket.socket(socket.AF_UNIX)
            door.bind(str(path))
            door.listen()
            door.setblocking(False)
            self._start(self._open_door(peer, door))
        return f"unix:{self._doors[peer]}"

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _open_door(self, peer: str, door: socket.socket) -> None:
        async def dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # asyncio would print it
                await self._start(self._dial(peer, reader, writer))

        async with await asyncio.start_unix_server(dial, sock=door, limit=FRAME) as server:
            await server.serve_forever()

    def _channel(self, relay: str) -> Any:
        if relay not in self._channels:
            address = self._ctx.roster.current.member(relay).address
            identity, seconds = self._ctx.identity.refresh(), self._ctx.limits.keepalive_seconds
            self._channels[relay] = open_channel(address, relay, identity, seconds)
        return self._channels[relay]

    async def _dial(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry a connection to a neighbour by the first relay that has a line to it."""
        relays = self.relays()
        self._next += 1
        try:
            for number in range(len(relays)):
                relay = relays[(self._next + number) % len(relays)]
                call = self._channel(relay).stream_stream(f"/{SERVICE}/Dial")()
                try:
                    await self._open_line(call, Dial(target=peer), relay)
                    async with asyncio.timeout(ANSWER_SECONDS):
                        if await call.read() != STANDS:
                            raise Unreachable("it has ended the line")
                    self.problems.pop(peer, None)
                    await _join(call, reader, writer)
                    return
                except (Unreachable, TimeoutError, grpc.aio.AioRpcError) as problem:
                    self.problems[peer] = f"by way of {relay}: {_describe(problem)}"
                finally:
                    call.cancel()
        finally:
            writer.close()

    async def _open_line(self, call: Any, first: Dial | Accept, relay: str) -> None:
        try:
            async with asyncio.timeout(self._ctx.limits.hello_seconds):
                await call.write(encode(first))
        except (asyncio.InvalidStateError, grpc.aio.UsageError):
            raise Unreachable(f"{relay} has ended the line") from None

    # Being called

    def attend(self, own_address: tuple[str, int]) -> None:
        """Be there for calls by every relay; they go to the address where this peer listens."""
        self._own_address = own_address
        self.follow_roster()

    def follow_roster(self) -> None:
        """Attend at every relay that the roster has by now."""
        for relay in self.relays() if self._own_address else ():
            task = self._attendances.get(relay)
            if task is None or task.done():
                self._attendances[relay] = self._start(self._attend_at(relay))

    async def _attend_at(self, relay: str) -> None:
        pause, first = self._ctx.limits.retry_first, self._ctx.limits.retry_first
        while relay in self.relays():
            try:
                call = self._channel(relay).unary_stream(f"/{SERVICE}/Attend")(b"")
                while isinstance(frame := await call.read(), bytes):
                    pause = first
                    self._hear(relay, decode(Ring, frame))
                reason = "it has ended the stream"
            except (grpc.aio.AioRpcError, WireError) as problem:
                reason = _describe(problem)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                reason = "the connection was closed"
            self._ctx.log("no relay", relay=relay, reason=reason)
            channel = self._channels.pop(
                relay, None
            )  # the next has the keys and address as of then
            if channel is not None:
                await channel.close()
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, RETRY_CAP)

    def _hear(self, relay: str, ring: Ring) -> None:
        """Take a call, or notice that a neighbour is there; with an empty ring the relay is."""
        others = [m.name for m in self._ctx.roster.current.members if m.dials_out]
        if ring.peer in others and ring.token:
            self._start(self._take(relay, ring))
        elif not ring.token:
            for peer in others if not ring.peer else {ring.peer} & set(others):
                self._wake(peer)

    async def _take(self, relay: str, ring: Ring) -> None:
        """Take a call: its bytes go to this peer's own port, which asks who it is."""
        call = self._channel(relay).stream_stream(f"/{SERVICE}/Accept")()
        writer: asyncio.StreamWriter | None = None
        assert self._own_address is not None  # it attends, so it listens
        try:
            async with self._incoming.hold(ring.peer):
                await self._open_line(call, Accept(token=ring.token), relay)
                reader, writer = await asyncio.open_connection(*self._own_address, limit=FRAME)
                await _join(call, reader, writer)
        except (WireError, Unreachable, TimeoutError, OSError, grpc.aio.AioRpcError) as problem:
            self._ctx.log("call lost", caller=ring.peer, relay=relay, reason=_describe(problem))
        finally:
            call.cancel()
            if writer is not None:
                writer.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _describe(problem: Exception) -> str:
    if isinstance(problem, grpc.aio.AioRpcError):
        return f"{problem.code().name}: {problem.details()}"
    return str(problem) or "no answer"


async def _join(call: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes over a line to a socket, and the other way, until one of them ends."""

    async def send() -> None:
        while data := await reader.read(FRAME):
            await call.write(data)

    async def receive() -> None:
        while isinstance(frame := await call.read(), bytes):
            writer.write(frame)
            await writer.drain()

    await _run_until_one_ends(send(), receive())
