"""A peer's accounts: push-sum mass as integers, and what every link has carried. Pure, no I/O.

Mass is counted in units of 2^-48, so that the sum over all peers is conserved bit for bit. Every
function takes the accounts as last committed and returns new ones. The caller makes them durable
first and only then shows any of it to others. Two transactions make a round:

    push     the mass splits; each share leaves the account and waits in the outbox of its link
    absorb   shares that arrived enter the account and the link's watermark moves past them

A share is acknowledged only after the `absorb` that contains it is durable. A crash anywhere rolls
back to the last commit, and no other peer had seen the lost part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from quiverfl.engine.exchange.fixed_point import UNIT as UNIT
from quiverfl.engine.exchange.fixed_point import divide_units as divide_units
from quiverfl.engine.exchange.fixed_point import integer_weights as integer_weights
from quiverfl.errors import QuiverError

PUSH_FLOOR = UNIT // 16
"""Below this a peer pushes only if something has arrived since its last push."""
PAST = "~"
"""Records of an evicted peer are kept under PEER~STORE; no peer's name contains this sign."""


@dataclass(frozen=True)
class Transfer:
    """One share on its way. (sender, receiver, seq) names it; the digest says what it is."""

    sender: str
    receiver: str
    seq: int
    round: int
    units: int
    digest: str  # sha256 of the payload
    total: float  # float64 sum of the payload's numbers, for the audit
    proof: str = field(default="", compare=False)  # the other side's signature, once there is one


@dataclass(frozen=True)
class Share:
    """A share as `push` puts it into an outbox, before it has a number."""

    units: int
    digest: str
    total: float


@dataclass(frozen=True)
class LinkRecord:
    """This peer's records of one neighbour, in both directions."""

    incarnation: str = ""  # which store the neighbour runs on; empty until they have met
    sent: int = 0  # seq of the last transfer to it
    outbox: Transfer | None = None  # not acknowledged yet: at most one
    given: int = 0  # units pushed to it in all, without what came back
    received: int = 0  # seq of the last transfer from it that was applied or refused for good
    taken: int = 0  # units absorbed from it in all
    digest: str = ""  # of that transfer
    refusal: str = ""  # why it was refused; empty when it was applied
    closed: bool = False  # it is leaving: nothing new is sent to it
    gone: bool = False  # evicted here: nothing is sent to it or taken from it
    banned: bool = False  # evicted for good: a new store does not bring it back
    pushes: int = 0  # how often it is known to have pushed, to whomever
    clock: str = ""  # its signature under that


@dataclass(frozen=True)
class Accounts:
    """All a peer must know about mass after a crash."""

    name: str
    units: int
    round: int = 0
    pushed: bool = False  # whether `round` has pushed and waits to absorb
    arrived: bool = True  # whether something has come since the last push
    written_off: int = 0
    pushes: int = 0  # in all: it only grows, so a peer that remembers more has seen a newer store
    links: Mapping[str, LinkRecord] = field(default_factory=dict)

    def link(self, peer: str) -> LinkRecord:
        return self.links.get(peer, LinkRecord())

    def _with(self, peer: str, link: LinkRecord) -> Accounts:
        return replace(self, links={**self.links, peer: link})

    @property
    def outbox(self) -> dict[str, Transfer]:
        return {peer: link.outbox for peer, link in self.links.items() if link.outbox}


class Verdict(Enum):
    """The decision on an announced transfer."""

    PROCEED = "proceed"  # the next one: send the body
    STAGED = "staged"  # the next one, and its body is here already: wait for the commit
    APPLIED = "applied"  # acknowledged before: acknowledge again, body unread
    REFUSED = "refused"  # refused for good before: refuse again
    GAP = "gap"  # a transfer in between was never seen: a restored backup, or a forgery
    STALE = "stale"  # a number already used for something else: the sender's backup was restored
    GONE = "gone"  # the sender was evicted, or runs on a store this peer has not met


