"""The receiving half of all links: announcements judged, bodies checked and staged, receipts.

A share is acknowledged only after the commit that contains it. Senders are treated fairly: a member
counts once, however many streams it opens, and a body that trickles gives way as soon as somebody
else waits for its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import ledger, signing
from quiverfl.peer.accounts.ledger import UNIT, Transfer, Verdict
from quiverfl.peer.accounts.signing import MassProofs
from quiverfl.peer.context import PeerContext
from quiverfl.peer.link.limits import AdmissionQueue, StreamLimit
from quiverfl.peer.link.messages import Leaves, check_numbers, l2_norm, sum_message
from quiverfl.peer.link.wire import (
    Announcement,
    Assembly,
    Evidence,
    Reply,
    WireError,
    Word,
    count_data_bytes,
    decode,
)
from quiverfl.transforms.codec import Origin
from quiverfl.transforms.robustness import NormBound
from quiverfl.types import AnyArray

Answer = Callable[[Reply], Awaitable[None]]
WORTHLESS = 8
"""Messages of evidence in a row that prove nothing before a sender is believed no more. An honest
one has such messages only where a key was dropped."""
SMALL_CHUNKS, LEAST_CHUNK = 64, 1 << 14
"""A body may come in so many chunks, and in one more for each so many bytes."""
REFUSED_OFTEN, REFUSED_SECONDS = 16, 60.0
"""After so many refused shares in a row, a sender gets one attempt in so many seconds."""


@dataclass(frozen=True)
class Staged:
    transfer: Transfer
    message: Leaves
    report: AnyArray
    """The sender's report for an adaptive topology; empty otherwise."""


