"""All neighbours: a sender for each, who is absent, finished or leaving, and what they sign."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import UNIT, LinkRecord, is_free
from quiverfl.peer.accounts.signing import check_clock, check_signature, sign_statement
from quiverfl.peer.changes import SignedLog, open_amendment_log, open_eviction_log
from quiverfl.peer.context import PeerContext, describe_rollback
from quiverfl.peer.link.link import Link, RestoredBackup, Sender, Unreachable, list_clocks
from quiverfl.peer.link.receiver import Receiver
from quiverfl.peer.link.relay import RelayedLines
from quiverfl.peer.link.wire import (
    CLOCKS,
    Amendment,
    Clock,
    EvictionNotice,
    Hello,
    Reply,
    Statement,
    encode,
)

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

TELL_SECONDS = 2.0
"""Time limit of a greeting that only brings news."""
NEWS_PATIENCE = 5.0
"""Time that the peer waits for messages that neighbours have announced."""
WORK_PART, LEAST_PAUSE, LONGEST_PAUSE = 0.05, 0.2, 30.0
"""A member's news may take this part of a processor's time; the pauses between two fetches follow
from that, within these bounds."""


class Neighbours:
    """The members of the run except this peer."""

    def __init__(self, ctx: PeerContext, node: Node) -> None:
        self._ctx, self._node = ctx, node
        self.absent: set[str] = set()  # missed a deadline and not in step since: not waited for
        self.clogged: set[str] = set()  # have not acknowledged in time: not waited for either
        self.greeted: set[str] = set()  # since this process has started
        self.done: set[str] = set()  # have finished and delivered everything
        self.ends: set[tuple[str, int]] = set()  # who has ever said so, of how many rounds
        agreed, store = ctx.agreement.hash, ctx.store
        self.evictions = open_eviction_log(agreed, store.statements(EvictionNotice.table))
        self.amendments = open_amendment_log(agreed, store.statements(Amendment.table))
        self._informed: dict[str, tuple[bool, bool]] = {}  # callers: our (leaving, finished) then
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetches: dict[tuple[str, str], bool] = {}  # under way; whether to fetch once more
        self._fetch_at: dict[tuple[str, str], float] = {}  # not before
        self._work_seconds = 0.0  # spent on what was fetched
        self._announced: dict[str, int] = {}  # seq of the last share that each says it has for us
        self.lines = RelayedLines(ctx, self.wake)
        self.senders = {
            peer: Sender(ctx, Link(ctx, peer, self))
            for peer in ctx.roster.current.names
            if peer != ctx.name
        }

    def wake(self, peer: str) -> None:
        """Try a share at once: its receiver has just been in contact."""
        if peer in self.senders:
            self.senders[peer].wake()

    def add(self, peer: str) -> Sender:
        """Deal with a member that the roster has had since this peer started."""
        self.senders[peer] = Sender(self._ctx, Link(self._ctx, peer, self))
        return self.senders[peer]

    # Greetings

    def compose_hello(self, peer: str, protocol: int) -> Hello:
        ctx, accounts = self._ctx, self._ctx.transactions.accounts
        link = accounts.link(peer)
        link = LinkRecord() if link.gone else link  # a peer that comes back has another store
        return Hello(
            protocol=protocol,
            run=ctx.agreement.run,
            configuration=ctx.agreement.configuration,
            manifest=ctx.agreement.manifest.hash,
            sender=ctx.name,
            receiver=peer,
            incarnation=ctx.incarnation,
            towards=link.incarnation,
            nonce=secrets.token_hex(32),
            sent=link.sent,
            acknowledged=link.sent - (1 if link.outbox else 0),
            received=link.received,
            round=accounts.round + int(self._node.rounds_end_with_push and accounts.pushed),
            clocks=list_clocks(ctx, peer, CLOCKS),
            notices=self.evictions.hash,
            leaving=self._node.leaving,
            finished=self._node.finished,
            amendments=self.amendments.hash,
        )

    def answer_hello(self, hello: Hello) -> Hello:
        """Greet a caller in turn; it may be one that cannot be called itself."""
        answer = self.compose_hello(hello.sender, hello.protocol)
        self._informed[hello.sender] = (answer.leaving, answer.finished)
        return answer

    def _is_genuine(self, clock: Clock) -> bool:
        return check_clock(self._ctx.roster.refresh(), self._ctx.agreement.hash, clock)

    def _proves_rollback(self, hello: Hello) -> bool:
        """Whether a neighbour shows that this store has pushed more often than it knows.

        The proof is this store's own signature. The neighbour's past is compared with this peer's
        present, so messages under way do no harm.
        """
        own, pushes = (
            (self._ctx.name, self._ctx.incarnation),
            self._ctx.transactions.accounts.pushes,
        )
        clocks = [c for c in hello.clocks if (c.peer, c.store) == own and c.pushes > pushes]
        newest = max(clocks, key=lambda clock: clock.pushes, default=None)
        return newest is not None and self._is_genuine(newest)

    def _check_claims(self, hello: Hello) -> None:
        """Follow up what a neighbour says of a newer store; what is not proven changes nothing.

        A share that this store has sent, and does not know, shows in its clock. So only a receipt
        that it has signed is asked for.
        """
        link = self._ctx.transactions.accounts.link(hello.sender)
        if hello.received <= link.sent and hello.acknowledged <= link.received:
            return
        self._ctx.log.alarm(
            "claim without proof",
            sender=hello.sender,
            received=hello.received,
            acknowledged=hello.acknowledged,
        )
        if hello.acknowledged > link.received:
            self._fetch("receipt", hello.sender, lambda: self._check_receipt(hello.sender))

    async def _check_receipt(self, peer: str) -> None:
        receipt = await self.senders[peer].link.fetch_receipt()
        ctx, link = self._ctx, self._ctx.transactions.accounts.link(peer)
        if receipt is None or receipt.seq <= link.received or self._node.settings.trust_store:
            return
        transfer, roster = receipt.transfer(peer, ctx.name), ctx.roster.refresh()
        stores = (link.incarnation, ctx.incarnation)
        if check_signature(roster, receipt.word, transfer, ctx.agreement.hash, *stores):
            self._node.fail(RestoredBackup(describe_rollback(ctx.name, peer)))

    def count_missing_quorum(self) -> int:
        """Number of neighbours still to ask before this peer may spend from a store that has spent.

        Half of the neighbours must have told what they remember and have heard of this peer.
        """
        if self._node.settings.trust_store or not self._ctx.transactions.accounts.pushes:
            return 0
        staying = self.list_staying()
        return max(0, (len(staying) + 1) // 2 - len(staying & self.greeted))

    async def accept_hello(self, hello: Hello) -> None:
        """Take in what a neighbour says, as caller or as called."""
        ctx = self._ctx
        self._node.admit_members()
        if hello.towards not in ("", ctx.incarnation):
            raise QuiverError(
                f"{hello.sender!r} remembers another store of {ctx.name!r}: it has not "
                "heard yet that that one was evicted."
            )
        await ctx.transactions.register_store(hello.sender, hello.incarnation)
        if not self._node.settings.trust_store and self._proves_rollback(hello):
            raise RestoredBackup(describe_rollback(ctx.name, hello.sender))
        self._check_claims(hello)
        ctx.transactions.record_clocks(hello.clocks, self._is_genuine)
        if hello.notices and hello.notices != self.evictions.hash:
            self.learn_evictions(hello.sender)
        if hello.amendments and hello.amendments != self.amendments.hash:
            peer = hello.sender
            self._fetch("amendments", peer, lambda: self._learn(self.amendments, peer))
        self.greeted.add(hello.sender)
        if hello.leaving:
            await ctx.transactions.close_link(hello.sender)
        (self.done.add if hello.finished else self.done.discard)(hello.sender)
        if hello.finished:
            self.ends.add((hello.sender, self._node.settings.rounds))
        self.senders[hello.sender].wake()
        self._announced[hello.sender] = hello.sent
        self._node.receiver.note_round(hello.sender, hello.round)

    def has_delivered(self, peer: str, staged: int) -> bool:
        """Whether all shares that a neighbour has spoken of are here; `staged` is the last one."""
        received = self._ctx.transactions.accounts.link(peer).received
        return self._announced.get(peer, 0) <= max(received, staged)

    async def announce(self, peers: set[str]) -> set[str]:
        """Say hello to these, with news of this peer. Returns those that know the news."""
        news = (self._node.leaving, self._node.finished)

        async def announce_to(sender: Sender) -> str | None:
            if self._calls_back(sender.peer):  # it knows if it has called since
                return sender.peer if self._informed.get(sender.peer) == news else None
            try:
                await sender.link.greet(timeout=TELL_SECONDS)
            except Unreachable:
                return None
            return sender.peer

        informed = await asyncio.gather(
            *(announce_to(self.senders[peer]) for peer in sorted(peers))
        )
        return {peer for peer in informed if peer}

    # Signed statements

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _fetch(self, what: str, peer: str, work: Callable[[], Awaitable[object]]) -> None:
        """Fetch something that a member has announced: in the background, one at a time."""
        key = (peer, what)
        if key in self._fetches:
            self._fetches[key] = True
            return
        self._fetches[key] = False
        self._start(self._run_fetches(key, work))

    async def _run_fetches(
        self, key: tuple[str, str], work: Callable[[], Awaitable[object]]
    ) -> None:
        try:
            while True:
                await asyncio.sleep(max(0.0, self._fetch_at.get(key, 0.0) - time.monotonic()))
                self._fetches[key] = False
                used = self._work_seconds
                await work()
                pause = (self._work_seconds - used) / WORK_PART
                pause = min(max(pause, LEAST_PAUSE), LONGEST_PAUSE)
                self._fetch_at[key] = time.monotonic() + pause
                if not self._fetches[key]:
                    return
        finally:
            del self._fetches[key]

    async def wait_for_news(self) -> None:
        """Wait until all that greetings have announced was fetched, but not for long."""
        end = time.monotonic() + NEWS_PATIENCE
        while self._tasks and (seconds := end - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def close(self) -> None:
        """Cancel the background tasks without waiting for any neighbour."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(sender.close() for sender in self.senders.values()))
        await self.lines.close()

    async def _record(self, log: SignedLog[Statement], statement: Statement) -> bool:
        """Add a statement to its log and to the store. Returns whether it is news."""
        body = log.add(statement, self._ctx.roster.refresh())
        if body:
            await asyncio.to_thread(self._ctx.store.add_statement, statement.table, body)
            self._ctx.log("statement", log=statement.table, content=statement.content)
            self._ctx.news.set()
        return bool(body)

    async def sign(self, log: SignedLog[Statement], statement: Statement) -> None:
        """Sign a statement of this member, and announce it to all other members."""
        identity = self._ctx.identity.refresh()
        signed = sign_statement(identity, self._ctx.agreement.hash, statement)
        if await self._record(log, signed):
            self._start(self._tell_everybody())

    async def _tell_everybody(self) -> None:
        await self.announce(self.list_staying())

    async def _learn(self, log: SignedLog[Statement], peer: str) -> None:
        fetched = await self.senders[peer].link.fetch_statements(log.kind)
        began, roster = time.monotonic(), self._ctx.roster.refresh()
        for statement in await asyncio.to_thread(log.pick_news, fetched, roster):
            await self._record(log, statement)
        self._work_seconds += time.monotonic() - began

    def learn_evictions(self, peer: str) -> None:
        """Fetch in the background the evictions that a neighbour knows of, and follow them."""
        self._fetch("evictions", peer, lambda: self._learn_evictions(peer))

    async def _learn_evictions(self, peer: str) -> None:
        await self._learn(self.evictions, peer)
        for about, store, ban in self.evictions.decisions(self._ctx.roster.refresh().names):
            if (about, store) == (self._ctx.name, self._ctx.incarnation):
                self._node.fail(
                    QuiverError(
                        f"most others have evicted this store of {about!r}: "
                        + ("it was banned." if ban else "let it join again with a new one.")
                    )
                )
                continue
            link = self._ctx.transactions.accounts.link(about)
            if link.incarnation == store and (not link.gone or (ban and not link.banned)):
                await self.evict(about, ban)

    async def evict(self, peer: str, ban: bool) -> int:
        """Stop dealing with a peer, and sign that. Returns the units written off."""
        ctx = self._ctx
        store = ctx.transactions.accounts.link(peer).incarnation
        lost = await ctx.transactions.evict(peer, ban)
        self._node.receiver.forget(peer)
        self.senders[peer].refund = None
        ctx.log.alarm("evicted", about=peer, written_off=lost / UNIT)
        if store:
            await self._sign_eviction(peer, store, ban)
        return lost

    async def sign_evictions(self) -> None:
        """Sign the evictions that were made here while the peer did not run."""
        for peer, link in self._ctx.transactions.accounts.links.items():
            if link.gone and link.incarnation:
                await self._sign_eviction(peer, link.incarnation, link.banned)

    async def _sign_eviction(self, peer: str, store: str, ban: bool) -> None:
        notice = EvictionNotice(by=self._ctx.name, about=peer, store=store, ban=ban)
        await self.sign(self.evictions, notice)

    # Who takes part

    def list_outside(self) -> set[str]:
        """Neighbours that no share is expected from, and none is sent to."""
        links = self._ctx.transactions.accounts.links
        gone = {peer for peer, link in links.items() if link.gone or link.closed}
        gone |= {peer for peer in self.senders if not self._node.is_member(peer)}
        return gone | {peer for peer in self.senders if self._is_severed(peer)}

    def list_staying(self) -> set[str]:
        return set(self.senders) - self.list_outside()

    def _dials_out(self, peer: str) -> bool:
        return self._ctx.roster.current.member(peer).dials_out

    def _calls_back(self, peer: str) -> bool:
        """Whether a neighbour cannot be called, and calls this peer."""
        return self._dials_out(peer) and not self._dials_out(self._ctx.name)

    def _is_severed(self, peer: str) -> bool:
        """Whether both only dial out and none relays. Their mass goes by way of other members."""
        both = self._dials_out(peer) and self._dials_out(self._ctx.name)
        return both and not self.lines.relays()

    def is_free(self, peer: str) -> bool:
        open_to = self._node.is_member(peer) and not self._is_severed(peer)
        return open_to and is_free(self._ctx.transactions.accounts, peer)

    def worth_waiting_for(self, peers: set[str]) -> set[str]:
        """The subset of `peers` whose acknowledgement a round may wait for.

        A neighbour that let a deadline pass is waited for again once it has acknowledged. So a
        member that never does costs one deadline, not one a round.
        """
        self.clogged = {peer for peer in self.clogged if not self.is_free(peer)}
        return peers - self.list_outside() - self.absent - self.clogged

    def refunding(self) -> list[Sender]:
        """The senders whose share was refused and is to be taken back."""
        return [sender for sender in self.senders.values() if sender.refund is not None]


