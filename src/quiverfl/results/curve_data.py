"""Learning curves as numbers: what is drawn, and what a page needs to draw it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from quiverfl.results.groups import Group, common_metric
from quiverfl.results.scores import spent_by_round
from quiverfl.results.summary import mean_by_round

Floats: TypeAlias = npt.NDArray[np.float64]
Against: TypeAlias = Literal["rounds", "bytes", "steps"]
AGAINST: tuple[Against, ...] = ("rounds", "bytes", "steps")
Range: TypeAlias = tuple[float, float]

LATE = 5
"""Scales follow the values after the first of so many parts: those who rise would squeeze them."""
WORTH = 0.7
"""But where that saves less than this, everything is shown."""
_LOG_FROM = 15.0
"""Experiments whose costs differ by more than this share a logarithmic axis."""


@dataclass(frozen=True, eq=False)
class Curve:
    """The mean over clients of one experiment; with several seeds their mean and range."""

    group: Group
    spent: Floats
    middle: Floats
    low: Floats
    high: Floats
    level: bool = False
    """Nothing was ever spent: the last value alone, which is the same everywhere."""

    @property
    def whole(self) -> Range:
        return float(self.low.min()), float(self.high.max())

    @property
    def late(self) -> Range:
        begin = len(self.middle) // LATE
        return float(self.low[begin:].min()), float(self.high[begin:].max())


def curves(groups: Sequence[Group], stage: str, against: Against, metric: str) -> list[Curve]:
    """Those of the experiments that have something to show."""
    found = []
    for group in groups:
        spent, middle, low, high = _curve(group, stage, against, metric)
        if not len(middle):
            continue
        if against != "rounds" and not spent[-1]:
            last = np.array([middle[-1]])
            found.append(Curve(group, np.zeros(1), last, last, last, level=True))
            continue
        if against != "rounds":  # before the first communication nothing is spent
            spent, middle, low, high = (part[spent > 0] for part in (spent, middle, low, high))
        found.append(Curve(group, spent, middle, low, high))
    return found


def shown_range(drawn: Sequence[Curve]) -> Range | None:
    """The values to scale by: the late ones, or all where that makes little difference."""
    if not drawn:
        return None
    return hull(one.late if is_cut(drawn) else one.whole for one in drawn)


def is_cut(drawn: Sequence[Curve]) -> bool:
    """Whether early values are left outside the picture, for the late ones to be told apart."""
    if not drawn:
        return False
    late, whole = hull(one.late for one in drawn), hull(one.whole for one in drawn)
    return late[1] - late[0] < WORTH * (whole[1] - whole[0])


def hull(ranges: Iterable[Range]) -> Range:
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def is_logarithmic(drawn: Sequence[Curve], against: Against) -> bool:
    ends = [one.spent[-1] for one in drawn if not one.level]
    return against != "rounds" and bool(ends) and bool(max(ends) > _LOG_FROM * min(ends))


def metrics_shown(groups: Sequence[Group]) -> list[str]:
    """What results are judged by, and the loss beside it where it is recorded."""
    first = common_metric(groups)
    lossy = any("loss" in run.history for group in groups for run in group.runs)
    return [first, "loss"] if lossy and first != "loss" else [first]


def extremes(group: Group, name: str, combine: Callable[..., float]) -> pd.Series:
    """A column of the rounds, combined over seeds, at the rounds that every seed has."""
    columns = [
        run.rounds.set_index("round")[name].astype(float).dropna()
        if name in run.rounds
        else pd.Series(dtype=np.float64)
        for run in group.runs
    ]
    return pd.concat(columns, axis=1, join="inner").sort_index().agg(combine, axis=1)


def has_moving_mass(group: Group) -> bool:
    """Whether μ ever left 1 (by more than rounding)."""
    low, high = extremes(group, "mu_min", np.min), extremes(group, "mu_max", np.max)
    return bool(len(low)) and bool((low < 1 - 1e-9).any() or (high > 1 + 1e-9).any())


def is_agreed(group: Group) -> bool:
    """Whether the clients share one model after every round, as a server's do."""
    distance = extremes(group, "consensus", np.mean)
    return bool(len(distance)) and bool((distance == 0).all())


def records_consensus(group: Group) -> bool:
    return bool(len(extremes(group, "consensus", np.mean)))


def has_consensus(groups: Sequence[Group]) -> bool:
    return any(bool((extremes(group, "consensus", np.mean) > 0).any()) for group in groups)


def _curve(
    group: Group, stage: str, against: Against, metric: str
) -> tuple[Floats, Floats, Floats, Floats]:
    """(spent, mean, lowest, highest over seeds) at the rounds that every seed has evaluated."""
    means, spent = [], []
    for run in group.runs:
        values = run.values(stage, metric)
        means.append(mean_by_round(values) if len(values) else pd.Series(dtype=np.float64))
        spent.append(spent_by_round(run, stage)[against])
    table = pd.concat(means, axis=1, join="inner").dropna()
    at = pd.concat(spent, axis=1, join="inner").mean(axis=1).reindex(table.index)
    table, at = table[at.notna()], at.dropna()
    columns = (at, table.mean(axis=1), table.min(axis=1), table.max(axis=1))
    x, middle, low, high = (column.to_numpy(dtype=np.float64) for column in columns)
    return x, middle, low, high
