"""One neighbour: the connection to it, greetings, and the shares that go to it.

Connections are mutually authenticated. A time-out proves nothing, so it changes nothing: the same
bytes go out again, after a jittered pause, until the receiver has answered `applied` or `refused`.
Both are durable at its side.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import grpc
import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.disk import StoreError
from quiverfl.peer.accounts.ledger import Transfer
from quiverfl.peer.context import PeerContext
from quiverfl.peer.link.identity import Identity, parse_certificate, verify_signature
from quiverfl.peer.link.roster import Member
from quiverfl.peer.link.wire import (
    CHUNK,
    OLDEST,
    OTHER_PROTOCOL,
    SERVICE,
    VOUCHERS,
    Announcement,
    Clock,
    Evidence,
    Greeting,
    Hello,
    Receipt,
    Reply,
    Statement,
    Voucher,
    WireError,
    decode,
    decode_statements,
    encode,
    split_frames,
)

if TYPE_CHECKING:
    from quiverfl.peer.link.neighbours import Neighbours

Stored = TypeVar("Stored")
LARGEST_FRAME = CHUNK + 1024
PUSH_CLOCKS = 8
"""The clocks that go with an announcement."""
PIECES = 64
"""The most messages of evidence in one attempt to deliver a share."""
FINISHED = "finished"
"""The first word of the refusal when a peer that has had its last round sends a share back."""


class RestoredBackup(QuiverError):
    """This peer's store is older than what its neighbours remember of it."""


class Unreachable(Exception):
    """Not now: try again later. Nothing is known about what the other side did."""


class OlderProtocol(Unreachable):
    """The neighbour does not know this version of the protocol; it may know an older one."""

    def __init__(self, tried: int, refusal: str) -> None:
        super().__init__(refusal)
        self.tried = tried


class Denied(Unreachable):
    """The neighbour will never take this share, so hearing from it is no reason to hurry."""


