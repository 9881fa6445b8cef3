"""Signatures of shares, receipts, clocks and statements, made with the keys of the roster.

A proof is one line: the sender's store, the receiver's, the signer's public key (compressed P-256
point), the signature. It stays in the records, so that an audit can tell whose records are wrong.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.audit import SignatureCheck
from quiverfl.peer.accounts.ledger import PAST, UNIT, Accounts, Transfer
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.roster import Roster
from quiverfl.peer.link.wire import Amendment, Clock, EvictionNotice, Statement, Voucher

SIGNER = {"share": "sender", "applied": "receiver", "refused": "receiver"}


def transfer_text(word: str, transfer: Transfer, agreement: str, stores: tuple[str, str]) -> bytes:
    """The text that is signed: `share` by the sender, `applied` and `refused` by the receiver."""
    fields = [
        *(word, agreement, *stores, strip_past(transfer.sender), strip_past(transfer.receiver)),
        *(transfer.seq, transfer.round, transfer.units, transfer.digest),
    ]
    return b"quiver transfer\0" + json.dumps(fields, separators=(",", ":")).encode()


def strip_past(peer: str) -> str:
    """A peer's own name, also for records of an evicted store of it."""
    return peer.partition(PAST)[0]


def sign_transfer(
    identity: Identity, word: str, transfer: Transfer, agreement: str, stores: tuple[str, str]
) -> str:
    """Sign a share or a receipt; `stores` are the sender's and the receiver's."""
    signature = identity.sign(transfer_text(word, transfer, agreement, stores))
    return f"{stores[0]} {stores[1]} {identity.point} {signature}"


def signature_check(roster: Roster) -> SignatureCheck:
    """Make the check for an audit, where keys that were dropped later still count."""
    return lambda word, transfer, agreement, store: check_signature(
        roster, word, transfer, agreement, store, former=True
    )


def check_signature(
    roster: Roster,
    word: str,
    transfer: Transfer,
    agreement: str,
    incarnation: str = "",
    towards: str = "",
    *,
    former: bool = False,
) -> bool:
    """Whether the right member has signed this very transfer.

    If the sender's or the receiver's store is given, the proof must name that one.
    """
    signer = getattr(transfer, SIGNER[word])
    try:
        store, receiver, point, signature = transfer.proof.split(" ")
        member = roster.member(strip_past(signer))
        fingerprint, key = _public_key(point)
        known = member.keys + (member.former if former else ())
        if fingerprint not in known or (incarnation or store, towards or receiver) != (
            store,
            receiver,
        ):
            return False
        text = transfer_text(word, transfer, agreement, (store, receiver))
        key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, QuiverError):
        return False
    return True


def sign_clock(identity: Identity, agreement: str, peer: str, store: str, pushes: int) -> Clock:
    """Sign how often a peer's store has pushed."""
    signature = identity.sign(_clock_text(agreement, peer, store, pushes))
    return Clock(peer=peer, store=store, pushes=pushes, proof=f"{identity.point} {signature}")


def check_clock(roster: Roster, agreement: str, clock: Clock) -> bool:
    text = _clock_text(agreement, clock.peer, clock.store, clock.pushes)
    return check_line(roster, clock.peer, clock.proof, text)


def check_line(roster: Roster, name: str, proof: str, text: bytes) -> bool:
    """Whether "key signature" is by a key that the roster lists for this member."""
    try:
        point, signature = proof.split(" ")
        fingerprint, key = _public_key(point)
        if fingerprint not in roster.member(name).keys:
            return False
        key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, QuiverError):
        return False
    return True


def _clock_text(agreement: str, peer: str, store: str, pushes: int) -> bytes:
    return b"quiver clock\0" + json.dumps([agreement, peer, store, pushes]).encode()


def sign_statement(identity: Identity, agreement: str, statement: Statement) -> Statement:
    """Add this member's signature to its statement."""
    signature = identity.sign(statement.signed_text(agreement))
    return statement.model_copy(update={"proof": f"{identity.point} {signature}"})


def check_statement(roster: Roster, agreement: str, statement: EvictionNotice | Amendment) -> bool:
    """Whether a statement is signed by its author."""
    text = statement.signed_text(agreement)
    return bool(statement.proof) and check_line(roster, statement.by, statement.proof, text)


@lru_cache(maxsize=1024)
def _public_key(point: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(point))
    spki = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest(), key


# The mass that a sender can honestly have: its first unit, and what it has received.
#
# A sender that has pushed more must show shares that others signed to it before its next one is
# taken. Each share counts once; they are shown in the order of the sender's records.


@dataclass
class ProvenMass:
    """The mass that one sender has proven to have received."""

    rows: int = 0
    units: int = 0
    upto: dict[str, int] = field(default_factory=dict)  # the last number, by origin and its store

    def to_json(self) -> str:
        return json.dumps(vars(self))


class MassProofs:
    """The mass that each sender has proven to hold."""

    def __init__(
        self,
        agreement: str,
        me: str,
        bodies: dict[str, str],
        opening: Callable[[str], int] = lambda peer: UNIT,
    ) -> None:
        """`opening` says with how much mass a member began."""
        self._agreement, self._me, self._opening_mass = agreement, me, opening
        self._proven = {peer: ProvenMass(**json.loads(body)) for peer, body in bodies.items()}

    def proven_by(self, peer: str) -> ProvenMass:
        return self._proven.setdefault(peer, ProvenMass())

    def forget(self, peer: str) -> None:
        """Drop the proofs of a peer whose store is out."""
        self._proven.pop(peer, None)

    def is_covered(self, accounts: Accounts, transfer: Transfer) -> bool:
        """Whether the sender can have had as much mass as it has pushed here."""
        link = accounts.link(transfer.sender)
        known = (
            self._opening_mass(transfer.sender) + link.given + self.proven_by(transfer.sender).units
        )
        return link.taken + transfer.units <= known

    def add_vouchers(
        self, peer: str, store: str, own_store: str, vouchers: Iterable[Voucher], roster: Roster
    ) -> int:
        """Count the vouchers signed to the sender's store. Returns how many were good."""
        proven, good = self.proven_by(peer), 0
        for voucher in vouchers:
            proven.rows += 1
            transfer = voucher.transfer(peer)
            origin, towards = voucher.proof.split(" ")[:2]
            key = f"{voucher.sender} {origin}"
            mine = (voucher.sender, origin) == (self._me, own_store)
            fresh = transfer.seq > proven.upto.get(key, 0) and voucher.sender != peer and not mine
            signed = towards == store and check_signature(
                roster, "share", transfer, self._agreement
            )
            if fresh and signed:
                proven.upto[key] = transfer.seq
                proven.units += transfer.units
                good += 1
        return good