NEWS_SECONDS = 2.0
"""Pause between greetings of a neighbour without shares to send: none can call with news."""


class SharePuller:
    """Fetches one neighbour's shares for a peer that cannot be called, behind NAT or a firewall.

    The peer opens a stream, and the neighbour sends a share over it just as it would push it. So
    the same checks, signatures and records hold, and no third party is needed.
    """

    def __init__(self, ctx: PeerContext, link: Link, receiver: Receiver) -> None:
        self._ctx, self._link, self._receiver = ctx, link, receiver
        self._random = random.Random(secrets.randbits(64))

    async def run(self) -> None:
        limits = self._ctx.limits
        pause = limits.retry_first
        while True:
            try:
                await self._fetch()
                pause = limits.retry_first
            except Unreachable as problem:
                self._ctx.log("cannot fetch", peer_called=self._link.peer, reason=str(problem))
                await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
                pause = min(2 * pause, limits.retry_cap)

    async def _fetch(self) -> None:
        """Fetch one share, however long it takes to come."""
        await self._link.greet()
        call = self._link.open_reverse_stream()
        reading = asyncio.ensure_future(call.read())

        async def answer(reply: Reply) -> None:
            await call.write(self._ctx.metrics.count_sent(encode(reply)))

        try:
            while not (await asyncio.wait({reading}, timeout=NEWS_SECONDS))[0]:
                await self._link.greet()
            frames = _read_frames(reading.result(), call)
            await self._receiver.push(self._link.peer, frames, answer)
            await call.done_writing()
            async with asyncio.timeout(self._ctx.limits.hello_seconds):
                await call.read()  # the end, once the other side has received the last message
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as problem:
            text = problem.details() if isinstance(problem, grpc.aio.AioRpcError) else "cut"
            raise Unreachable(f"connection lost: {text}") from None
        except TimeoutError:
            raise Unreachable("no answer") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Unreachable("the connection was closed") from None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            call.cancel()


async def _read_frames(first: Any, call: Any) -> AsyncIterator[bytes]:
    frame = first
    while isinstance(frame, bytes):
        yield frame
        frame = await call.read()
