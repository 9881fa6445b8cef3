"""What goes out: one sender per neighbour, which tries until the share is acknowledged.

A time-out proves nothing, so it changes nothing: the same bytes go out again, after a jittered
pause, until the receiver has said `applied` or `refused`; both are durable at its side.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer import identity, signing
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.files import StoreError
from quiverfl.peer.identity import Identity
from quiverfl.peer.ledger import Transfer
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.roster import LiveRoster, Member
from quiverfl.peer.store import Trace
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import (
    CHUNK,
    NOTICES_LIMIT,
    OLDEST,
    OTHER_PROTOCOL,
    SERVICE,
    VOUCHERS,
    Amendment,
    AmendmentList,
    Announcement,
    AnyControl,
    Clock,
    Evidence,
    Greeting,
    Hello,
    Notice,
    NoticeList,
    Reply,
    Voucher,
    WireError,
    decode,
    encode,
    frames,
)

LARGEST_FRAME = CHUNK + 1024
Stored = TypeVar("Stored")


class RestoredBackup(QuiverError):
    """This peer's store is older than what its neighbours remember of it."""


class Unreachable(Exception):
    """Not now: try again later. Nothing is known about what the other side did."""


class OlderProtocol(Unreachable):
    """The other side does not know this version of the protocol; it may know an older one."""

    def __init__(self, tried: int, refusal: str) -> None:
        super().__init__(refusal)
        self.tried = tried


class Line:
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
        """It was used, or is of no more use."""
        self.closed.set()


class Denied(Unreachable):
    """The other side will not have this share: hearing from it is no reason to hurry."""


def open_channel(address: str, name: str, identity: Identity, keepalive: float = 20.0) -> Any:
    """A mutually authenticated connection that accepts only a certificate for this name."""
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


