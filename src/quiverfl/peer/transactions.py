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

from quiverfl.engine.shares import added, averaged, split_mass, unknown
from quiverfl.peer import ledger
from quiverfl.peer.ledger import UNIT, Accounts, Share, Transfer
from quiverfl.peer.manifest import Array, Leaves, Manifest, magnitude, total
from quiverfl.peer.sealing import Sealing
from quiverfl.peer.statement import Entry
from quiverfl.peer.store import Memory, Store
from quiverfl.peer.wire import Clock
from quiverfl.transforms.coding import Origin

Result = TypeVar("Result")
Moved = list[tuple[int, float]]
"""Units and sums of numbers that a commit takes in or gives out."""
Weigh = Callable[[Sequence[Transfer]], tuple[int, list[int]]]
"""The weights of the own message and of each of these copies."""


def first_entry(kind: str, message: Leaves, round: int = 0) -> Entry:
    """The entry that opens an account with μ = 1."""
    opening = total(message)
    return Entry(kind, round, UNIT, UNIT, 0, opening, 0.0, 0.0, 0.0, magnitude(message))


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
        self._total = total(self.memory.message)
        # Kept with the next commit, which reads it in another thread: replaced, never changed.
        self._witnessed: Mapping[str, tuple[str, int, str]] = {}

    @property
    def mass(self) -> float:
        """μ as the method sees it: exact, since units < 2^53."""
        return self.accounts.units / UNIT

    def witness(self, clocks: Iterable[Clock], genuine: Callable[[Clock], bool]) -> None:
        """Others have come so far, by their own signature; only news is looked at."""
        for clock in clocks:
            news = clock.pushes > self.known_pushes(clock.peer)
            same_store = clock.store == self.accounts.link(clock.peer).incarnation
            if news and same_store and genuine(clock):
                heard = (clock.store, clock.pushes, clock.proof)
                self._witnessed = {**self._witnessed, clock.peer: heard}

    def clock(self, peer: str) -> Clock | None:
        """The latest this peer knows of another."""
        link = self.accounts.link(peer)
        known = (link.incarnation, link.pushes, link.clock)
        store, pushes, proof = max(known, self._witnessed.get(peer, known), key=lambda k: k[1])
        if not proof or store != link.incarnation:
            return None
        return Clock(peer=peer, store=store, pushes=pushes, proof=proof)

    def known_pushes(self, peer: str) -> int:
        clock = self.clock(peer)
        return clock.pushes if clock else 0

    async def _alone(self, transaction: Callable[[], Result]) -> Result:
        """One at a time, off the event loop, and to its end even if the caller is cancelled."""

        async def run() -> Result:
            async with self._lock:
                started = time.perf_counter()
                result = await asyncio.to_thread(transaction)
                self.commit_seconds = time.perf_counter() - started
                return result

        task = asyncio.ensure_future(run())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def settle(self) -> None:
        """Wait for transactions whose callers were cancelled; then the store may be closed."""
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
        told: Array | None = None,
    ) -> list[Transfer]:
        """Split the trained message; the shares may be sent once this returns.

        Where the run compresses, what is split is Q(u), and u - Q(u) stays; with `whole` it does
        not compress, so that everything can be given away. `told` goes with every share.
        """

        def transaction() -> list[Transfer]:
            # A neighbour may have left or been evicted since it was chosen.
            open = {p: part for p, part in parts.items() if ledger.free(self.accounts, p)}
            units, all_parts = split_mass(self.accounts.units, open, home)
            if not units:
                return self._pushed(round, message, message, rest, {}, [])
            sealing = Sealing(self._manifest, message, self._origin(round), whole, told)
            sealed = {
                part: sealing.sealed(part, all_parts) for part in {parts[peer] for peer in units}
            }
            shares = {
                peer: (Share(count, *sealed[parts[peer]][1:]), sealed[parts[peer]][0])
                for peer, count in units.items()
            }
            own = sealing.own(home, all_parts)
            outgoing = [(share.units, share.total) for share, _ in shares.values()]
            # What stays of a coded message is its difference to another, rounded as both are; and
            # of one that is given away nothing stays by which its rounding could be measured.
            about = message if self._manifest.coding is not None or not home else None
            return self._pushed(round, message, own, rest, shares, outgoing, about)

        return await self._alone(transaction)

    async def push_copies(
        self, round: int, message: Leaves, rest: Leaves, to: Iterable[str]
    ) -> list[Transfer]:
        """The whole message to each; no mass moves, and the receiver weighs it."""
        chosen = list(to)

        def transaction() -> list[Transfer]:
            open = [peer for peer in chosen if ledger.free(self.accounts, peer)]
            payload, digest, value = b"", "", 0.0
            if open:
                sealing = Sealing(self._manifest, message, self._origin(round))
                payload, digest, value = sealing.sealed(1, 1)
            shares = {peer: (Share(0, digest, value), payload) for peer in open}
            return self._pushed(round, message, message, rest, shares, [])

        return await self._alone(transaction)

    def _origin(self, round: int) -> Origin:
        return Origin(self._number, round)

    def _pushed(
        self,
        round: int,
        message: Leaves,
        own: Leaves,
        rest: Leaves,
        shares: Mapping[str, tuple[Share, bytes]],
        outgoing: Moved,
        about: Leaves | None = None,
    ) -> list[Transfer]:
        accounts = ledger.witness(self.accounts, self._witnessed)
        accounts = ledger.push(accounts, round, {p: share for p, (share, _) in shares.items()})
        trained = total(message) - self._total
        entry = self._entry("push", accounts, own, (), outgoing, trained, about)
        memory = Memory(own, rest)
        transfers = [accounts.outbox[peer] for peer in shares]
        payloads = {share.digest: payload for share, payload in shares.values()}
        self._store.push(accounts, memory, transfers, payloads, entry)
        self._become(accounts, memory, entry)
        return transfers

    async def absorb(
        self,
        receipts: Iterable[tuple[Transfer, Leaves]],
        refunds: Iterable[Transfer],
        finish: bool,
        weigh: Weigh | None = None,
        noted: Leaves | None = None,
    ) -> None:
        """Merge in the order given; the receipts may be acknowledged once this returns.

        Shares are added up; copies are averaged with the weights that `weigh` has for them. A share
        whose sender was evicted after it was chosen is dropped: its link's past is filed away by
        then, and nobody's records would have this share. A refund whose receiver was evicted is
        written off already. `noted` replaces these leaves of the rest.
        """
        chosen, due = list(receipts), list(refunds)

        def transaction() -> None:
            receipts = [pair for pair in chosen if not self.accounts.link(pair[0].sender).gone]
            refunds = [r for r in due if self.accounts.link(r.receiver).outbox == r]
            transfers = [transfer for transfer, _ in receipts]
            accounts = ledger.witness(self.accounts, self._witnessed)
            accounts = ledger.absorb(accounts, transfers, refunds)
            before = self.memory.message if self._manifest.coding is not None else {}
            message, incoming, outgoing = (
                self._sum(receipts, refunds) if weigh is None else self._mean(receipts, weigh)
            )
            entry = self._entry("absorb", accounts, message, incoming, outgoing, 0.0, before)
            accounts = ledger.finish_round(accounts) if finish else accounts
            memory = Memory(message, {**self.memory.rest, **(noted or {})})
            self._store.absorb(accounts, memory, transfers, refunds, entry)
            self._become(accounts, memory, entry)

        await self._alone(transaction)

    def _sum(
        self, receipts: Sequence[tuple[Transfer, Leaves]], refunds: Sequence[Transfer]
    ) -> tuple[Leaves, Moved, Moved]:
        payloads = [share for _, share in receipts]
        payloads += [
            self._manifest.unpack(self._store.payload(refund.digest), self._origin(refund.round))
            for refund in refunds
        ]
        moved = [(t.units, t.total) for t in (*(transfer for transfer, _ in receipts), *refunds)]
        return added(self.memory.message, payloads), moved, []

    def _mean(
        self, receipts: Sequence[tuple[Transfer, Leaves]], weigh: Weigh
    ) -> tuple[Leaves, Moved, Moved]:
        """Copies: the books have what each of them and the own message weighed in the mean."""
        own, others = weigh([transfer for transfer, _ in receipts])
        whole = (own + sum(others)) or 1
        incoming = [
            (0, weight / whole * transfer.total)
            for (transfer, _), weight in zip(receipts, others, strict=True)
        ]
        copies = [(copy, weight) for (_, copy), weight in zip(receipts, others, strict=True)]
        coding, message = self._manifest.coding, self.memory.message
        if coding is None:
            mean, known = averaged(message, own, copies), self._total
        else:
            told = coding.known(message, self._origin(self.accounts.round))
            mean = added(unknown(message, told), [averaged(told, own, copies)])
            known = total(told)
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
            total=total(message),
            total_in=math.fsum(value for _, value in incoming),
            total_out=math.fsum(value for _, value in outgoing),
            trained=trained,
            scale=magnitude(message)
            + magnitude(about or {})
            + sum(abs(value) for _, value in (*incoming, *outgoing)),
        )

    def _become(self, accounts: Accounts, memory: Memory, entry: Entry) -> None:
        self.accounts, self.memory, self._total = accounts, memory, entry.total

    async def change(
        self, step: Callable[[Accounts], Accounts], commit: Callable[[Store, Accounts], None]
    ) -> None:
        """A transaction that touches no tensors; nothing is written if nothing changes."""

        def transaction() -> None:
            accounts = step(self.accounts)
            if accounts != self.accounts:
                commit(self._store, accounts)
                self.accounts = accounts

        await self._alone(transaction)

    def acknowledge(self, transfer: Transfer) -> Awaitable[None]:
        return self.change(
            lambda accounts: ledger.acknowledge(accounts, transfer),
            lambda store, accounts: store.acknowledge(accounts, transfer),
        )

    async def note_shown(self, sender: str, body: str) -> None:
        await self._alone(lambda: self._store.note_shown(sender, body))

    def bury(self, transfer: Transfer, reason: str) -> Awaitable[None]:
        return self.change(
            lambda accounts: ledger.bury(accounts, transfer, reason),
            lambda store, accounts: store.bury(accounts, transfer, reason),
        )

    def meet(self, peer: str, incarnation: str) -> Awaitable[None]:
        return self.change(
            lambda accounts: ledger.meet(accounts, peer, incarnation),
            lambda store, accounts: store.update(accounts),
        )

    def part_from(self, peer: str) -> Awaitable[None]:
        return self.change(
            lambda accounts: ledger.part_from(accounts, peer),
            lambda store, accounts: store.update(accounts),
        )

    def finish_round(self) -> Awaitable[None]:
        return self.change(ledger.finish_round, lambda store, accounts: store.update(accounts))

    async def evict(self, peer: str, ban: bool = False) -> int:
        """Stop dealing with a peer; what was written off, in units."""
        before = self.accounts
        outbox: list[Transfer | None] = []

        def step(accounts: Accounts) -> Accounts:
            outbox.append(accounts.link(peer).outbox)
            return ledger.evict(accounts, peer, ban)

        await self.change(step, lambda store, accounts: store.evict(accounts, peer, outbox[0]))
        return self.accounts.written_off - before.written_off


def evict_at_rest(folder: Path, peer: str, ban: bool = False) -> int:
    """The same in the store of a peer that is not running; what was written off, in units."""
    store = Store.open(folder)
    try:
        before = store.accounts()
        after = ledger.evict(before, peer, ban)
        store.evict(after, peer, before.link(peer).outbox)
    finally:
        store.close()
    return after.written_off - before.written_off