class Receiver:
    """The receiving half of all links."""

    def __init__(
        self,
        ctx: PeerContext,
        copies: bool = False,
        heard: Callable[[str], None] = lambda sender: None,
        arrived: Callable[[int], None] = lambda of_round: None,
        opening: Callable[[str], int] = lambda peer: UNIT,
    ) -> None:
        """With `copies` neighbours send whole messages without mass, in place of shares.

        `heard` is called with every neighbour whose announcement is genuine, `arrived` with the
        round of every share that is staged. `opening` says with how much mass a member began; of
        one that has not joined yet, with 0, nothing is taken.
        """
        self._ctx, self._copies, self._heard, self._arrived = ctx, copies, heard, arrived
        self._last_units: dict[str, int] = {}
        self._opening_mass = opening
        limits = ctx.limits
        self._proofs = MassProofs(ctx.agreement.hash, ctx.name, ctx.store.proofs(), opening)
        self._admission = AdmissionQueue(limits.bodies, limits)
        self._streams = StreamLimit(limits.streams)
        self._outliers = NormBound(limits.outlier_factor)
        self._commits: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._refused: dict[str, tuple[int, float]] = {}  # in a row, and when the last one was
        self.staged: dict[str, Staged] = {}
        self.rounds: dict[str, int] = {}  # the latest round each neighbour is known to be in

    async def push(self, sender: str, frames: AsyncIterator[bytes], answer: Answer) -> None:
        """Handle one attempt of a neighbour to deliver one share."""
        try:
            async with self._streams.hold(sender):
                announcement = decode(Announcement, await self._read_frame(frames))
                await self._handle(sender, announcement, frames, answer)
        except TimeoutError:  # the sender does not read the answers
            self._ctx.metrics.count_refusal("deaf")
        except WireError as problem:
            self._ctx.metrics.count_refusal(problem.kind)
            self._ctx.log("refused", sender=sender, reason=problem.kind, detail=str(problem))
            word: Word = "denied" if problem.kind in ("malformed", "oversize") else "retry"
            await answer(Reply(word=word, reason=str(problem)[:1000]))

    async def _read_frame(self, frames: AsyncIterator[bytes]) -> bytes:
        try:
            async with asyncio.timeout(self._ctx.limits.idle_seconds):
                frame = await anext(frames)
        except StopAsyncIteration:
            raise WireError("truncated", "the stream ended early.") from None
        except TimeoutError:
            raise WireError("idle", "no byte came for too long.") from None
        self._ctx.metrics.add("received_bytes", len(frame))
        return frame

    async def _handle(
        self, sender: str, a: Announcement, frames: AsyncIterator[bytes], answer: Answer
    ) -> None:
        refusal = self._check_announcement(sender, a)
        if refusal:
            self._ctx.metrics.count_refusal(refusal.reason.partition(":")[0])
            self._ctx.log("refused", sender=sender, seq=a.seq, reason=refusal.reason)
            await answer(refusal)
            return
        roster, agreed = self._ctx.roster.refresh(), self._ctx.agreement.hash
        self._ctx.transactions.record_clocks(
            a.clocks, lambda clock: signing.check_clock(roster, agreed, clock)
        )
        self._heard(sender)
        transfer = _to_transfer(a)
        verdict = self._judge(transfer)
        if verdict in (Verdict.APPLIED, Verdict.REFUSED, Verdict.STAGED):
            self._ctx.metrics.add("duplicates")
        if verdict is Verdict.PROCEED:
            verdict = await self._receive(transfer, a.nbytes, frames, answer)
        if verdict is Verdict.STAGED:
            commit = self._commit_of(transfer)  # before anything else can happen
            await answer(Reply(word="staged"))
            await asyncio.shield(commit)
            verdict = self._judge(transfer)
            self._ctx.trace("before ack")
        await self._conclude(verdict, transfer, answer)
        self._ctx.trace("after ack")

    def _check_announcement(self, sender: str, a: Announcement) -> Reply | None:
        """Refuse for reasons that need neither the body nor the accounts; None if there is none."""
        link = self._ctx.transactions.accounts.link(sender)
        if a.sender != sender:
            return Reply(word="denied", reason=f"impostor: {sender} announced as {a.sender}")
        if a.receiver != self._ctx.agreement.name:
            return Reply(word="denied", reason=f"misdelivered: this is {self._ctx.agreement.name}")
        if a.agreement != self._ctx.agreement.hash:
            return Reply(word="denied", reason="agreement: another run, configuration or manifest")
        if not self._ctx.agreement.manifest.allows_size(a.nbytes):
            return Reply(word="denied", reason=f"size: {a.nbytes} bytes are not the manifest's")
        if self._copies != (a.units == 0):
            kind = "copies without mass" if self._copies else "shares with a mass"
            return Reply(word="denied", reason=f"mass: by the run's graph there are {kind} only")
        if not self._opening_mass(sender):
            return Reply(word="retry", reason="member: not all have agreed yet that it joins")
        if not link.incarnation:
            return Reply(word="retry", reason="stranger: say hello first")
        if a.incarnation != link.incarnation:
            return Reply(word="denied", reason="incarnation: another store than the one met")
        roster, agreed = self._ctx.roster.refresh(), self._ctx.agreement.hash
        stores = (a.incarnation, self._ctx.incarnation)
        if not signing.check_signature(roster, "share", _to_transfer(a), agreed, *stores):
            return Reply(word="denied", reason="signature: not by the key in the roster")
        return None

    def _judge(self, transfer: Transfer) -> Verdict:
        staged = {sender: entry.transfer for sender, entry in self.staged.items()}
        return ledger.judge_transfer(self._ctx.transactions.accounts, staged, transfer)

    def _commit_of(self, transfer: Transfer) -> asyncio.Future[None]:
        key = (transfer.sender, transfer.seq)
        if key not in self._commits:
            self._commits[key] = asyncio.get_running_loop().create_future()
        return self._commits[key]

    async def _receive(
        self, transfer: Transfer, nbytes: int, frames: AsyncIterator[bytes], answer: Answer
    ) -> Verdict:
        """Receive the body; afterwards it is staged, or refused for good."""
        if len(self.staged) >= self._ctx.limits.staged:
            raise WireError("busy", "too many shares wait for the next commit; try again later.")
        self._check_refusals(transfer.sender)
        if not await self._ask_for_proofs(transfer, frames, answer):
            return await self._refuse(transfer, "mass it cannot show")
        async with self._admission.place(transfer.sender) as seconds_left:
            await answer(Reply(word="proceed"))
            assembly = Assembly(nbytes, transfer.digest)
            await self._fill(assembly, nbytes, frames, seconds_left)
            try:
                message, report = await asyncio.to_thread(self._unpack, transfer, assembly)
            except WireError:
                raise
            except QuiverError as problem:
                self._ctx.log("refused", sender=transfer.sender, reason=str(problem))
                return await self._refuse(transfer, "not a message")
        own = self._ctx.transactions.memory.message
        reason, value = await asyncio.to_thread(self._examine, transfer, message, own)
        transfer = replace(transfer, total=value)
        verdict = self._judge(transfer)  # another stream may have been faster
        if verdict is not Verdict.PROCEED:
            return verdict
        if reason:
            return await self._refuse(transfer, reason)
        self.staged[transfer.sender] = Staged(transfer, message, report)
        self._last_units[transfer.sender] = transfer.units
        self._arrived(transfer.round)
        self.note_round(transfer.sender, transfer.round)
        return Verdict.STAGED

    def _unpack(self, transfer: Transfer, assembly: Assembly) -> tuple[Leaves, AnyArray]:
        origin = Origin(self._ctx.roster.current.number(transfer.sender), transfer.round)
        payload, manifest = assembly.payload(), self._ctx.agreement.manifest
        return manifest.unpack(payload, origin), manifest.unpack_report(payload)

    async def _refuse(self, transfer: Transfer, reason: str) -> Verdict:
        if self._judge(transfer) is Verdict.PROCEED:
            await self._ctx.transactions.refuse(transfer, reason)
            count = self._refused.get(transfer.sender, (0, 0.0))[0]
            self._refused[transfer.sender] = (count + 1, time.monotonic())
            self._ctx.metrics.count_refusal(reason)
            self._ctx.log.alarm("share refused for good", **_log_fields(transfer), reason=reason)
        return self._judge(transfer)

    async def send_back(self, transfer: Transfer, reason: str) -> None:
        """Refuse a staged share for good, as when the robust rule gives it no weight."""
        if not self._ctx.transactions.accounts.link(transfer.sender).gone:
            await self._ctx.transactions.refuse(transfer, reason)
        self._ctx.metrics.count_refusal(reason)
        at = transfer.round
        self._ctx.log(
            "sent back", sender=transfer.sender, seq=transfer.seq, round=at, reason=reason
        )
        self._finish(transfer)

    def _check_refusals(self, sender: str) -> None:
        """Refuse a sender whose refused shares would fill the records: each leaves a line there."""
        count, last = self._refused.get(sender, (0, 0.0))
        if count >= REFUSED_OFTEN and time.monotonic() - last < REFUSED_SECONDS:
            raise WireError("refused often", "too many shares in a row were refused: wait.")

    def refused_senders(self) -> set[str]:
        """Senders whose last share was refused for good."""
        return set(self._refused)

    async def _ask_for_proofs(
        self, transfer: Transfer, frames: AsyncIterator[bytes], answer: Answer
    ) -> bool:
        """Ask the sender where so much mass comes from, until it is proven or there is no more."""
        sender = transfer.sender
        if transfer.units > self._ctx.limits.mass_cap:
            return True  # refused for that
        worthless, before = 0, self._proofs.proven_by(sender).rows
        try:
            while not self._proofs.is_covered(self._ctx.transactions.accounts, transfer):
                await answer(Reply(word="show", rows=self._proofs.proven_by(sender).rows))
                vouchers = decode(Evidence, await self._read_frame(frames)).vouchers
                if not vouchers or worthless == WORTHLESS:
                    return False
                store = self._ctx.transactions.accounts.link(sender).incarnation
                roster, own = self._ctx.roster.refresh(), self._ctx.incarnation
                good = self._proofs.add_vouchers(sender, store, own, vouchers, roster)
                worthless = 0 if good else worthless + 1
        finally:
            proven = self._proofs.proven_by(sender)
            if proven.rows != before:
                await self._ctx.transactions.save_proofs(sender, proven.to_json())
        return True

    def note_round(self, peer: str, round: int) -> None:
        """Remember how far a neighbour has come; it never goes back."""
        self.rounds[peer] = max(round, self.rounds.get(peer, 0))
        self._ctx.news.set()

    async def _fill(
        self,
        assembly: Assembly,
        nbytes: int,
        frames: AsyncIterator[bytes],
        seconds_left: Callable[[int], float],
    ) -> None:
        """Read a chunk while the one before it is checked.

        Checks run in a thread: checksums of a large share would block the event loop.
        """
        received, chunks = 0, SMALL_CHUNKS + nbytes // LEAST_CHUNK
        reading = asyncio.ensure_future(self._read_frame(frames))
        try:
            while not assembly.complete:
                frame = await _read_in_time(reading, seconds_left, received)
                received, chunks = received + count_data_bytes(frame), chunks - 1
                if chunks < 0:
                    raise WireError("malformed", "the body comes in too many small chunks.")
                if received < nbytes:
                    reading = asyncio.ensure_future(self._read_frame(frames))
                await asyncio.to_thread(assembly.add, frame)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _examine(self, transfer: Transfer, message: Leaves, own: Leaves) -> tuple[str, float]:
        """Check the numbers. Returns why they are refused, or nothing, and their sum."""
        if reason := check_numbers(message):
            return reason, 0.0
        if transfer.units > self._ctx.limits.mass_cap:
            return "mass above the cap", sum_message(message)
        if self._ctx.limits.outlier != "off":
            own_norm = l2_norm(own) / max(self._ctx.transactions.mass, 1e-12)
            sent_norm = l2_norm(message) / (transfer.units / UNIT if transfer.units else 1.0)
            if not self._outliers.accepts(sent_norm, own_norm):
                fields = {**_log_fields(transfer), "norm": sent_norm, "own": own_norm}
                self._ctx.log.alarm("outlier", **fields)
                self._ctx.metrics.add("alarms")
                if self._ctx.limits.outlier == "refuse":
                    return "outlier", sum_message(message)
        return "", sum_message(message)

    async def _conclude(self, verdict: Verdict, transfer: Transfer, answer: Answer) -> None:
        fields = _log_fields(transfer)
        if verdict is Verdict.APPLIED:
            await answer(Reply(word="applied", proof=self._sign_receipt("applied", transfer)))
        elif verdict is Verdict.REFUSED:
            reason = self._ctx.transactions.accounts.link(transfer.sender).refusal
            proof = self._sign_receipt("refused", transfer)
            await answer(Reply(word="refused", reason=reason, proof=proof))
        elif verdict is Verdict.PROCEED:  # staged, then lost with a rolled-back commit
            await answer(Reply(word="retry", reason="rolled back"))
        else:
            self._ctx.metrics.count_refusal(verdict.value)
            self._ctx.metrics.add("alarms")
            self._ctx.log.alarm("transfer refused", **fields, reason=verdict.value)
            await answer(Reply(word="denied", reason=verdict.value))

    def _sign_receipt(self, word: str, transfer: Transfer) -> str:
        store = self._ctx.transactions.accounts.link(transfer.sender).incarnation
        stores = (store, self._ctx.incarnation)
        identity, agreed = self._ctx.identity.refresh(), self._ctx.agreement.hash
        return signing.sign_transfer(identity, word, transfer, agreed, stores)

    def last_mass(self, peers: Collection[str]) -> float:
        """The mass of the last shares of some neighbours, 1 each where none has come yet."""
        return sum(self._last_units.get(peer, UNIT) for peer in peers) / UNIT

    def take(self, up_to: int | None = None) -> list[tuple[Transfer, Leaves]]:
        """List staged shares in client order, of rounds up to `up_to` if that is given."""
        ready = [s for s in self.staged.values() if up_to is None or s.transfer.round <= up_to]
        order = {name: number for number, name in enumerate(self._ctx.roster.current.names)}
        ready.sort(key=lambda entry: order.get(entry.transfer.sender, len(order)))
        return [(entry.transfer, entry.message) for entry in ready]

    def forget(self, sender: str) -> None:
        """Drop what is staged from a peer that was evicted, and its proofs."""
        self._proofs.forget(sender)
        self.rounds.pop(sender, None)  # a new store under this name begins in its own round
        staged = self.staged.pop(sender, None)
        if staged is not None:
            self.conclude([staged.transfer])

    def conclude(self, transfers: list[Transfer]) -> None:
        """Let the senders of these know: the commit that contains them is durable."""
        for transfer in transfers:
            self._refused.pop(transfer.sender, None)
            self._finish(transfer)

    def _finish(self, transfer: Transfer) -> None:
        self.staged.pop(transfer.sender, None)
        waiting = self._commits.pop((transfer.sender, transfer.seq), None)
        if waiting and not waiting.done():
            waiting.set_result(None)


async def _read_in_time(
    reading: asyncio.Future[bytes], seconds_left: Callable[[int], float], received: int
) -> bytes:
    """Wait for the next frame, unless its stream is too slow; streams may queue up meanwhile."""
    while (seconds := seconds_left(received)) > 0:
        done, _ = await asyncio.wait({reading}, timeout=min(seconds, 0.25))
        if done:
            return reading.result()
    raise WireError("slow", "too slow: the bytes arrive below the rate that a sender must keep up.")


def _to_transfer(a: Announcement) -> Transfer:
    return Transfer(a.sender, a.receiver, a.seq, a.round, a.units, a.digest, 0.0, a.proof)


def _log_fields(transfer: Transfer) -> dict[str, object]:
    return {"sender": transfer.sender, "seq": transfer.seq, "round": transfer.round}