def pass_on_cancellation() -> NoReturn:
    """Tell a cancelled task from a closed channel, whose calls gRPC cancels in the same way."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    raise Unreachable("the connection was closed") from None


def open_channel(address: str, name: str, identity: Identity, keepalive: float = 20.0) -> Any:
    """Open a mutually authenticated connection that accepts only a certificate for this name."""
    credentials = grpc.ssl_channel_credentials(
        identity.authority, identity.key, identity.certificate
    )
    milliseconds = int(keepalive * 1000)
    options = [
        ("grpc.ssl_target_name_override", name),
        ("grpc.max_receive_message_length", LARGEST_FRAME),
        ("grpc.max_send_message_length", LARGEST_FRAME),
        ("grpc.keepalive_time_ms", milliseconds),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.http2.ping_timeout_ms", milliseconds),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.secure_channel(address, credentials, options=options)


def greeting_text(request: Hello, answer: Hello) -> bytes:
    """The text that a greeting's signature covers: both hellos, with the caller's fresh nonce."""
    return b"quiver greeting\0" + encode(request) + encode(answer)


def list_clocks(ctx: PeerContext, peer: str, most: int) -> list[Clock]:
    """Numbers of pushes of this peer, of the one it talks to, and of some other peers."""
    others = [other for other in ctx.transactions.accounts.links if other != peer]
    chosen = [peer, *random.sample(others, min(len(others), most - 2))]
    clocks = [ctx.transactions.latest_clock(other) for other in chosen]
    own = signing.sign_clock(
        ctx.identity.refresh(),
        ctx.agreement.hash,
        ctx.name,
        ctx.incarnation,
        ctx.transactions.accounts.pushes,
    )
    return [own, *(clock for clock in clocks if clock is not None)]


class ReverseStream:
    """A stream that a neighbour has opened to fetch a share over it, as it cannot be called."""

    def __init__(self, context: Any) -> None:
        self._context = context  # grpc.aio.ServicerContext, whose published types are not its own
        self.closed = asyncio.Event()

    async def write(self, frame: bytes) -> None:
        try:
            await self._context.write(frame)
        except Exception as problem:  # gRPC raises several kinds when the other side has gone
            raise Unreachable(f"the line was closed: {problem}") from None

    async def read(self) -> Any:
        try:
            return await self._context.read()
        except Exception as problem:
            raise Unreachable(f"the line was closed: {problem}") from None

    def cancel(self) -> None:
        """End the stream: it was used, or another one has replaced it."""
        self.closed.set()


class Link:
    """The connection to one neighbour. One that breaks is opened again at the next call."""

    def __init__(self, ctx: PeerContext, peer: str, neighbours: Neighbours) -> None:
        self._ctx, self.peer, self._neighbours = ctx, peer, neighbours
        self._channel: Any = None  # grpc.aio.Channel, whose published types are not its own
        self._protocol = ctx.agreement.newest
        self.greeted = False
        self.vacant = False  # no process listened there at the last call

    def member(self) -> Member:
        try:
            return self._ctx.roster.refresh().member(self.peer)
        except QuiverError as problem:
            raise Unreachable(str(problem)) from None

    def connect(self) -> Any:
        if self._channel is None:
            member = self.member()
            if self.calls_back:
                raise Unreachable(f"{self.peer} only dials out: it calls when it can")
            address = member.address
            if member.dials_out:
                address = self._neighbours.lines.address_of(self.peer)
            keepalive = self._ctx.limits.keepalive_seconds
            identity = self._ctx.identity.refresh()
            self._channel = open_channel(address, self.peer, identity, keepalive)
        return self._channel

    @property
    def calls_back(self) -> bool:
        """Whether the neighbour cannot be called, and fetches its shares from this peer."""
        own = self._ctx.roster.current.member(self._ctx.name)
        return self.member().dials_out and not own.dials_out

    async def disconnect(self) -> None:
        """Close the connection. The next call opens a new one, with the keys as they are then."""
        channel, self._channel, self.greeted = self._channel, None, False
        self._protocol = self._ctx.agreement.newest  # it may have been upgraded meanwhile
        if channel is not None:
            await channel.close()

    def open_reverse_stream(self) -> Any:
        """Open a stream over which the neighbour sends what it has for this peer."""
        return self.connect().stream_stream(f"/{SERVICE}/Collect")()

    async def greet(self, timeout: float | None = None) -> Hello:
        """Introduce this peer, in a version that both know. Returns the neighbour's own hello."""
        while True:
            try:
                return await self._greet(timeout)
            except OlderProtocol as problem:
                self._protocol = min(self._protocol, problem.tried - 1)

    async def _greet(self, timeout: float | None) -> Hello:
        hello = self._neighbours.compose_hello(self.peer, self._protocol)
        timeout = timeout or self._ctx.limits.hello_seconds
        try:
            call = self.connect().unary_unary(f"/{SERVICE}/Hello")
            answer = await call(self._ctx.metrics.count_sent(encode(hello)), timeout=timeout)
            self.vacant = False
            return await self._check_greeting(hello, decode(Greeting, answer))
        except grpc.aio.AioRpcError as problem:
            self.vacant = problem.code() is grpc.StatusCode.UNAVAILABLE
            if self.vacant:
                await self.disconnect()  # a slow network may still be connecting: let it
            reason = f"{problem.code().name}: {problem.details()}"
            raise Unreachable(self._neighbours.lines.problems.get(self.peer, reason)) from None
        except WireError as problem:
            raise Unreachable(f"{self.peer} is not understood: {problem}") from None
        except asyncio.CancelledError:
            pass_on_cancellation()

    async def fetch_statements(self, kind: type[Statement]) -> list[Statement]:
        """Ask for the statements that the neighbour knows; none if it cannot be asked now."""
        answer = await self._ask(kind.method)
        with contextlib.suppress(WireError):
            return [] if answer is None else decode_statements(kind, answer)
        return []

    async def fetch_receipt(self) -> Receipt | None:
        """Ask for the last receipt that the neighbour has of this peer."""
        answer = await self._ask("LastReceipt")
        with contextlib.suppress(WireError):
            return None if answer is None else decode(Receipt, answer)
        return None

    async def _ask(self, method: str) -> bytes | None:
        try:
            call = self.connect().unary_unary(f"/{SERVICE}/{method}")
            return bytes(await call(b"", timeout=self._ctx.limits.hello_seconds))
        except (grpc.aio.AioRpcError, Unreachable):
            return None
        except asyncio.CancelledError:
            with contextlib.suppress(Unreachable):
                pass_on_cancellation()
            return None

    async def _check_greeting(self, hello: Hello, greeting: Greeting) -> Hello:
        if greeting.hello is None:
            if greeting.refusal.startswith(OTHER_PROTOCOL) and hello.protocol > OLDEST:
                raise OlderProtocol(hello.protocol, greeting.refusal)
            self._neighbours.learn_evictions(self.peer)  # the reason may be one that was missed
            raise Unreachable(f"{self.peer} refuses: {greeting.refusal}")
        pem = greeting.certificate.encode()
        try:
            genuine = self._ctx.roster.refresh().identify(pem) == self.peer
        except QuiverError as problem:
            raise Unreachable(f"{self.peer} is not itself: {problem}") from None
        text = greeting_text(hello, greeting.hello)
        if not genuine or not verify_signature(parse_certificate(pem), greeting.signature, text):
            raise Unreachable(f"{self.peer} is not itself: its signature does not fit its key")
        difference = self._ctx.agreement.difference(greeting.hello)
        if difference:
            raise Unreachable(difference)
        try:
            await self._neighbours.accept_hello(greeting.hello)
        except RestoredBackup:
            raise
        except QuiverError as problem:
            self._ctx.log.alarm("neighbour not accepted", to=self.peer, reason=str(problem))
            raise Unreachable(str(problem)) from None
        self.greeted = True
        return greeting.hello


