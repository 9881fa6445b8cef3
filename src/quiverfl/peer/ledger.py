"""A peer's accounts: push-sum mass as integers, and what every link has carried. Pure, no I/O.

Mass is counted in units of 2^-48, so that the sum over all peers is conserved bit for bit. Every
function takes the accounts as last committed and returns new ones; whoever calls makes them durable
first and only then lets anything of it be seen outside. Two transactions make a round:

    push     the mass splits; each share leaves the account and waits in the outbox of its link
    absorb   shares that arrived enter the account and the link's watermark moves past them

A share is acknowledged only after the `absorb` that contains it is durable. A crash anywhere rolls
back to the last commit, and nothing of what was lost had been visible to anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from quiverfl.engine.shares import UNIT as UNIT
from quiverfl.engine.shares import as_parts as as_parts
from quiverfl.engine.shares import portions as portions
from quiverfl.errors import QuiverError

PUSH_FLOOR = UNIT // 16
"""Below this a peer pushes only if something has arrived since its last push."""
PAST = "~"
"""PEER~STORE is the name of an evicted peer's past in the records; no peer's name has this sign."""


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
    """What `push` puts into an outbox, before it has a number."""

    units: int
    digest: str
    total: float


@dataclass(frozen=True)
class Link:
    """What this peer remembers of one neighbour, in both directions."""

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
    """Everything about mass that must survive a crash."""

    name: str
    units: int
    round: int = 0
    pushed: bool = False  # whether `round` has pushed and waits to absorb
    arrived: bool = True  # whether something has come since the last push
    written_off: int = 0
    pushes: int = 0  # in all: it only grows, so whoever remembers more has seen a newer store
    links: Mapping[str, Link] = field(default_factory=dict)

    def link(self, peer: str) -> Link:
        return self.links.get(peer, Link())

    def _with(self, peer: str, link: Link) -> Accounts:
        return replace(self, links={**self.links, peer: link})

    @property
    def outbox(self) -> dict[str, Transfer]:
        return {peer: link.outbox for peer, link in self.links.items() if link.outbox}


class Verdict(Enum):
    """What to do with an announced transfer."""

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
        if not free(accounts, receiver):
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
        link = links.get(receipt.sender, Link())
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


def bury(accounts: Accounts, transfer: Transfer, reason: str) -> Accounts:
    """A tombstone: this transfer is refused for good, so its sender may take the share back."""
    link = accounts.link(transfer.sender)
    if transfer.seq != link.received + 1:
        raise QuiverError(f"{transfer} does not follow number {link.received} of its link.")
    return accounts._with(
        transfer.sender,
        replace(link, received=transfer.seq, digest=transfer.digest, refusal=reason),
    )


def meet(accounts: Accounts, peer: str, incarnation: str) -> Accounts:
    """Remember which store a neighbour runs on. A new store is taken only after an eviction."""
    link = accounts.link(peer)
    if link.gone:
        _check_return(peer, link, incarnation)
        return accounts._with(peer, Link(incarnation=incarnation))
    if not link.incarnation:  # a share may be waiting for it already
        return accounts._with(peer, replace(link, incarnation=incarnation))
    if link.incarnation != incarnation:
        raise QuiverError(
            f"{peer!r} runs on another store than before. If its disk was lost, evict it here "
            "(quiver peer evict) and let it join again; if not, give it back its own store."
        )
    return accounts


def _check_return(peer: str, link: Link, incarnation: str) -> None:
    if link.banned:
        raise QuiverError(f"{peer!r} was banned: it does not come back under this name.")
    if incarnation == link.incarnation:
        raise QuiverError(f"{peer!r} was evicted: its old store stays outside; let it join.")


def may_join(accounts: Accounts, peer: str, incarnation: str) -> None:
    """Refuse the model to whoever is not about to become a member with this new store."""
    link = accounts.link(peer)
    if link.gone:
        _check_return(peer, link, incarnation)
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


def witness(accounts: Accounts, known: Mapping[str, tuple[str, int, str]]) -> Accounts:
    """Remember how far others have come (store, pushes, signature), should one restore a backup."""
    for peer, (store, pushes, clock) in known.items():
        link = accounts.link(peer)
        if link.incarnation == store and pushes > link.pushes:
            accounts = accounts._with(peer, replace(link, pushes=pushes, clock=clock))
    return accounts


def part_from(accounts: Accounts, peer: str) -> Accounts:
    """A neighbour is leaving: send it nothing new, but still take what it pushes out."""
    return accounts._with(peer, replace(accounts.link(peer), closed=True))


def judge(accounts: Accounts, staged: Mapping[str, Transfer], transfer: Transfer) -> Verdict:
    """What to do with a transfer somebody announces, by its number alone."""
    link = accounts.link(transfer.sender)
    if link.gone:
        return Verdict.GONE
    if transfer.seq > link.received + 1:
        return Verdict.GAP
    if transfer.seq == link.received + 1:
        here = staged.get(transfer.sender)
        if here is None:
            return Verdict.PROCEED
        return Verdict.STAGED if here.digest == transfer.digest else Verdict.STALE
    if transfer.seq < link.received or transfer.digest != link.digest:
        return Verdict.STALE
    return Verdict.REFUSED if link.refusal else Verdict.APPLIED


def may_push(accounts: Accounts) -> bool:
    """A peer that pushes but receives nothing would divide its mass away, round by round."""
    return accounts.units >= PUSH_FLOOR or accounts.arrived


def overdrawn(accounts: Accounts, peer: str, lend: int) -> bool:
    """Whether a neighbour has taken more than this without giving anything back for it."""
    link = accounts.link(peer)
    return link.given - link.taken > lend


def free(accounts: Accounts, peer: str) -> bool:
    """Whether a new share may go to this neighbour: nothing to it is still unacknowledged."""
    link = accounts.link(peer)
    return link.outbox is None and not link.closed and not link.gone