def push(accounts: Accounts, round: int, shares: Mapping[str, Share]) -> Accounts:
    """The mass of the shares leaves the account; each waits in its link's outbox."""
    links = dict(accounts.links)
    for receiver, share in shares.items():
        link = accounts.link(receiver)
        if not is_free(accounts, receiver):
            raise QuiverError(f"the link to {receiver!r} is not free: {link.outbox}.")
        seq = link.sent + 1
        transfer = Transfer(
            accounts.name, receiver, seq, round, share.units, share.digest, share.total
        )
        given = link.given + share.units
        links[receiver] = replace(link, sent=seq, outbox=transfer, given=given)
    units = accounts.units - sum(share.units for share in shares.values())
    if units < 0:
        raise QuiverError(f"{accounts.name!r} cannot push more mass than it has.")
    return replace(
        accounts,
        units=units,
        round=round,
        pushed=True,
        arrived=accounts.arrived and not shares,
        pushes=accounts.pushes + bool(shares),
        links=links,
    )


def absorb(
    accounts: Accounts, receipts: Iterable[Transfer], refunds: Iterable[Transfer] = ()
) -> Accounts:
    """Shares that arrived enter the account; refused ones come back from the outbox."""
    units, links = accounts.units, dict(accounts.links)
    arrived = accounts.arrived
    for receipt in receipts:
        link = links.get(receipt.sender, LinkRecord())
        if receipt.seq != link.received + 1:
            raise QuiverError(f"{receipt} does not follow number {link.received} of its link.")
        links[receipt.sender] = replace(
            link,
            received=receipt.seq,
            digest=receipt.digest,
            refusal="",
            taken=link.taken + receipt.units,
        )
        units += receipt.units
        arrived = True
    for refund in refunds:
        link = links[refund.receiver]
        if link.outbox != refund:
            raise QuiverError(f"{refund} is not in the outbox.")
        links[refund.receiver] = replace(link, outbox=None, given=link.given - refund.units)
        units += refund.units
    return replace(accounts, units=units, arrived=arrived, links=links)


def finish_round(accounts: Accounts) -> Accounts:
    """The round is over: the next one begins."""
    return replace(accounts, round=accounts.round + 1, pushed=False)


def acknowledge(accounts: Accounts, transfer: Transfer) -> Accounts:
    """The receiver has the share, durably: the link is free again."""
    link = accounts.link(transfer.receiver)
    if link.outbox != transfer:
        return accounts
    return accounts._with(transfer.receiver, replace(link, outbox=None))


def refuse(accounts: Accounts, transfer: Transfer, reason: str) -> Accounts:
    """Refuse a transfer for good. Its sender may then take the share back."""
    link = accounts.link(transfer.sender)
    if transfer.seq != link.received + 1:
        raise QuiverError(f"{transfer} does not follow number {link.received} of its link.")
    return accounts._with(
        transfer.sender,
        replace(link, received=transfer.seq, digest=transfer.digest, refusal=reason),
    )


def register_store(accounts: Accounts, peer: str, incarnation: str) -> Accounts:
    """Remember which store a neighbour runs on. A new store is taken only after an eviction."""
    link = accounts.link(peer)
    if link.gone:
        _check_new_store(peer, link, incarnation)
        return accounts._with(peer, LinkRecord(incarnation=incarnation))
    if not link.incarnation:  # a share may be waiting for it already
        return accounts._with(peer, replace(link, incarnation=incarnation))
    if link.incarnation != incarnation:
        raise QuiverError(
            f"{peer!r} runs on another store than before. If its disk was lost, evict it here "
            "(quiver peer evict) and let it join again; if not, give it back its own store."
        )
    return accounts


def _check_new_store(peer: str, link: LinkRecord, incarnation: str) -> None:
    if link.banned:
        raise QuiverError(f"{peer!r} was banned: it does not come back under this name.")
    if incarnation == link.incarnation:
        raise QuiverError(f"{peer!r} was evicted: its old store stays outside; let it join.")


def check_join(accounts: Accounts, peer: str, incarnation: str) -> None:
    """Refuse the model to a peer that cannot become a member with this store."""
    link = accounts.link(peer)
    if link.gone:
        _check_new_store(peer, link, incarnation)
    elif link.incarnation:
        raise QuiverError(
            f"{peer!r} is in the run already. If its disk was lost, evict it first (quiver peer "
            "evict), on every remaining peer."
        )


