"""Shares and receipts signed with the keys of the roster: who sent what, and who took it.

A proof is one line: the sender's store, the signer's public key (compressed P-256 point), the
signature. It stays in the books, so that an audit can tell whose books are wrong.
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

SIGNER = {"share": "sender", "applied": "receiver", "refused": "receiver"}


def text_of(word: str, transfer: Transfer, agreement: str, incarnation: str) -> bytes:
    """What is signed: `share` by the sender; `applied` and `refused` by the receiver."""
    fields = [
        *(word, agreement, incarnation, named(transfer.sender), named(transfer.receiver)),
        *(transfer.seq, transfer.round, transfer.units, transfer.digest),
    ]
    return b"quiver transfer\0" + json.dumps(fields, separators=(",", ":")).encode()


def named(peer: str) -> str:
    """A peer's name, also where the books speak of its evicted past."""
    return peer.partition(PAST)[0]


def proof(papers: Identity, word: str, transfer: Transfer, agreement: str, incarnation: str) -> str:
    signature = papers.sign(text_of(word, transfer, agreement, incarnation))
    return f"{incarnation} {papers.point} {signature}"


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
    *,
    former: bool = False,
) -> bool:
    """Whether the transfer's proof is by the member it must be by, for this very transfer."""
    signer = getattr(transfer, SIGNER[word])
    try:
        store, point, signature = transfer.proof.split(" ")
        member = roster.member(named(signer))
        fingerprint, key = _public_key(point)
        known = member.keys + (member.former if former else ())
        if fingerprint not in known or (incarnation and store != incarnation):
            return False
        text = text_of(word, transfer, agreement, store)
        key.verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError, QuiverError):
        return False
    return True


@lru_cache(maxsize=1024)
def _public_key(point: str) -> tuple[str, ec.EllipticCurvePublicKey]:
    key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), bytes.fromhex(point))
    spki = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest(), key
