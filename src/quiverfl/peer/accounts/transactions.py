"""The running peer's accounts and tensors, changed one transaction at a time.

Every change is computed from the last committed accounts, made durable off the event loop, and only
then becomes what the rest of the process sees.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from quiverfl.engine.exchange.fixed_point import add_shares, average_copies, split_mass, unsent_part
from quiverfl.peer.accounts import ledger
from quiverfl.peer.accounts.ledger import UNIT, Accounts, Entry, Share, Transfer
from quiverfl.peer.accounts.store import Memory, Store
from quiverfl.peer.link.messages import Leaves, Manifest, ShareEncoder, sum_magnitudes, sum_message
from quiverfl.peer.link.wire import Clock
from quiverfl.transforms.codec import Origin
from quiverfl.types import AnyArray

Result = TypeVar("Result")
Flows = list[tuple[int, float]]
"""Units and sums of numbers that a commit takes in or gives out."""
WeighCopies = Callable[[Sequence[Transfer]], tuple[int, list[int]]]
"""Copies → the weight of the own message, and that of each copy."""


MOST_FORGED = 3
"""Clocks of one message that are found forged before the rest is left unread."""


def make_first_entry(kind: str, message: Leaves, round: int = 0, units: int = UNIT) -> Entry:
    """Make the entry that opens an account, with μ = 1 unless the members have granted less."""
    opening = sum_message(message)
    return Entry(kind, round, units, units, 0, opening, 0.0, 0.0, 0.0, sum_magnitudes(message))


class Transactions:
    """Accounts, own share and rest of one peer, in step with its store."""

    def __init__(self, store: Store, manifest: Manifest, number: int = 0) -> None:
        """`number` is this client's."""
        self._store = store
        self._manifest, self._number = manifest, number
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Future[Any]] = set()
        self.accounts: Accounts = store.accounts()
        self.memory: Memory = store.memory()
        self.commit_seconds = 0.0
        self.changed = asyncio.Event()
        """Set after every commit, and whenever a neighbour said something new."""
        self._total = sum_message(self.memory.message)
        # The next commit saves it, reading it in another thread: replaced, never changed in place.
        self._news: Mapping[str, tuple[str, int, str]] = {}

    @property
    def mass(self) -> float:
        """μ as the method sees it: exact, since units < 2^53."""
        return self.accounts.units / UNIT

    def record_clocks(self, clocks: Iterable[Clock], is_genuine: Callable[[Clock], bool]) -> None:
        """Remember the numbers of pushes that other peers have signed; only news is checked.

        An honest member passes on a forged clock only if a key was dropped since; after a few, the
        rest of its clocks is not worth the time.
        """
        forged = 0
        for clock in clocks:
            news = clock.pushes > self.known_pushes(clock.peer)
            same_store = clock.store == self.accounts.link(clock.peer).incarnation
            if not news or not same_store:
                continue
            if is_genuine(clock):
                heard = (clock.store, clock.pushes, clock.proof)
                self._news = {**self._news, clock.peer: heard}
                continue
            forged += 1
            if forged == MOST_FORGED:
                return

    def latest_clock(self, peer: str) -> Clock | None:
        """The newest clock that this peer knows of another."""
        link = self.accounts.link(peer)
        known = (link.incarnation, link.pushes, link.clock)
        store, pushes, proof = max(known, self._news.get(peer, known), key=lambda k: k[1])
        if not proof or store != link.incarnation:
            return None
        return Clock(peer=peer, store=store, pushes=pushes, proof=proof)

    def known_pushes(self, peer: str) -> int:
        clock = self.latest_clock(peer)
        return clock.pushes if clock else 0

    async def _run_exclusively(self, transaction: Callable[[], Result]) -> Result:
        """Run one transaction at a time, off the event loop.

        It runs to its end even if the caller is cancelled.
        """

        async def run() -> Result:
            async with self._lock:
                started = time.perf_counter()
                result = await asyncio.to_thread(transaction)
                self.commit_seconds = time.perf_counter() - started
                self.changed.set()
                return result

        task = asyncio.ensure_future(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def wait_until_idle(self) -> None:
        """Wait for transactions whose callers were cancelled, so that the store may be closed."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)

    async def push(
        self,
        round: int,
        message: Leaves,
        rest: Leaves,
        parts: Mapping[str, int],
        home: int,
        whole: bool = False,
        report: AnyArray | None = None,
    ) -> list[Transfer]:
        """Split the trained message; the shares may be sent once this returns.

        With compression, Q(u) is split and u - Q(u) stays. `whole` turns compression off, so that
        everything can be given away. `report` goes with every share.
        """

        def transaction() -> list[Transfer]:
            # A neighbour may have left or been evicted since it was chosen.
            open = {p: part for p, part in parts.items() if ledger.is_free(self.accounts, p)}
            units, all_parts = split_mass(self.accounts.units, open, home)
            if not units:
                return self._commit_push(round, message, message, rest, {}, [])
            encoder = ShareEncoder(self._manifest, message, self._origin(round), whole, report)
            encoded = {
                part: encoder.encode(part, all_parts) for part in {parts[peer] for peer in units}
            }
            shares = {
                peer: (Share(count, *encoded[parts[peer]][1:]), encoded[parts[peer]][0])
                for peer, count in units.items()
            }
            own = encoder.remainder(home, all_parts)
            outgoing = [(share.units, share.total) for share, _ in shares.values()]
            # The remainder of a coded message is a difference of two, rounded as both are. When
            # everything is given away, nothing stays to measure the rounding against.
            about = message if self._manifest.coding is not None or not home else None
            return self._commit_push(round, message, own, rest, shares, outgoing, about)

        return await self._run_exclusively(transaction)

    async def push_copies(
        self, round: int, message: Leaves, rest: Leaves, to: Iterable[str]
    ) -> list[Transfer]:
        """Push the whole message to each. No mass moves; the receiver weighs the copy."""
        chosen = list(to)

        def transaction() -> list[Transfer]:
            open = [peer for peer in chosen if ledger.is_free(self.accounts, peer)]
            payload, digest, value = b"", "", 0.0
            if open:
                encoder = ShareEncoder(self._manifest, message, self._origin(round))
                payload, digest, value = encoder.encode(1, 1)
            shares = {peer: (Share(0, digest, value), payload) for peer in open}
            return self._commit_push(round, message, message, rest, shares, [])

        return await self._run_exclusively(transaction)

    def _origin(self, round: int) -> Origin:
        return Origin(self._number, round)

    def _commit_push(
        self,
        round: int,
        message: Leaves,
        own: Leaves,
        rest: Leaves,
        shares: Mapping[str, tuple[Share, bytes]],
        outgoing: Flows,
        about: Leaves | None = None,
    ) -> list[Transfer]:
        accounts = ledger.record_clocks(self.accounts, self._news)
        accounts = ledger.push(accounts, round, {p: share for p, (share, _) in shares.items()})
        trained = sum_message(message) - self._total
        entry = self._entry("push", accounts, own, (), outgoing, trained, about)
        memory = Memory(own, rest)
        transfers = [accounts.outbox[peer] for peer in shares]
        payloads = {share.digest: payload for share, payload in shares.values()}
        self._store.push(accounts, memory, transfers, payloads, entry)
        self._publish(accounts, memory, entry)
        return transfers

    async def absorb(
        self,
        receipts: Iterable[tuple[Transfer, Leaves]],
        refunds: Iterable[Transfer],
        finish: bool,
        weigh: WeighCopies | None = None,
        rest_updates: Leaves | None = None,
    ) -> None:
        """Merge in the order given; the receipts may be acknowledged once this returns.

        Shares are added up; `weigh` makes copies be averaged with its weights. A share is dropped
        if its sender was evicted meanwhile: its link's records have been renamed, so nobody's
        records would have this share. A refund whose receiver was evicted is written off already.
        `rest_updates` replaces these leaves of the rest.
        """
        chosen, due = list(receipts), list(refunds)

        def transaction() -> None:
            receipts = [pair for pair in chosen if not self.accounts.link(pair[0].sender).gone]
            refunds = [r for r in due if self.accounts.link(r.receiver).outbox == r]
            transfers = [transfer for transfer, _ in receipts]
            accounts = ledger.record_clocks(self.accounts, self._news)
            accounts = ledger.absorb(accounts, transfers, refunds)
            before = self.memory.message if self._manifest.coding is not None else {}
            message, incoming, outgoing = (
                self._sum_shares(receipts, refunds)
                if weigh is None
                else self._average_copies(receipts, weigh)
            )
            entry = self._entry("absorb", accounts, message, incoming, outgoing, 0.0, before)
            accounts = ledger.finish_round(accounts) if finish else accounts
            memory = Memory(message, {**self.memory.rest, **(rest_updates or {})})
            self._store.absorb(accounts, memory, transfers, refunds, entry)
            self._publish(accounts, memory, entry)

        await self._run_exclusively(transaction)

    def _sum_shares(
        self, receipts: Sequence[tuple[Transfer, Leaves]], refunds: Sequence[Transfer]
    ) -> tuple[Leaves, Flows, Flows]:
        payloads = [share for _, share in receipts]
        payloads += [
            self._manifest.unpack(self._store.payload(refund.digest), self._origin(refund.round))
            for refund in refunds
        ]
        amounts = [(t.units, t.total) for t in (*(transfer for transfer, _ in receipts), *refunds)]
        return add_shares(self.memory.message, payloads), amounts, []

    def _average_copies(
        self, receipts: Sequence[tuple[Transfer, Leaves]], weigh: WeighCopies
    ) -> tuple[Leaves, Flows, Flows]:
        """Average copies; the records say what each copy and the own message contributed."""
        own, others = weigh([transfer for transfer, _ in receipts])
        whole = (own + sum(others)) or 1
        incoming = [
            (0, weight / whole * transfer.total)
            for (transfer, _), weight in zip(receipts, others, strict=True)
        ]
        copies = [(copy, weight) for (_, copy), weight in zip(receipts, others, strict=True)]
        coding, message = self._manifest.coding, self.memory.message
        if coding is None:
            mean, known = average_copies(message, own, copies), self._total
        else:
            pushed = coding.transmit(message, self._origin(self.accounts.round))
            mean = add_shares(unsent_part(message, pushed), [average_copies(pushed, own, copies)])
            known = sum_message(pushed)
        left = (0, (whole - own) / whole * known if own + sum(others) else 0.0)
        return mean, incoming, [left]

    def _entry(
        self,
        kind: str,
        accounts: Accounts,
        message: Leaves,
        incoming: Iterable[tuple[int, float]] = (),
        outgoing: Iterable[tuple[int, float]] = (),
        trained: float = 0.0,
        about: Leaves | None = None,
    ) -> Entry:
        incoming, outgoing = list(incoming), list(outgoing)
        return Entry(
            kind=kind,
            round=accounts.round,
            units=accounts.units,
            units_in=sum(units for units, _ in incoming),
            units_out=sum(units for units, _ in outgoing),
            total=sum_message(message),
            total_in=math.fsum(value for _, value in incoming),
            total_out=math.fsum(value for _, value in outgoing),
            trained=trained,
            scale=sum_magnitudes(message)
            + sum_magnitudes(about or {})
            + sum(abs(value) for _, value in (*incoming, *outgoing)),
        )

    def _publish(self, accounts: Accounts, memory: Memory, entry: Entry) -> None:
        self.accounts, self.memory, self._total = accounts, memory, entry.total

    async def change(
        self, step: Callable[[Accounts], Accounts], commit: Callable[[Store, Accounts], None]
    ) -> None:
        """Run a transaction that touches no tensors; nothing is written if nothing changes."""

        def transaction() -> None:
            accounts = step(self.accounts)
            if accounts != self.accounts:
                commit(self._store, accounts)
                self.accounts = accounts

        await self._run_exclusively(transaction)

    def acknowledge(self, transfer: Transfer) -> Awaitable[None]:
        return self.change(
            lambda accounts: ledger.acknowledge(accounts, transfer),
            lambda store, accounts: store.acknowledge(accounts, transfer),
        )

    async def save_proofs(self, sender: str, body: str) -> None:
        await self._run_exclusively(lambda: self._store.save_proofs(sender, body))

    def refuse(self, transfer: Transfer, reason: str) -> Awaitable[None]:
        return self.change(
            lambda accounts: ledger.refuse(accounts, transfer, reason),
            lambda store, accounts: store.refuse(accounts, transfer, reason),
        )

    async def register_store(self, peer: str, incarnation: str) -> None:
        link = self.accounts.link(peer)
        if link.incarnation == incarnation and not link.gone:
            return  # as in every greeting but the first
        await self.change(
            lambda accounts: ledger.register_store(accounts, peer, incarnation),
            lambda store, accounts: store.update(accounts),
        )

    def close_link(self, peer: str) -> Awaitable[None]:
        return self.change(
            lambda accounts: ledger.close_link(accounts, peer),
            lambda store, accounts: store.update(accounts),
        )

    def finish_round(self) -> Awaitable[None]:
        return self.change(ledger.finish_round, lambda store, accounts: store.update(accounts))

    async def evict(self, peer: str, ban: bool = False) -> int:
        """Stop dealing with a peer. Returns what was written off, in units."""
        before = self.accounts
        outbox: list[Transfer | None] = []

        def step(accounts: Accounts) -> Accounts:
            outbox.append(accounts.link(peer).outbox)
            return ledger.evict(accounts, peer, ban)

        await self.change(step, lambda store, accounts: store.evict(accounts, peer, outbox[0]))
        return self.accounts.written_off - before.written_off


def evict_offline(folder: Path, peer: str, ban: bool = False) -> int:
    """Evict a peer in the store of one that is not running; what was written off, in units."""
    store = Store.open(folder)
    try:
        before = store.accounts()
        after = ledger.evict(before, peer, ban)
        store.evict(after, peer, before.link(peer).outbox)
    finally:
        store.close()
    return after.written_off - before.written_off
