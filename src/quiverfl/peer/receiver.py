"""What comes in: announcements judged, bodies checked and staged, acknowledged after the commit."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

from quiverfl.errors import QuiverError
from quiverfl.peer import ledger, signing
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.credit import Credit
from quiverfl.peer.identity import LiveIdentity
from quiverfl.peer.intake import Intake, Turns
from quiverfl.peer.ledger import UNIT, Transfer, Verdict
from quiverfl.peer.manifest import Array, Leaves, largest, norm, total
from quiverfl.peer.metrics import Log, PeerMetrics
from quiverfl.peer.roster import LiveRoster
from quiverfl.peer.store import Store, Trace
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import (
    Announcement,
    Assembly,
    Evidence,
    Reply,
    WireError,
    Word,
    data_bytes,
    decode,
)
from quiverfl.transforms.coding import Origin
from quiverfl.transforms.robustness import NormBound

Answer = Callable[[Reply], Awaitable[None]]
LARGEST = 1e18
"""A number beyond this is no parameter; its square, and sums of it, would soon overflow."""
REFUSED_OFTEN, REFUSED_SECONDS = 16, 60.0
"""After so many shares in a row refused for good, a sender gets one look in so many seconds."""


@dataclass(frozen=True)
class Staged:
    transfer: Transfer
    message: Leaves
    told: Array
    """What its sender said of itself, if the topology looks."""


class Receiver:
    """The receiving half of all links."""

    def __init__(
        self,
        transactions: Transactions,
        agreement: Agreement,
        limits: Limits,
        metrics: PeerMetrics,
        log: Log,
        trace: Trace,
        *,
        roster: LiveRoster,
        identity: LiveIdentity,
        store: Store,
        copies: bool = False,
    ) -> None:
        self._roster, self._identity, self._copies = roster, identity, copies
        self._incarnation = store.meta("incarnation")
        self._credit = Credit(agreement.hash, agreement.name, store.shown())
        self._transactions, self._agreement, self._limits = transactions, agreement, limits
        self._metrics, self._log, self._trace = metrics, log, trace
        self._intake, self._streams = Intake(limits.bodies, limits), Turns(limits.streams)
        self._outliers = NormBound(limits.outlier_factor)
        self._commits: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._refused: dict[str, tuple[int, float]] = {}  # in a row, and when the last one was
        self.staged: dict[str, Staged] = {}
        self.heard: dict[str, int] = {}  # the latest round each neighbour is known to be in
        self.changed = asyncio.Event()

    async def push(self, sender: str, frames: AsyncIterator[bytes], answer: Answer) -> None:
        """One attempt of a neighbour to deliver one share."""
        try:
            async with self._streams.of(sender):
                announcement = decode(Announcement, await self._next(frames))
                await self._handle(sender, announcement, frames, answer)
        except TimeoutError:  # it does not read what it is told
            self._metrics.refused("deaf")
        except WireError as problem:
            self._metrics.refused(problem.kind)
            self._log("refused", sender=sender, reason=problem.kind, detail=str(problem))
            word: Word = "denied" if problem.kind in ("malformed", "oversize") else "retry"
            await answer(Reply(word=word, reason=str(problem)[:1000]))

    async def _next(self, frames: AsyncIterator[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                frame = await anext(frames)
        except StopAsyncIteration:
            raise WireError("truncated", "the stream ended early.") from None
        except TimeoutError:
            raise WireError("idle", "no byte came for too long.") from None
        self._metrics.add("received_bytes", len(frame))
        return frame

    async def _handle(
        self, sender: str, a: Announcement, frames: AsyncIterator[bytes], answer: Answer
    ) -> None:
        refusal = self._unacceptable(sender, a)
        if refusal:
            self._metrics.refused(refusal.reason.partition(":")[0])
            self._log("refused", sender=sender, seq=a.seq, reason=refusal.reason)
            await answer(refusal)
            return
        roster, agreed = self._roster.refresh(), self._agreement.hash
        self._transactions.witness(a.clocks, lambda c: signing.clock_holds(roster, agreed, c))
        transfer = _announced(a)
        verdict = self._judge(transfer)
        if verdict in (Verdict.APPLIED, Verdict.REFUSED, Verdict.STAGED):
            self._metrics.add("duplicates")
        if verdict is Verdict.PROCEED:
            verdict = await self._receive(transfer, a.nbytes, frames, answer)
        if verdict is Verdict.STAGED:
            commit = self._commit_of(transfer)  # before anything else can happen
            await answer(Reply(word="staged"))
            await asyncio.shield(commit)
            verdict = self._judge(transfer)
            self._trace("before ack")
        await self._conclude(verdict, transfer, answer)
        self._trace("after ack")

    def _unacceptable(self, sender: str, a: Announcement) -> Reply | None:
        """Reasons that need neither the body nor the accounts."""
        link = self._transactions.accounts.link(sender)
        if a.sender != sender:
            return Reply(word="denied", reason=f"impostor: {sender} announced as {a.sender}")
        if a.receiver != self._agreement.name:
            return Reply(word="denied", reason=f"misdelivered: this is {self._agreement.name}")
        if a.agreement != self._agreement.hash:
            return Reply(word="denied", reason="agreement: another run, configuration or manifest")
        if not self._agreement.manifest.allows(a.nbytes):
            return Reply(word="denied", reason=f"size: {a.nbytes} bytes are not the manifest's")
        if self._copies != (a.units == 0):
            kind = "copies without mass" if self._copies else "shares with a mass"
            return Reply(word="denied", reason=f"mass: by the run's graph there are {kind} only")
        if not link.incarnation:
            return Reply(word="retry", reason="stranger: say hello first")
        if a.incarnation != link.incarnation:
            return Reply(word="denied", reason="incarnation: another store than the one met")
        roster, agreed = self._roster.refresh(), self._agreement.hash
        stores = (a.incarnation, self._incarnation)
        if not signing.holds(roster, "share", _announced(a), agreed, *stores):
            return Reply(word="denied", reason="signature: not by the key in the roster")
        return None

    def _judge(self, transfer: Transfer) -> Verdict:
        staged = {sender: entry.transfer for sender, entry in self.staged.items()}
        return ledger.judge(self._transactions.accounts, staged, transfer)

    def _commit_of(self, transfer: Transfer) -> asyncio.Future[None]:
        key = (transfer.sender, transfer.seq)
        if key not in self._commits:
            self._commits[key] = asyncio.get_running_loop().create_future()
        return self._commits[key]

    async def _receive(
        self, transfer: Transfer, nbytes: int, frames: AsyncIterator[bytes], answer: Answer
    ) -> Verdict:
        """Take the body in; afterwards it is staged, or refused for good."""
        if len(self.staged) >= self._limits.staged:
            raise WireError("busy", "too many shares wait for the next commit; try again later.")
        self._check_record(transfer.sender)
        if not await self._shown(transfer, frames, answer):
            return await self._refuse(transfer, "mass it cannot show")
        async with self._intake.place(transfer.sender) as left:
            await answer(Reply(word="proceed"))
            assembly = Assembly(nbytes, transfer.digest)
            await self._fill(assembly, nbytes, frames, left)
            try:
                message, told = await asyncio.to_thread(self._unpacked, transfer, assembly)
            except WireError:
                raise
            except QuiverError as problem:
                self._log("refused", sender=transfer.sender, reason=str(problem))
                return await self._refuse(transfer, "not a message")
        own = self._transactions.memory.message
        reason, value = await asyncio.to_thread(self._examine, transfer, message, own)
        transfer = replace(transfer, total=value)
        verdict = self._judge(transfer)  # another stream may have been faster
        if verdict is not Verdict.PROCEED:
            return verdict
        if reason:
            return await self._refuse(transfer, reason)
        self.staged[transfer.sender] = Staged(transfer, message, told)
        self.hear(transfer.sender, transfer.round)
        return Verdict.STAGED

    def _unpacked(self, transfer: Transfer, assembly: Assembly) -> tuple[Leaves, Array]:
        origin = Origin(self._roster.current.number(transfer.sender), transfer.round)
        payload, manifest = assembly.payload(), self._agreement.manifest
        return manifest.unpack(payload, origin), manifest.told_by(payload)

    async def _refuse(self, transfer: Transfer, reason: str) -> Verdict:
        if self._judge(transfer) is Verdict.PROCEED:
            await self._transactions.bury(transfer, reason)
            count = self._refused.get(transfer.sender, (0, 0.0))[0]
            self._refused[transfer.sender] = (count + 1, time.monotonic())
            self._metrics.refused(reason)
            self._log.alarm("share refused for good", **_coordinates(transfer), reason=reason)
        return self._judge(transfer)

    async def send_back(self, transfer: Transfer, reason: str) -> None:
        """A share that is staged is refused for good after all: the run's rule does not take it."""
        if not self._transactions.accounts.link(transfer.sender).gone:
            await self._transactions.bury(transfer, reason)
        self._metrics.refused(reason)
        at = transfer.round
        self._log("sent back", sender=transfer.sender, seq=transfer.seq, round=at, reason=reason)
        self._done_with(transfer)

    def _check_record(self, sender: str) -> None:
        """Every share refused for good leaves a line in the books: nobody may fill them so."""
        count, last = self._refused.get(sender, (0, 0.0))
        if count >= REFUSED_OFTEN and time.monotonic() - last < REFUSED_SECONDS:
            raise WireError("refused often", "too many shares in a row were refused: wait.")

    def refused_senders(self) -> set[str]:
        """Whose last share was refused for good."""
        return set(self._refused)

    async def _shown(
        self, transfer: Transfer, frames: AsyncIterator[bytes], answer: Answer
    ) -> bool:
        """Whether the sender can have so much mass; it is asked to show where it comes from."""
        sender = transfer.sender
        if transfer.units > self._limits.mass_cap:
            return True  # refused for that
        while not self._credit.covers(self._transactions.accounts, transfer):
            await answer(Reply(word="show", rows=self._credit.of(sender).rows))
            vouchers = decode(Evidence, await self._next(frames)).vouchers
            if not vouchers:
                return False
            store = self._transactions.accounts.link(sender).incarnation
            roster = self._roster.refresh()
            self._credit.believe(sender, store, self._incarnation, vouchers, roster)
            await self._transactions.note_shown(sender, self._credit.of(sender).written())
        return True

    def hear(self, peer: str, round: int) -> None:
        """A neighbour is known to have come this far; it never goes back."""
        self.heard[peer] = max(round, self.heard.get(peer, 0))
        self.changed.set()

    async def _fill(
        self,
        assembly: Assembly,
        nbytes: int,
        frames: AsyncIterator[bytes],
        left: Callable[[int], float],
    ) -> None:
        """Read a chunk while the one before it is checked.

        In a thread: checksums of a large share would hold up everybody else on the event loop.
        """
        filled = 0
        reading = asyncio.ensure_future(self._next(frames))
        try:
            while not assembly.complete:
                frame = await _in_time(reading, left, filled)
                filled += data_bytes(frame)
                if filled < nbytes:
                    reading = asyncio.ensure_future(self._next(frames))
                await asyncio.to_thread(assembly.add, frame)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _examine(self, transfer: Transfer, message: Leaves, own: Leaves) -> tuple[str, float]:
        """(why this content is refused, or nothing; the sum of its numbers)."""
        top = largest(message)
        if not math.isfinite(top):
            return "not finite", 0.0
        if top > LARGEST:
            return "too large", 0.0
        if transfer.units > self._limits.mass_cap:
            return "mass above the cap", total(message)
        if self._limits.outlier != "off":
            here = norm(own) / max(self._transactions.mass, 1e-12)
            there = norm(message) / (transfer.units / UNIT if transfer.units else 1.0)
            if not self._outliers.takes(there, here):
                self._log.alarm("outlier", **_coordinates(transfer), norm=there, own=here)
                self._metrics.add("alarms")
                if self._limits.outlier == "refuse":
                    return "outlier", total(message)
        return "", total(message)

    async def _conclude(self, verdict: Verdict, transfer: Transfer, answer: Answer) -> None:
        where = _coordinates(transfer)
        if verdict is Verdict.APPLIED:
            await answer(Reply(word="applied", proof=self._receipt("applied", transfer)))
        elif verdict is Verdict.REFUSED:
            reason = self._transactions.accounts.link(transfer.sender).refusal
            proof = self._receipt("refused", transfer)
            await answer(Reply(word="refused", reason=reason, proof=proof))
        elif verdict is Verdict.PROCEED:  # staged, then lost with a rolled-back commit
            await answer(Reply(word="retry", reason="rolled back"))
        else:
            self._metrics.refused(verdict.value)
            self._metrics.add("alarms")
            self._log.alarm("transfer refused", **where, reason=verdict.value)
            await answer(Reply(word="denied", reason=verdict.value))

    def _receipt(self, word: str, transfer: Transfer) -> str:
        store = self._transactions.accounts.link(transfer.sender).incarnation
        papers, agreed = self._identity.refresh(), self._agreement.hash
        return signing.proof(papers, word, transfer, agreed, (store, self._incarnation))

    def take(self, up_to: int | None = None) -> list[tuple[Transfer, Leaves]]:
        """Staged shares in client order; in sync mode those of rounds that are over."""
        here = [s for s in self.staged.values() if up_to is None or s.transfer.round <= up_to]
        order = {name: number for number, name in enumerate(self._roster.current.names)}
        here.sort(key=lambda entry: order.get(entry.transfer.sender, len(order)))
        return [(entry.transfer, entry.message) for entry in here]

    def forget(self, sender: str) -> None:
        """Drop what is staged from a peer that was evicted, and what it has shown."""
        self._credit.forget(sender)
        staged = self.staged.pop(sender, None)
        if staged is not None:
            self.committed([staged.transfer])

    def committed(self, transfers: list[Transfer]) -> None:
        """These are durable now: their senders may be told."""
        for transfer in transfers:
            self._refused.pop(transfer.sender, None)
            self._done_with(transfer)

    def _done_with(self, transfer: Transfer) -> None:
        self.staged.pop(transfer.sender, None)
        waiting = self._commits.pop((transfer.sender, transfer.seq), None)
        if waiting and not waiting.done():
            waiting.set_result(None)


async def _in_time(
    reading: asyncio.Future[bytes], left: Callable[[int], float], filled: int
) -> bytes:
    """The next frame, unless its stream is too slow; others may come to wait in the meantime."""
    while (seconds := left(filled)) > 0:
        done, _ = await asyncio.wait({reading}, timeout=min(seconds, 0.25))
        if done:
            return reading.result()
    raise WireError("slow", "too slow: the bytes arrive below the rate that a sender must keep up.")


def _announced(a: Announcement) -> Transfer:
    return Transfer(a.sender, a.receiver, a.seq, a.round, a.units, a.digest, 0.0, a.proof)


def _coordinates(transfer: Transfer) -> dict[str, object]:
    return {"sender": transfer.sender, "seq": transfer.seq, "round": transfer.round}
