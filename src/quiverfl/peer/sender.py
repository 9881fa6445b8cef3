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
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import grpc.aio

from quiverfl.peer import signing
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.connection import (
    Denied,
    Line,
    Unreachable,
    pass_on_cancellation,
)
from quiverfl.peer.contact import Contact
from quiverfl.peer.files import StoreError
from quiverfl.peer.identity import Identity
from quiverfl.peer.ledger import Transfer
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.roster import LiveRoster
from quiverfl.peer.store import Trace
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import (
    SERVICE,
    VOUCHERS,
    Announcement,
    Clock,
    Evidence,
    Reply,
    Voucher,
    WireError,
    decode,
    encode,
    frames,
)

Stored = TypeVar("Stored")


class Sender:
    """The sending half of one link."""

    def __init__(
        self,
        contact: Contact,
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
        metrics: PeerMetrics,
        log: Log,
        trace: Trace,
    ) -> None:
        self.contact, self.peer = contact, contact.peer
        self._transactions, self._agreement, self._limits, self._roster = (
            transactions,
            agreement,
            limits,
            roster,
        )
        self._identity, self._incarnation = identity, incarnation
        self._payload, self._size = payload, size
        self._vouchers, self._clocks = vouchers, clocks
        self._metrics, self._log, self._trace = metrics, log, trace
        self._line: Line | None = None
        self._closed = False
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
                await self.contact.disconnect()
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
        await self.contact.disconnect()

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
            pass_on_cancellation()
        finally:
            call.cancel()

    async def _opened(self) -> Any:
        """A stream to push over: one's own, or one that a neighbour behind NAT has opened."""
        if self.contact.member().dials_out:
            if self._line is None:
                raise Unreachable(f"{self.peer} only dials out, and does not call at the moment")
            line, self._line = self._line, None
            return line
        if not self.contact.greeted:
            await self.contact.hello()
        return self.contact.connected().stream_stream(f"/{SERVICE}/Push")()

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
