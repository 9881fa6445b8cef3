"""All three findings, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from quiverfl.paper.theory.connectivity import Connectivity, measure_connectivity
from quiverfl.paper.theory.conservation import Conservation, measure_conservation
from quiverfl.paper.theory.rate import Rate, measure_rate
from quiverfl.paper.theory.theory_settings import FULL, TheorySettings

Found = TypeVar("Found")


@dataclass(frozen=True)
class Findings:
    settings: TheorySettings
    rate: Rate
    connectivity: Connectivity
    conservation: Conservation

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def measure(
    settings: TheorySettings = FULL, told: Callable[[str], None] = lambda _: None
) -> Findings:
    """`told` hears what is about to be computed."""
    return Findings(
        settings,
        _last(measure_rate(settings), told),
        _last(measure_connectivity(settings), told),
        _last(measure_conservation(settings), told),
    )


def _last(work: Iterator[str | Found], told: Callable[[str], None]) -> Found:
    for step in work:
        if not isinstance(step, str):
            return step
        told(step)
    raise AssertionError("the work ended without a result")