class Sender:
    """The sending half of one link."""

    def __init__(
        self,
        peer: str,
        *,
        transactions: Transactions,
        agreement: Agreement,
        limits: Limits,
        roster: LiveRoster,
        identity: Callable[[], Identity],
        incarnation: str,
        payload: Callable[[str], bytes],
        size: Callable[[str], int],
        vouchers: Callable[[str, int, int], list[Transfer]],
        clocks: Callable[[str], list[Clock]],
        compose: Callable[[str, int], Hello],
        on_greeting: Callable[[Hello], Awaitable[None]],
        on_refusal: Callable[[str], None],
        metrics: PeerMetrics,
        log: Log,
        trace: Trace,
    ) -> None:
        self.peer = peer
        self._transactions, self._agreement, self._limits, self._roster = (
            transactions,
            agreement,
            limits,
            roster,
        )
        self._identity, self._incarnation = identity, incarnation
        self._payload, self._size = payload, size
        self._vouchers, self._clocks = vouchers, clocks
        self._compose, self._on_greeting, self._on_refusal = compose, on_greeting, on_refusal
        self._metrics, self._log, self._trace = metrics, log, trace
        self._channel: Any = None  # grpc.aio.Channel, whose published types are not its own
        self._line: Line | None = None
        self._protocol = agreement.newest
        self._greeted = self._closed = False
        self._wake = asyncio.Event()
        self._chance = random.Random(secrets.randbits(64))  # jitter must differ between peers
        self.refund: Transfer | None = None
        self.problem = ""
        self._tried: tuple[int, float] = (0, 0.0)  # the share at hand, and since when

    @property
    def waiting_seconds(self) -> float:
        """For how long the share in the outbox has been tried; 0 if there is none."""
        outbox = self._transactions.accounts.link(self.peer).outbox
        if outbox is None or outbox.seq != self._tried[0]:
            return 0.0
        return time.monotonic() - self._tried[1]

    def wake(self) -> None:
        """There is something to send, or the neighbour has just been heard: try now."""
        self._wake.set()

    async def run(self) -> None:
        """Deliver whatever is in the outbox, until closed."""
        pause = self._limits.retry_first
        while not self._closed:
            transfer = self._transactions.accounts.link(self.peer).outbox
            if transfer is None or self.refund is not None:
                await self._rest(None)
                continue
            if self._tried[0] != transfer.seq:
                self._tried = (transfer.seq, time.monotonic())
            try:
                await self._attempt(transfer)
                pause, self.problem = self._limits.retry_first, ""
            except Unreachable as problem:
                self._metrics.add("retries")
                self.problem = str(problem)
                self._log("retry", to=self.peer, seq=transfer.seq, reason=str(problem))
                await self._disconnect()
                hurry = not isinstance(problem, Denied)
                await self._rest(pause * self._chance.uniform(0.5, 1.0), hurry)
                pause = min(pause * 2, self._limits.retry_cap)

    async def _rest(self, seconds: float | None, hurry: bool = True) -> None:
        """Until there is a reason to try; without hurry, only the end is one."""
        end = math.inf if seconds is None else time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
                self._wake.clear()
        while not hurry and not self._closed and time.monotonic() < end:
            await asyncio.sleep(min(0.1, max(0.0, end - time.monotonic())))

    async def close(self) -> None:
        self._closed = True
        self.wake()
        await self._disconnect()

    async def reconnect(self) -> None:
        """Start over with a new connection, and with the keys as they are now."""
        await self._disconnect()

    async def _disconnect(self) -> None:
        channel, self._channel, self._greeted = self._channel, None, False
        self._protocol = self._agreement.newest  # it may have been upgraded meanwhile
        if channel is not None:
            await channel.close()

    def _member(self) -> Member:
        try:
            return self._roster.refresh().member(self.peer)
        except QuiverError as problem:
            raise Unreachable(str(problem)) from None

    def _connected(self) -> Any:
        if self._channel is None:
            member = self._member()
            if member.dials_out:
                raise Unreachable(f"{self.peer} only dials out: it calls when it can")
            self._channel = open_channel(
                member.address, self.peer, self._identity(), self._limits.keepalive_seconds
            )
        return self._channel

    def line(self) -> Any:
        """A stream over which the neighbour sends what it has for this peer."""
        return self._connected().stream_stream(f"/{SERVICE}/Collect")()

    async def lend(self, line: Line) -> None:
        """The neighbour, which cannot be called, fetches over this line: until it was used."""
        if self._line is not None:
            self._line.cancel()
        self._line = line
        self.wake()
        try:
            await line.closed.wait()
        finally:
            line.cancel()
            if self._line is line:
                self._line = None

    async def hello(self, timeout: float | None = None) -> Hello:
        """Introduce this peer, in a version that both know; what the neighbour says of itself."""
        while True:
            try:
                return await self._hello(timeout)
            except OlderProtocol as problem:
                self._protocol = min(self._protocol, problem.tried - 1)

    async def _hello(self, timeout: float | None) -> Hello:
        hello = self._compose(self.peer, self._protocol)
        timeout = timeout or self._limits.hello_seconds
        call = self._connected().unary_unary(f"/{SERVICE}/Hello")
        try:
            answer = await call(self._metrics.sent(encode(hello)), timeout=timeout)
            return await self._understood(hello, decode(Greeting, answer))
        except grpc.aio.AioRpcError as problem:
            if problem.code() is grpc.StatusCode.UNAVAILABLE:
                await self._disconnect()  # a slow network may still be connecting: let it
            raise Unreachable(f"{problem.code().name}: {problem.details()}") from None
        except WireError as problem:
            raise Unreachable(f"{self.peer} is not understood: {problem}") from None
        except asyncio.CancelledError:
            _pass_on_cancellation()

    async def notices(self) -> list[Notice]:
        """The evictions the neighbour knows of; none if it cannot be asked now."""
        found = await self._ask("Notices", NoticeList)
        return found.notices if found else []

    async def amendments(self) -> list[Amendment]:
        """The changes of the run that the neighbour knows of."""
        found = await self._ask("Amendments", AmendmentList)
        return found.amendments if found else []

    async def _ask(self, method: str, kind: type[AnyControl]) -> AnyControl | None:
        try:
            call = self._connected().unary_unary(f"/{SERVICE}/{method}")
            answer = await call(b"", timeout=self._limits.hello_seconds)
            return decode(kind, answer, NOTICES_LIMIT)
        except (grpc.aio.AioRpcError, WireError, Unreachable):
            return None
        except asyncio.CancelledError:
            with contextlib.suppress(Unreachable):
                _pass_on_cancellation()
            return None

    async def _understood(self, hello: Hello, greeting: Greeting) -> Hello:
        if greeting.hello is None:
            if greeting.refusal.startswith(OTHER_PROTOCOL) and hello.protocol > OLDEST:
                raise OlderProtocol(hello.protocol, greeting.refusal)
            self._on_refusal(self.peer)  # the reason may be news that this peer has missed
            raise Unreachable(f"{self.peer} refuses: {greeting.refusal}")
        pem = greeting.certificate.encode()
        try:
            genuine = self._roster.refresh().identify(pem) == self.peer
        except QuiverError as problem:
            raise Unreachable(f"{self.peer} is not itself: {problem}") from None
        if not genuine or not identity.signed_by(
            identity.parse(pem), greeting.signature, signed_text(hello, greeting.hello)
        ):
            raise Unreachable(f"{self.peer} is not itself: its signature does not fit its key")
        difference = self._agreement.difference(greeting.hello)
        if difference:
            raise Unreachable(difference)
        try:
            await self._on_greeting(greeting.hello)
        except RestoredBackup:
            raise
        except QuiverError as problem:
            self._log.alarm("neighbour not accepted", to=self.peer, reason=str(problem))
            raise Unreachable(str(problem)) from None
        self._greeted = True
        return greeting.hello

    async def _attempt(self, transfer: Transfer) -> None:
        call = await self._opened()
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
            _pass_on_cancellation()
        finally:
            call.cancel()

    async def _opened(self) -> Any:
        """A stream to push over: one's own, or one that a neighbour behind NAT has opened."""
        if self._member().dials_out:
            if self._line is None:
                raise Unreachable(f"{self.peer} only dials out, and does not call at the moment")
            line, self._line = self._line, None
            return line
        if not self._greeted:
            await self.hello()
        return self._connected().stream_stream(f"/{SERVICE}/Push")()

    async def _converse(self, call: Any, transfer: Transfer) -> None:
        announcement = Announcement(
            agreement=self._agreement.hash,
            sender=transfer.sender,
            receiver=transfer.receiver,
            incarnation=self._incarnation,
            seq=transfer.seq,
            round=transfer.round,
            units=transfer.units,
            nbytes=await self._stored(self._size, transfer),
            digest=transfer.digest,
            proof=signing.proof(
                self._identity(), "share", transfer, self._agreement.hash, self._stores()
            ),
            clocks=self._clocks(self.peer),
        )
        self._trace("before send")
        await call.write(self._metrics.sent(encode(announcement)))
        reply = await self._reply(call, self._limits.idle_seconds)
        while reply.word == "show":
            await call.write(self._metrics.sent(encode(await self._evidence(reply.rows))))
            reply = await self._reply(call, self._limits.idle_seconds)
        if reply.word == "proceed":
            payload = await self._stored(self._payload, transfer)
            for frame in frames(payload):
                async with asyncio.timeout(self._limits.idle_seconds):
                    await call.write(self._metrics.sent(frame))
            self._trace("after send")
            reply = await self._reply(call, self._limits.idle_seconds)
        if reply.word == "staged":
            # Training may take long; keep-alive notices a dead neighbour, asking again a deaf one.
            reply = await self._reply(call, 10 * self._limits.idle_seconds)
        await self._conclude(reply, transfer)

    def _stores(self) -> tuple[str, str]:
        return self._incarnation, self._transactions.accounts.link(self.peer).incarnation

    async def _evidence(self, rows: int) -> Evidence:
        taken = await asyncio.to_thread(self._vouchers, self.peer, rows, VOUCHERS)
        return Evidence(
            vouchers=[
                Voucher(
                    sender=signing.named(t.sender),
                    seq=t.seq,
                    round=t.round,
                    units=t.units,
                    digest=t.digest,
                    proof=t.proof,
                )
                for t in taken
            ]
        )

    async def _stored(self, read: Callable[[str], Stored], transfer: Transfer) -> Stored:
        """What the store has of a share, unless it was written off while it waited."""
        try:
            return await asyncio.to_thread(read, transfer.digest)
        except StoreError:
            if self._transactions.accounts.link(self.peer).outbox == transfer:
                raise
            raise Unreachable("written off in the meantime") from None

    async def _reply(self, call: Any, seconds: float) -> Reply:
        async with asyncio.timeout(seconds):
            frame = await call.read()
        if not isinstance(frame, bytes):  # grpc.aio.EOF
            raise Unreachable("the neighbour closed the stream")
        return decode(Reply, frame)

    async def _conclude(self, reply: Reply, transfer: Transfer) -> None:
        if reply.word in ("applied", "refused"):
            transfer = self._receipted(reply, transfer)
        if reply.word == "applied":
            await self._transactions.acknowledge(transfer)
            self._metrics.add("transfers")
        elif reply.word == "refused":
            self._log.alarm("refused", to=self.peer, seq=transfer.seq, reason=reply.reason)
            self.refund = transfer
        elif reply.word == "denied":
            self._metrics.add("alarms")
            self._log.alarm("denied", to=self.peer, seq=transfer.seq, reason=reply.reason)
            raise Denied(f"denied: {reply.reason}")
        else:
            raise Unreachable(f"{reply.word}: {reply.reason}")

    def _receipted(self, reply: Reply, transfer: Transfer) -> Transfer:
        """The transfer with its receipt, which must be by the neighbour's key in the roster."""
        signed = replace(transfer, proof=reply.proof)
        roster, agreed = self._roster.refresh(), self._agreement.hash
        if not signing.holds(roster, reply.word, signed, agreed, *self._stores()):
            raise Denied(f"the receipt of {self.peer} is not signed with its key in the roster")
        return signed


def _pass_on_cancellation() -> NoReturn:
    """gRPC cancels the calls of a closed channel; that is not a request to end this task."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    raise Unreachable("the connection was closed") from None


def signed_text(asked: Hello, answered: Hello) -> bytes:
    """What a greeting's signature covers: both sides' words, with the asker's fresh nonce."""
    return b"quiver greeting\0" + encode(asked) + encode(answered)
