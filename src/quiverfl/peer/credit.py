"""What a sender can honestly have: what it started with, plus what it can show to have received.

Whoever has pushed more than that must show shares that others signed to it before its next one is
taken. Each share counts once: they are shown in the order of the records of whoever shows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from quiverfl.peer import signing
from quiverfl.peer.ledger import UNIT, Accounts, Transfer
from quiverfl.peer.roster import Roster
from quiverfl.peer.wire import Voucher


@dataclass
class Shown:
    """What one sender has shown so far."""

    rows: int = 0
    units: int = 0
    upto: dict[str, int] = field(default_factory=dict)  # by origin and its store: the last number

    def written(self) -> str:
        return json.dumps(vars(self))


class Credit:
    """Of every sender, as this peer knows it."""

    def __init__(self, agreement: str, me: str, shown: dict[str, str]) -> None:
        self._agreement, self._me = agreement, me
        self._shown = {peer: Shown(**json.loads(body)) for peer, body in shown.items()}

    def of(self, peer: str) -> Shown:
        return self._shown.setdefault(peer, Shown())

    def forget(self, peer: str) -> None:
        """Its store is another one from now on."""
        self._shown.pop(peer, None)

    def covers(self, accounts: Accounts, transfer: Transfer) -> bool:
        link = accounts.link(transfer.sender)
        known = UNIT + link.given + self.of(transfer.sender).units
        return link.taken + transfer.units <= known

    def believe(
        self, peer: str, store: str, own_store: str, vouchers: Iterable[Voucher], roster: Roster
    ) -> int:
        """Count shares that were signed to this peer's store; how many were good."""
        shown, good = self.of(peer), 0
        for voucher in vouchers:
            shown.rows += 1
            transfer = voucher.transfer(peer)
            origin, towards = voucher.proof.split(" ")[:2]
            key = f"{voucher.sender} {origin}"
            mine = (voucher.sender, origin) == (self._me, own_store)
            fresh = transfer.seq > shown.upto.get(key, 0) and voucher.sender != peer and not mine
            signed = towards == store and signing.holds(roster, "share", transfer, self._agreement)
            if fresh and signed:
                shown.upto[key] = transfer.seq
                shown.units += transfer.units
                good += 1
        return good
