"""What a peer's records say: every commit leaves an entry, every share a line at either end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quiverfl.peer.ledger import Transfer


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
        """What float32 arithmetic added or dropped in this commit."""
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
