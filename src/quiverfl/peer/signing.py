"""Shares and receipts signed with the keys of the roster: who sent what, and who took it.

A proof is one line: the sender's store, the receiver's, the signer's public key (compressed P-256
point), the signature. It stays on record, so that an audit can tell whose records are wrong.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from quiverfl.errors import QuiverError
from quiverfl.peer.audit import Genuine
from quiverfl.peer.identity import Identity
from quiverfl.peer.ledger import PAST, Transfer
from quiverfl.peer.roster import Roster
from quiverfl.peer.wire import Amendment, Clock, Notice

SIGNER = {"share": "sender", "applied": "receiver", "refused": "receiver"}


def text_of(word: str, transfer: Transfer, agreement: str, stores: tuple[str, str]) -> bytes:
    """What is signed: `share` by the sender; `applied` and `refused` by the receiver."""
    fields = [
        *(word, agreement, *stores, named(transfer.sender), named(transfer.receiver)),
        *(transfer.seq, transfer.round, transfer.units, transfer.digest),
    ]
    return b"quiver transfer\0" + json.dumps(fields, separators=(",", ":")).encode()


def named(peer: str) -> str:
    """A peer's name, also in records of its evicted past."""
    return peer.partition(PAST)[0]


def proof(
    papers: Identity, word: str, transfer: Transfer, agreement: str, stores: tuple[str, str]
) -> str:
    """`stores`: the sender's and the receiver's."""
    signature = papers.sign(text_of(word, transfer, agreement, stores))
    return f"{stores[0]} {stores[1]} {papers.point} {signature}"


def checked_by(roster: Roster) -> Genuine:
    """For an audit: what was signed with a key that was dropped later counts as well."""
    return lambda word, transfer, agreement, store: holds(
        roster, word, transfer, agreement, store, former=True
    )


def holds(
    roster: Roster,
    word: str,
    transfer: Transfer,
    agreement: str,
    incarnation: str = "",
    towards: str = "",
    *,
    former: bool = False,
) -> bool:
    """Whether the transfer's proof is by the member it must be by, for this very transfer.

    Where the sender's or the receiver's store is given, it must be that one.
    """
    signer = getattr(transfer, SIGNER[word])
    try:
        store, receiver, point, signature = transfer.proof.split(" ")
        member = roster.member(named(signer))
        fingerprint, key = _public_key(point)
        known = member.keys + (member.former if former else ())
        if fingerprint not in known or (incarnation or store, towards or receiver) != (
            store,
            receiver,
        ):
            return False
        text = text_of(word, transfer, agreement, (store, receiver))
        key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, QuiverError):
        return False
    return True


def clock(papers: Identity, agreement: str, peer: str, store: str, pushes: int) -> Clock:
    """A peer's own word on how often its store has pushed."""
    signature = papers.sign(_clock_text(agreement, peer, store, pushes))
    return Clock(peer=peer, store=store, pushes=pushes, proof=f"{papers.point} {signature}")


def clock_holds(roster: Roster, agreement: str, clock: Clock) -> bool:
    text = _clock_text(agreement, clock.peer, clock.store, clock.pushes)
    return _signed(roster, clock.peer, clock.proof, text)


def _signed(roster: Roster, name: str, proof: str, text: bytes) -> bool:
    """Whether "key signature" is by a key that the roster has of this member."""
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


def notice(papers: Identity, agreement: str, notice: Notice) -> Notice:
    """The notice, signed."""
    signature = papers.sign(_notice_text(agreement, notice))
    return notice.model_copy(update={"proof": f"{papers.point} {signature}"})


def notice_holds(roster: Roster, agreement: str, notice: Notice) -> bool:
    text = _notice_text(agreement, notice)
    return bool(notice.proof) and _signed(roster, notice.by, notice.proof, text)


def _notice_text(agreement: str, notice: Notice) -> bytes:
    fields = [agreement, notice.by, notice.about, notice.store, notice.ban]
    return b"quiver eviction\0" + json.dumps(fields).encode()


def amendment(papers: Identity, agreement: str, amendment: Amendment) -> Amendment:
    """The member's word on changed terms of the run, signed."""
    signature = papers.sign(_amendment_text(agreement, amendment))
    return amendment.model_copy(update={"proof": f"{papers.point} {signature}"})


def amendment_holds(roster: Roster, agreement: str, amendment: Amendment) -> bool:
    text = _amendment_text(agreement, amendment)
    return bool(amendment.proof) and _signed(roster, amendment.by, amendment.proof, text)


def _amendment_text(agreement: str, amendment: Amendment) -> bytes:
    terms = amendment.terms
    fields = [agreement, amendment.by, terms.since, terms.rounds, terms.lr]
    return b"quiver amendment\0" + json.dumps(fields).encode()


@lru_cache(maxsize=1024)
def _public_key(point: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(point))
    spki = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest(), key
