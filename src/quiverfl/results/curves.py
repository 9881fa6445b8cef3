"""Curves as numbers, and charts: what a page's script needs to draw them again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd

from quiverfl.results import formatting as numbers
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.palette import GLYPHS, theme_color
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import cost_by_round, run_scores
from quiverfl.results.summary import mean_by_round
from quiverfl.types import Floats

Against: TypeAlias = Literal["rounds", "bytes", "steps", "clock", "joules"]
AGAINST: tuple[Against, ...] = ("rounds", "bytes", "steps")
TIMED: tuple[Against, ...] = ("clock", "joules")
"""Costs that only runs with devices have, simulated or re-timed."""
Range: TypeAlias = tuple[float, float]

LATE = 5
"""Scales leave out the first of so many parts of the rounds: its low values squeeze the rest."""
WORTH = 0.7
"""A scale of late values is used only where it is smaller than this part of the whole range."""
_LOG_FROM = 15.0
"""Experiments whose costs differ by more than this share a logarithmic axis."""


AXIS_WORDS = {
    "rounds": "rounds",
    "bytes": "bytes over the network",
    "steps": "local steps, all clients together",
    "clock": "seconds on the clock",
    "joules": "joules, all clients together",
}
MOST_POINTS = 400


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


def list_axes(groups: Sequence[Group]) -> tuple[Against, ...]:
    """What curves can be drawn against: seconds and joules where a run has devices."""
    timed = any("clock" in run.rounds for group in groups for run in group.runs)
    return (*AGAINST, *TIMED) if timed else AGAINST


def make_curves(groups: Sequence[Group], stage: str, against: Against, metric: str) -> list[Curve]:
    """The curves of the experiments that were evaluated at this stage."""
    drawn = []
    for group in groups:
        spent, middle, low, high = _curve(group, stage, against, metric)
        if not len(middle):
            continue
        if against != "rounds" and not spent[-1]:
            last = np.array([middle[-1]])
            drawn.append(Curve(group, np.zeros(1), last, last, last, level=True))
            continue
        if against != "rounds":  # before the first communication nothing is spent
            spent, middle, low, high = (part[spent > 0] for part in (spent, middle, low, high))
        drawn.append(Curve(group, spent, middle, low, high))
    return drawn


def visible_range(drawn: Sequence[Curve]) -> Range | None:
    """The values to scale by: the late ones, or all where that makes little difference."""
    if not drawn:
        return None
    return cover_ranges(one.late if is_cut(drawn) else one.whole for one in drawn)


def is_cut(drawn: Sequence[Curve]) -> bool:
    """Whether early values are left outside the picture, for the late ones to be told apart."""
    if not drawn:
        return False
    late, whole = cover_ranges(one.late for one in drawn), cover_ranges(one.whole for one in drawn)
    return late[1] - late[0] < WORTH * (whole[1] - whole[0])


def cover_ranges(ranges: Iterable[Range]) -> Range:
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


def is_logarithmic(drawn: Sequence[Curve], against: Against) -> bool:
    ends = [one.spent[-1] for one in drawn if not one.level]
    return against != "rounds" and bool(ends) and bool(max(ends) > _LOG_FROM * min(ends))


def list_metrics(groups: Sequence[Group]) -> list[str]:
    """What results are judged by, and the loss beside it where it is recorded."""
    first = common_metric(groups)
    lossy = any("loss" in run.history for group in groups for run in group.runs)
    return [first, "loss"] if lossy and first != "loss" else [first]


def combine_seeds(group: Group, name: str, combine: Callable[..., float]) -> pd.Series:
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
    low, high = combine_seeds(group, "mu_min", np.min), combine_seeds(group, "mu_max", np.max)
    return bool(len(low)) and bool((low < 1 - 1e-9).any() or (high > 1 + 1e-9).any())


def is_agreed(group: Group) -> bool:
    """Whether the clients share one model after every round, as a server's do."""
    distance = combine_seeds(group, "consensus", np.mean)
    return bool(len(distance)) and bool((distance == 0).all())


def records_consensus(group: Group) -> bool:
    return bool(len(combine_seeds(group, "consensus", np.mean)))


def has_consensus(groups: Sequence[Group]) -> bool:
    return any(bool((combine_seeds(group, "consensus", np.mean) > 0).any()) for group in groups)


def _curve(
    group: Group, stage: str, against: Against, metric: str
) -> tuple[Floats, Floats, Floats, Floats]:
    """(spent, mean, lowest, highest over seeds) at the rounds that every seed has evaluated."""
    means, spent = [], []
    for run in group.runs:
        values = run.values(stage, metric)
        means.append(mean_by_round(values) if len(values) else pd.Series(dtype=np.float64))
        spent.append(cost_by_round(run, stage)[against])
    table = pd.concat(means, axis=1, join="inner").dropna()
    at = pd.concat(spent, axis=1, join="inner").mean(axis=1).reindex(table.index)
    table, at = table[at.notna()], at.dropna()
    columns = (at, table.mean(axis=1), table.min(axis=1), table.max(axis=1))
    x, middle, low, high = (column.to_numpy(dtype=np.float64) for column in columns)
    return x, middle, low, high


