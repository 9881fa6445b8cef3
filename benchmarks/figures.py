"""A figure: a ratio of two times or sizes, and the target it is held to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Bound = Literal["≤", "≥", ">"]
Verdict = Literal["pass", "short", "skipped", "–"]


@dataclass(frozen=True)
class Figure:
    """`value` is None where it could not be measured; `note` then says why."""

    work: str
    name: str
    value: float | None
    bound: Bound | None = None
    target: float | None = None
    unit: str = ""
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the ratio was made of, such as the seconds of every repeat."""

    @property
    def key(self) -> str:
        return f"{self.work}: {self.name}"

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "skipped"
        if self.bound is None or self.target is None:
            return "–"
        reached = {
            "≤": self.value <= self.target,
            "≥": self.value >= self.target,
            ">": self.value > self.target,
        }[self.bound]
        return "pass" if reached else "short"

    def record(self) -> dict[str, Any]:
        return {**self.__dict__, "details": dict(self.details), "verdict": self.verdict}


def from_record(record: Mapping[str, Any]) -> Figure:
    return Figure(**{name: value for name, value in record.items() if name != "verdict"})


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the repeats' own ratios.

    The two of a repeat ran one after the other, so what slows the machine for a while is in both; a
    single repeat that was lucky or disturbed does not count.
    """
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
