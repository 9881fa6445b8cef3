"""Charts as data: what the page's script draws in the place of a still picture.

A chart is an object of JSON: its axes, and for every experiment the points. `report.js` reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from quiverfl.results import numbers
from quiverfl.results.curve_data import (
    Against,
    Curve,
    curves,
    extremes,
    is_cut,
    is_logarithmic,
)
from quiverfl.results.figures import AXIS_WORDS, MOST_POINTS
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.palette import GLYPHS, themed
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import run_scores

Chart: TypeAlias = dict[str, Any]
_DIGITS = 6
_KINDS = {"rounds": "whole", "bytes": "bytes", "steps": "whole"}


def curve_chart(groups: Sequence[Group], stage: str, against: Against, metric: str) -> Chart:
    drawn = curves(groups, stage, against, metric)
    return {
        "kind": "lines",
        "scale": f"{metric} {against}",  # charts of one scale keep to one range
        "x": _axis(AXIS_WORDS[against], _KINDS[against], is_logarithmic(drawn, against)),
        "y": _axis(f"test {metric}", metric_kind(metric)),
        "series": [_curve_series(one) for one in drawn],
        "cut": is_cut(drawn),
    }


def mass_chart(groups: Sequence[Group]) -> Chart:
    series = []
    for group in groups:
        low, high = extremes(group, "mu_min", np.min), extremes(group, "mu_max", np.max)
        band = {"low": plain_numbers(low), "high": plain_numbers(high)}
        series.append(named(group) | {"x": plain_numbers(low.index.to_numpy() + 1)} | band)
    return _per_round("μ, smallest to largest", series)


def consensus_chart(groups: Sequence[Group]) -> Chart:
    series = []
    for group in groups:
        distance = extremes(group, "consensus", np.mean)
        distance = distance[distance > 0]  # zero has no place on a logarithmic axis
        if len(distance):
            rounds = plain_numbers(distance.index.to_numpy() + 1)
            series.append(named(group) | {"x": rounds, "y": plain_numbers(distance)})
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
        series.append(named(group) | {"x": values, "names": [name for _, name in points]})
    return {
        "kind": "points",
        "scale": "clients",
        "x": _axis(f"test {metric}", metric_kind(metric)),
        "y": _axis("", "number"),
        "series": series,
    }


def named(group: Group) -> Chart:
    """What an experiment is called and looks like."""
    style = group.style
    return {"label": group.label, "color": themed(style.color), "glyph": GLYPHS[style.marker]}


def metric_kind(metric: str) -> str:
    return "share" if numbers.is_share(metric) else "number"


def plain_numbers(values: Iterable[float]) -> list[float | int | None]:
    """As JSON can say them, as exact as a screen can show them; None where there is no number."""
    return [_plain(float(value)) for value in values]


def _plain(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(value) if value == int(value) and abs(value) < 2**53 else short


def _curve_series(one: Curve) -> Chart:
    series = named(one.group) | {
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
