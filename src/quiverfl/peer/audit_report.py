"""What an audit has found, for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quiverfl.peer.ledger import UNIT


@dataclass
class Report:
    """What the audit found. `problems` is empty when everything adds up."""

    peers: int = 0
    units: int = 0  # in the accounts
    in_flight: int = 0  # in outboxes and not applied by their receivers
    expected: int = 0
    drift: float = 0.0  # of the float64 sums, relative
    transfers: int = 0
    refunded: int = 0
    written_off: int = 0
    skewed: int = 0  # applied by the receiver, not in the sender's (older) statement
    evicted: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # dealt with, but no store of theirs is here
    signatures: int | None = None  # checked; None: no roster was given to check them with
    problems: list[str] = field(default_factory=list)
    culprits: list[str] = field(
        default_factory=list
    )  # whose records are wrong, where they can tell

    def blame(self, peer: str | None, problem: str) -> None:
        self.problems.append(problem)
        if peer is not None and peer not in self.culprits:
            self.culprits.append(peer)

    @property
    def error(self) -> int:
        """Mass that should not be there (positive) or is missing (negative), in units of 2^-48."""
        return self.units + self.in_flight - self.expected

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def complete(self) -> bool:
        """Every link was seen from both ends."""
        return not self.missing

    def values(self) -> dict[str, Any]:
        """Everything, for machines."""
        derived = {"error": self.error, "passed": self.passed, "complete": self.complete}
        return {**vars(self), **derived}

    def lines(self) -> Iterator[str]:
        yield f"peers            {self.peers}"
        yield f"mass in accounts {self.units / UNIT:.6f}"
        yield f"mass in flight   {self.in_flight / UNIT:.6f}"
        yield f"mass expected    {self.expected / UNIT:.6f}"
        yield f"error            {self.error} units of 2^-48"
        yield f"drift of u       {self.drift:.1e} (relative)"
        yield f"transfers        {self.transfers} ({self.refunded} refunded)"
        if self.written_off:
            yield f"written off      {self.written_off / UNIT:.6f}"
        if self.evicted:
            yield f"evicted          {', '.join(self.evicted)}"
        if self.skewed:
            yield f"skewed           {self.skewed} transfers between stores read at two moments"
        if self.signatures is None:
            yield "signatures       not checked: name the roster with --roster"
        else:
            yield f"signatures       {self.signatures} checked"
        yield from self.problems
        if self.culprits:
            yield f"wrong records    {', '.join(self.culprits)}"
        yield self.verdict

    @property
    def verdict(self) -> str:
        if not self.passed:
            return "FAILED"
        if self.complete:
            return "passed"
        return (
            f"INCOMPLETE: nothing wrong in the stores given, but none is of "
            f"{', '.join(self.missing)}: what was exchanged with them was seen from one end only. "
            "Give the store of every peer."
        )