class Sender:
    """Delivers the share in the outbox of one link, until it is acknowledged or refused."""

    def __init__(self, ctx: PeerContext, link: Link) -> None:
        self._ctx, self.link, self.peer = ctx, link, link.peer
        self._reverse: ReverseStream | None = None
        self._closed = asyncio.Event()
        self._wake = asyncio.Event()
        self._random = random.Random(secrets.randbits(64))  # jitter must differ between peers
        self.refund: Transfer | None = None
        """The share that the neighbour has refused, until the next commit takes it back."""
        self.problem = ""
        self._attempted: tuple[int, float] = (0, 0.0)  # seq of the share at hand, and since when

    def _outbox(self) -> Transfer | None:
        return self._ctx.transactions.accounts.link(self.peer).outbox

    @property
    def waiting_seconds(self) -> float:
        """For how long the share in the outbox has been tried; 0 without one."""
        outbox = self._outbox()
        if outbox is None or outbox.seq != self._attempted[0]:
            return 0.0
        return time.monotonic() - self._attempted[1]

    def wake(self) -> None:
        """Try now: there is something to send, or the neighbour has just been in contact."""
        self._wake.set()

    async def run(self) -> None:
        """Deliver whatever is in the outbox, until closed."""
        limits = self._ctx.limits
        pause = limits.retry_first
        while not self._closed.is_set():
            transfer = self._outbox()
            if transfer is None or self.refund is not None:
                await self._rest(None, self._wake)
                continue
            if self._attempted[0] != transfer.seq:
                self._attempted = (transfer.seq, time.monotonic())
            try:
                await self._attempt(transfer)
                pause, self.problem = limits.retry_first, ""
            except Unreachable as problem:
                self._ctx.metrics.add("retries")
                self.problem = str(problem)
                self._ctx.log("retry", to=self.peer, seq=transfer.seq, reason=str(problem))
                await self.link.disconnect()
                early = self._closed if isinstance(problem, Denied) else self._wake
                await self._rest(pause * self._random.uniform(0.5, 1.0), early)
                pause = min(pause * 2, limits.retry_cap)

    async def _rest(self, seconds: float | None, early: asyncio.Event) -> None:
        """Wait for so many seconds, or until the event that ends the rest early."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await early.wait()
        self._wake.clear()

    async def close(self) -> None:
        self._closed.set()
        self.wake()
        await self.link.disconnect()

    async def serve_reverse_stream(self, stream: ReverseStream) -> None:
        """Let the neighbour, which cannot be called, fetch over this stream until it was used."""
        if self._reverse is not None:
            self._reverse.cancel()
        self._reverse = stream
        self.wake()
        try:
            await stream.closed.wait()
        finally:
            stream.cancel()
            if self._reverse is stream:
                self._reverse = None

    async def _attempt(self, transfer: Transfer) -> None:
        call = await self._open_stream()
        try:
            await self._converse(call, transfer)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as problem:
            text = problem.details() if isinstance(problem, grpc.aio.AioRpcError) else "cut"
            raise Unreachable(f"connection lost: {text}") from None
        except TimeoutError:
            raise Unreachable("no answer") from None
        except WireError as problem:
            raise Unreachable(f"{self.peer} is not understood: {problem}") from None
        except asyncio.CancelledError:
            pass_on_cancellation()
        finally:
            call.cancel()

    async def _open_stream(self) -> Any:
        """Open a stream to push over, or take the one that a neighbour behind NAT has opened."""
        if self.link.calls_back:
            if self._reverse is None:
                raise Unreachable(f"{self.peer} only dials out, and does not call at the moment")
            stream, self._reverse = self._reverse, None
            return stream
        if not self.link.greeted:
            await self.link.greet()
        return self.link.connect().stream_stream(f"/{SERVICE}/Push")()

    async def _converse(self, call: Any, transfer: Transfer) -> None:
        ctx, idle = self._ctx, self._ctx.limits.idle_seconds
        announcement = Announcement(
            agreement=ctx.agreement.hash,
            sender=transfer.sender,
            receiver=transfer.receiver,
            incarnation=ctx.incarnation,
            seq=transfer.seq,
            round=transfer.round,
            units=transfer.units,
            nbytes=await self._read_store(ctx.store.payload_size, transfer),
            digest=transfer.digest,
            proof=signing.sign_transfer(
                ctx.identity.refresh(), "share", transfer, ctx.agreement.hash, self._stores()
            ),
            clocks=self._list_clocks(),
        )
        ctx.trace("before send")
        await call.write(ctx.metrics.count_sent(encode(announcement)))
        reply = await self._read_reply(call, idle)
        rows, pieces = reply.rows, 0
        while reply.word == "show":
            if reply.rows != rows or pieces == PIECES:  # the rest is for the next attempt
                raise Unreachable(f"{self.peer} asks for more and more evidence")
            evidence = await self._collect_evidence(rows)
            rows, pieces = rows + len(evidence.vouchers), pieces + 1
            await call.write(ctx.metrics.count_sent(encode(evidence)))
            reply = await self._read_reply(call, idle)
            if reply.word == "show" and not evidence.vouchers:
                raise Denied(f"{self.peer} asks for evidence that there is none of")
        if reply.word == "proceed":
            payload = await self._read_store(ctx.store.payload, transfer)
            for frame in split_frames(payload):
                async with asyncio.timeout(idle):
                    await call.write(ctx.metrics.count_sent(frame))
            ctx.trace("after send")
            reply = await self._read_reply(call, idle)
        if reply.word == "staged":
            # Training may take long. Keep-alive notices a dead neighbour, asking again a deaf one.
            reply = await self._read_reply(call, 10 * idle)
        await self._conclude(reply, transfer)

    def _list_clocks(self) -> list[Clock]:
        return list_clocks(self._ctx, self.peer, PUSH_CLOCKS)

    def _stores(self) -> tuple[str, str]:
        neighbour = self._ctx.transactions.accounts.link(self.peer)
        return self._ctx.incarnation, neighbour.incarnation

    async def _collect_evidence(self, rows: int) -> Evidence:
        store = self._ctx.store
        taken = await asyncio.to_thread(store.vouchers, self.peer, rows, VOUCHERS)
        return Evidence(
            vouchers=[
                Voucher(
                    sender=signing.strip_past(t.sender),
                    seq=t.seq,
                    round=t.round,
                    units=t.units,
                    digest=t.digest,
                    proof=t.proof,
                )
                for t in taken
            ]
        )

    async def _read_store(self, read: Callable[[str], Stored], transfer: Transfer) -> Stored:
        """Read something about a share, unless it was written off while it waited."""
        try:
            return await asyncio.to_thread(read, transfer.digest)
        except StoreError:
            if self._outbox() == transfer:
                raise
            raise Unreachable("written off in the meantime") from None

    async def _read_reply(self, call: Any, seconds: float) -> Reply:
        async with asyncio.timeout(seconds):
            frame = await call.read()
        if not isinstance(frame, bytes):  # grpc.aio.EOF
            raise Unreachable("the neighbour closed the stream")
        return decode(Reply, frame)

    async def _conclude(self, reply: Reply, transfer: Transfer) -> None:
        ctx = self._ctx
        if reply.word in ("applied", "refused"):
            transfer = self._attach_receipt(reply, transfer)
        if reply.word == "applied":
            await ctx.transactions.acknowledge(transfer)
            ctx.metrics.add("transfers")
        elif reply.word == "refused":
            late = reply.reason.startswith(FINISHED)  # the receiver's end is nobody's fault
            log = ctx.log if late else ctx.log.alarm
            log("refused", to=self.peer, seq=transfer.seq, reason=reply.reason)
            self.refund = transfer
            ctx.news.set()
        elif reply.word == "denied":
            ctx.metrics.add("alarms")
            ctx.log.alarm("denied", to=self.peer, seq=transfer.seq, reason=reply.reason)
            raise Denied(f"denied: {reply.reason}")
        else:
            raise Unreachable(f"{reply.word}: {reply.reason}")

    def _attach_receipt(self, reply: Reply, transfer: Transfer) -> Transfer:
        """Add the receipt, which must be signed with the neighbour's key in the roster."""
        ctx = self._ctx
        signed = replace(transfer, proof=reply.proof)
        roster, agreed = ctx.roster.refresh(), ctx.agreement.hash
        if not signing.check_signature(roster, reply.word, signed, agreed, *self._stores()):
            raise Denied(f"the receipt of {self.peer} is not signed with its key in the roster")
        return signed
