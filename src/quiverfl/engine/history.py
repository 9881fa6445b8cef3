"""Rows of what happened: evaluations per client, and one record per round. Append-only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from quiverfl.results.summary import history_frame, rounds_frame

if TYPE_CHECKING:
    import pandas as pd

Metrics = dict[str, npt.NDArray[np.float64]]
Record = dict[str, Any]
"""A round: seconds, bytes, steps, range of μ, consensus distance."""


class Recorder(Protocol):
    """Something that is told about every evaluation and every round as it happens."""

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None: ...
    def finished(self, record: Record) -> None: ...


@dataclass(eq=False)
class History:
    """Everything recorded so far, in memory."""

    evaluations: list[tuple[int, str, Metrics]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        self.evaluations.append((round, stage, metrics))

    def finished(self, record: Record) -> None:
        self.records.append(record)

    def copy(self) -> History:
        """What is recorded later does not appear in it."""
        return History(list(self.evaluations), list(self.records))

    def frame(self) -> pd.DataFrame:
        """round, stage, client, and a column per metric."""
        return history_frame(self.evaluations)

    def rounds(self) -> pd.DataFrame:
        """One row per round; what is recorded per client is summed."""
        return rounds_frame(self.records)


def evaluates(round: int, every: int, rounds: int) -> bool:
    """Whether a round is evaluated: every `every` rounds, and the last."""
    return (round + 1) % every == 0 or round == rounds - 1