def evict(accounts: Accounts, peer: str, ban: bool = False) -> Accounts:
    """Stop dealing with a peer; a share it never acknowledged is written off, on the record."""
    link = accounts.link(peer)
    lost = link.outbox.units if link.outbox else 0
    banned = link.banned or ban
    changed = accounts._with(peer, replace(link, outbox=None, gone=True, banned=banned))
    return replace(changed, written_off=accounts.written_off + lost)


def record_clocks(accounts: Accounts, known: Mapping[str, tuple[str, int, str]]) -> Accounts:
    """Remember the numbers of pushes of other peers: (store, pushes, signature) by peer.

    A peer that restores a backup is recognised by it.
    """
    for peer, (store, pushes, clock) in known.items():
        link = accounts.link(peer)
        if link.incarnation == store and pushes > link.pushes:
            accounts = accounts._with(peer, replace(link, pushes=pushes, clock=clock))
    return accounts


def close_link(accounts: Accounts, peer: str) -> Accounts:
    """Send nothing new to a neighbour that is leaving, but still take what it pushes out."""
    return accounts._with(peer, replace(accounts.link(peer), closed=True))


def judge_transfer(
    accounts: Accounts, staged: Mapping[str, Transfer], transfer: Transfer
) -> Verdict:
    """Decide by its number alone what to do with an announced transfer."""
    link = accounts.link(transfer.sender)
    if link.gone:
        return Verdict.GONE
    if transfer.seq > link.received + 1:
        return Verdict.GAP
    if transfer.seq == link.received + 1:
        present = staged.get(transfer.sender)
        if present is None:
            return Verdict.PROCEED
        return Verdict.STAGED if present.digest == transfer.digest else Verdict.STALE
    if transfer.seq < link.received or transfer.digest != link.digest:
        return Verdict.STALE
    return Verdict.REFUSED if link.refusal else Verdict.APPLIED


def may_push(accounts: Accounts) -> bool:
    """Whether a push is safe: a peer that only pushes would divide its mass away round by round."""
    return accounts.units >= PUSH_FLOOR or accounts.arrived


def is_overdrawn(accounts: Accounts, peer: str, max_debt: int) -> bool:
    """Whether a neighbour holds more of this peer's mass than `max_debt`, net of what it gave."""
    link = accounts.link(peer)
    return link.given - link.taken > max_debt


def is_free(accounts: Accounts, peer: str) -> bool:
    """Whether a new share may go to this neighbour: nothing to it is still unacknowledged."""
    link = accounts.link(peer)
    return link.outbox is None and not link.closed and not link.gone


# A peer's records: every commit leaves an entry, every share a line at either end.


@dataclass(frozen=True)
class Entry:
    """One commit: what it did to the mass and to the float64 sum of the shared numbers."""

    kind: str  # start, join, push, absorb
    round: int
    units: int  # after it
    units_in: int
    units_out: int
    total: float  # after it
    total_in: float
    total_out: float
    trained: float  # by how much training moved the sum before this commit
    scale: float  # sum of magnitudes after it

    @property
    def finite(self) -> bool:
        figures = (self.total, self.total_in, self.total_out, self.trained, self.scale)
        return all(map(math.isfinite, figures))

    def rounding(self, before: float) -> float:
        """The amount that float32 arithmetic added or dropped in this commit."""
        expected = math.fsum([before, self.trained, self.total_in, -self.total_out])
        return self.total - expected


@dataclass(frozen=True)
class Sent:
    transfer: Transfer
    status: str  # outbox, acknowledged, refunded, written off


@dataclass(frozen=True)
class Received:
    transfer: Transfer
    refusal: str  # empty: applied


@dataclass(frozen=True)
class Statement:
    """One peer's records at one moment."""

    name: str
    units: int
    written_off: int
    entries: Sequence[Entry]
    sent: Sequence[Sent]
    received: Sequence[Received]
    total: float  # float64 sum of the shared numbers in its stored state, computed again
    gone: frozenset[str] = frozenset()
    incarnation: str = ""  # of its store
    agreement: str = ""  # hash of run, configuration and manifest: the same for all peers of a run
    grants: Mapping[str, int] = field(default_factory=dict)  # to members that joined by agreement