# Charts as data: what the page's script draws in the place of a still picture.
#
# A chart is an object of JSON: its axes, and for every experiment the points. `report.js` reads it.


Chart: TypeAlias = dict[str, Any]
_DIGITS = 6
_KINDS = {
    "rounds": "whole",
    "bytes": "bytes",
    "steps": "whole",
    "clock": "number",
    "joules": "number",
}


def curve_chart(groups: Sequence[Group], stage: str, against: Against, metric: str) -> Chart:
    drawn = make_curves(groups, stage, against, metric)
    return {
        "kind": "lines",
        "scale": f"{metric} {against}",  # charts of one scale keep to one range
        "x": _axis(AXIS_WORDS[against], _KINDS[against], is_logarithmic(drawn, against)),
        "y": _axis(f"test {metric}", metric_kind(metric)),
        "series": [_curve_series(one) for one in drawn],
        "cut": is_cut(drawn),
    }


def live_chart(groups: Sequence[Group], stage: str, metric: str) -> Chart:
    """A curve for every run, whatever its state; seeds of one experiment share name and colour."""
    alone = [
        replace(group, runs=(run,), under_way=())
        for group in groups
        for run in (*group.runs, *group.under_way)
    ]
    return curve_chart(alone, stage, "rounds", metric)


def mass_chart(groups: Sequence[Group]) -> Chart:
    series = []
    for group in groups:
        low, high = combine_seeds(group, "mu_min", np.min), combine_seeds(group, "mu_max", np.max)
        band = {"low": plain_numbers(low), "high": plain_numbers(high)}
        series.append(describe_group(group) | {"x": plain_numbers(low.index.to_numpy() + 1)} | band)
    return _per_round("μ, smallest to largest", series)


def consensus_chart(groups: Sequence[Group]) -> Chart:
    series = []
    for group in groups:
        distance = combine_seeds(group, "consensus", np.mean)
        distance = distance[distance > 0]  # zero has no place on a logarithmic axis
        if len(distance):
            rounds = plain_numbers(distance.index.to_numpy() + 1)
            series.append(describe_group(group) | {"x": rounds, "y": plain_numbers(distance)})
    return _per_round("consensus distance", series)


def clients_chart(groups: Sequence[Group], stage: str) -> Chart | None:
    """Every client as a point; None where there are too many to point at."""
    metric = common_metric(groups)
    series = []
    for group in groups:
        points: list[tuple[float, str]] = []
        for run in group.runs:
            for client, value in run_scores(run, stage, "last", metric).dropna().items():
                points.append((value, _client_words(run, int(str(client)), len(group.runs) > 1)))
        points.sort()
        if len(points) > MOST_POINTS:
            return None
        values = plain_numbers(value for value, _ in points)
        series.append(describe_group(group) | {"x": values, "names": [name for _, name in points]})
    return {
        "kind": "points",
        "scale": "clients",
        "x": _axis(f"test {metric}", metric_kind(metric)),
        "y": _axis("", "number"),
        "series": series,
    }


def describe_group(group: Group) -> Chart:
    """What an experiment is called and looks like."""
    style = group.style
    return {"label": group.label, "color": theme_color(style.color), "glyph": GLYPHS[style.marker]}


def metric_kind(metric: str) -> str:
    return "share" if numbers.is_percentage(metric) else "number"


def plain_numbers(values: Iterable[float]) -> list[float | int | None]:
    """Numbers for JSON, as exact as a screen can show them; None for what is not finite."""
    return [_plain(float(value)) for value in values]


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(value) if value == int(value) and abs(value) < 2**53 else short


def _curve_series(one: Curve) -> Chart:
    series = describe_group(one.group) | {
        "x": plain_numbers(one.spent),
        "y": plain_numbers(one.middle),
        "late": plain_numbers(one.late),
    }
    if len(one.group.runs) > 1:
        series |= {"low": plain_numbers(one.low), "high": plain_numbers(one.high)}
    return series | {"level": True} if one.level else series


def _per_round(title: str, series: list[Chart]) -> Chart:
    return {
        "kind": "lines",
        "scale": title,
        "x": _axis(AXIS_WORDS["rounds"], "whole"),
        "y": _axis(title, "number", log=True),
        "series": series,
    }


def _axis(title: str, kind: str, log: bool = False) -> Chart:
    return {"title": title, "kind": kind, "log": log}


def _client_words(run: RunResult, client: int, several: bool) -> str:
    words = [f"client {run.client_name(client)}"]
    if several:
        words.append(f"seed {run.seed}")
    size = run.client_size(client)
    if size is not None:
        words.append(f"{size:,} training samples")
    return ", ".join(words)
