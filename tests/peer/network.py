"""A network that loses, doubles, reorders and cuts, between peers that crash. Seeded, no I/O.

The peers use the ledger's own functions in the order the runtime uses them; what is `durable` is
what a real peer has committed. The two mutants break one rule each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np

from quiverfl.peer.accounts import ledger
from quiverfl.peer.accounts.ledger import (
    UNIT,
    Accounts,
    Entry,
    Received,
    Sent,
    Share,
    Statement,
    Transfer,
    Verdict,
)
from quiverfl.peer.link.messages import add_shares, scale_message, sum_magnitudes, sum_message

Message = dict[str, np.ndarray]


@dataclass
class Books:
    """The durable side of one peer."""

    accounts: Accounts
    u: Message
    payloads: dict[str, Message] = field(default_factory=dict)
    sent: dict[tuple[str, int], Sent] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)

    def copy(self) -> Books:
        return Books(
            self.accounts,
            self.u,
            dict(self.payloads),
            dict(self.sent),
            list(self.received),
            list(self.entries),
        )


class SimulatedPeer:
    def __init__(self, name: str, size: int, mutant: str) -> None:
        u = {"u": np.full(size, float(len(name) + 1), dtype=np.float32)}
        self.durable = Books(Accounts(name, UNIT), u)
        self.durable.entries.append(
            Entry("start", 0, UNIT, UNIT, 0, sum_message(u), 0.0, 0.0, 0.0, sum_magnitudes(u))
        )
        self.mutant = mutant
        self.staged: dict[str, tuple[Transfer, Message]] = {}
        self.refunds: dict[str, Transfer] = {}

    @property
    def name(self) -> str:
        return self.durable.accounts.name

    def crash(self) -> None:
        """Everything that was not committed is gone."""
        self.staged, self.refunds = {}, {}

    def hear(self, transfer: Transfer, payload: Message) -> tuple[str, Transfer] | None:
        """A share arrives; what is answered at once, if anything."""
        if self.mutant == "no de-duplication":
            self.staged[f"{transfer.sender}{len(self.staged)}"] = (transfer, payload)
            return None
        staged = {sender: entry[0] for sender, entry in self.staged.items()}
        verdict = ledger.judge_transfer(self.durable.accounts, staged, transfer)
        if verdict is Verdict.APPLIED:
            return ("ack", transfer)
        if verdict is Verdict.REFUSED:
            return ("nack", transfer)
        if verdict is not Verdict.PROCEED:
            return None
        if not np.isfinite(payload["u"]).all():
            books = self.durable.copy()
            books.accounts = ledger.refuse(books.accounts, transfer, "not finite")
            books.received.append(Received(transfer, "not finite"))
            self.durable = books
            return ("nack", transfer)
        self.staged[transfer.sender] = (transfer, payload)
        return ("ack", transfer) if self.mutant == "ack before commit" else None

    def answered(self, answer: str, transfer: Transfer) -> None:
        if self.durable.accounts.link(transfer.receiver).outbox != transfer:
            return
        if answer == "nack":
            self.refunds[transfer.receiver] = transfer
            return
        books = self.durable.copy()
        books.accounts = ledger.acknowledge(books.accounts, transfer)
        key = (transfer.receiver, transfer.seq)
        books.sent[key] = replace(books.sent[key], status="acknowledged")
        self.durable = books

    def absorb(self, crash: bool) -> list[Transfer]:
        """Merge what is staged; the transfers to acknowledge, if it survives the commit."""
        receipts = [self.staged[key] for key in sorted(self.staged)]
        books = self.durable.copy()
        shares = [payload for _, payload in receipts]
        for refund in self.refunds.values():
            shares.append(books.payloads[refund.digest])
            key = (refund.receiver, refund.seq)
            books.sent[key] = replace(books.sent[key], status="refunded")
        transfers = [transfer for transfer, _ in receipts]
        if self.mutant == "no de-duplication":
            units = books.accounts.units + sum(t.units for t in transfers)
            books.accounts = replace(books.accounts, units=units)
        else:
            books.accounts = ledger.absorb(books.accounts, transfers, self.refunds.values())
        books.received += [Received(transfer, "") for transfer in transfers]
        books.u = add_shares(books.u, shares)
        incoming = [*transfers, *self.refunds.values()]
        books.entries.append(
            Entry(
                "absorb",
                books.accounts.round,
                books.accounts.units,
                sum(t.units for t in incoming),
                0,
                sum_message(books.u),
                sum(t.total for t in incoming),
                0.0,
                0.0,
                sum_magnitudes(books.u),
            )
        )
        if crash:
            self.crash()
            return []
        self.durable, self.staged, self.refunds = books, {}, {}
        return transfers

    def push(self, receivers: list[str], crash: bool, poison: bool = False) -> None:
        """Train a little, split over those whose link is free, commit."""
        books = self.durable.copy()
        accounts = books.accounts
        free = [peer for peer in receivers if ledger.is_free(accounts, peer)]
        if not free or not ledger.may_push(accounts):
            return
        before = sum_message(books.u)
        trained = {"u": books.u["u"] * np.float32(1.01)}
        share = scale_message(trained, 1, len(free) + 1)
        sent = {"u": share["u"] * np.float32(np.nan)} if poison else share
        digest = f"{self.name}-{len(books.entries)}"
        units = ledger.divide_units(accounts.units, dict.fromkeys(free, 1), 1)
        shares = {p: Share(units[p], digest, sum_message(share)) for p in free}
        books.accounts = ledger.push(accounts, accounts.round, shares)
        books.u, books.payloads[digest] = share, share
        for peer in free:
            transfer = books.accounts.link(peer).outbox
            assert transfer is not None
            books.sent[(peer, transfer.seq)] = Sent(transfer, "outbox")
        books.entries.append(
            Entry(
                "push",
                accounts.round,
                books.accounts.units,
                0,
                sum(units.values()),
                sum_message(share),
                0.0,
                sum_message(share) * len(free),
                sum_message(trained) - before,
                sum_magnitudes(share),
            )
        )
        if crash:
            self.crash()
            return
        self.durable = books
        if poison:
            self.poisoned = {digest: sent}

    def letter(self, transfer: Transfer) -> Message:
        return getattr(self, "poisoned", {}).get(
            transfer.digest, self.durable.payloads[transfer.digest]
        )

    def statement(self) -> Statement:
        books = self.durable
        return Statement(
            self.name,
            books.accounts.units,
            books.accounts.written_off,
            books.entries,
            list(books.sent.values()),
            books.received,
            sum_message(books.u),
        )


class SimulatedNetwork:
    """Peers, letters on their way, and a seeded hand that picks what happens next."""

    def __init__(self, seed: int, peers: int = 4, size: int = 3, mutant: str = "") -> None:
        self.random = random.Random(seed)
        names = [f"peer{number}" for number in range(peers)]
        self.peers = {name: SimulatedPeer(name, size, mutant) for name in names}
        self.letters: list[tuple[str, Transfer, Message | None]] = []
        self.crashes = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step(self.random.choice(("push", "send", "send", "deliver", "deliver", "absorb")))

    def step(self, what: str) -> None:
        peer = self.random.choice(list(self.peers.values()))
        crash = self.random.random() < 0.1
        self.crashes += crash
        if what == "push":
            others = [name for name in self.peers if name != peer.name]
            count = self.random.randint(1, len(others))
            poison = self.random.random() < 0.05
            peer.push(self.random.sample(others, count), crash, poison)
        elif what == "send":
            for transfer in peer.durable.accounts.outbox.values():
                if self.random.random() < 0.7:
                    self.letters.append(("share", transfer, peer.letter(transfer)))
        elif what == "deliver" and self.letters:
            self.deliver()
        elif what == "absorb":
            self.letters += [("ack", t, None) for t in peer.absorb(crash)]

    def deliver(self) -> None:
        """Any letter may come next, come again, or get lost; too many at once are dropped."""
        del self.letters[: max(0, len(self.letters) - 12)]
        place = self.random.randrange(len(self.letters))
        fate = self.random.random()
        kind, transfer, payload = self.letters[place]
        if fate < 0.8:
            del self.letters[place]
        if fate < 0.15:
            return
        if payload is None:
            self.peers[transfer.sender].answered(kind, transfer)
            return
        answer = self.peers[transfer.receiver].hear(transfer, payload)
        if answer:
            self.letters.append((*answer, None))

    def drain(self) -> None:
        """A calm network: everything gets through."""
        for _ in range(8):
            for peer in self.peers.values():
                for transfer in peer.durable.accounts.outbox.values():
                    answer = self.peers[transfer.receiver].hear(transfer, peer.letter(transfer))
                    if answer:
                        peer.answered(*answer)
            for peer in self.peers.values():
                for transfer in peer.absorb(crash=False):
                    self.peers[transfer.sender].answered("ack", transfer)

    def statements(self) -> list[Statement]:
        return [peer.statement() for peer in self.peers.values()]
