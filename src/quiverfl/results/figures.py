"""Pictures of results. Each `draw_…` fills one axes, so that any page can arrange them."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from quiverfl.results import numbers
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.output_files import replace_file
from quiverfl.results.scores import run_scores, spent_by_round
from quiverfl.results.summary import Report, mean_by_round

Floats: TypeAlias = npt.NDArray[np.float64]
Against: TypeAlias = Literal["rounds", "bytes", "steps"]
AGAINST: tuple[Against, ...] = ("rounds", "bytes", "steps")

STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": "#444444",
    "axes.edgecolor": "#B5B5B5",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ECECEC",
    "grid.linewidth": 0.8,
    "xtick.color": "#B5B5B5",
    "ytick.color": "#B5B5B5",
    "xtick.labelcolor": "#444444",
    "ytick.labelcolor": "#444444",
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    # Names are not formulas, text stays text, and the same picture is the same file.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "quiver",
}
_AXIS_WORDS = {
    "rounds": "rounds",
    "bytes": "bytes over the network",
    "steps": "local steps, all clients together",
}
_MOST_POINTS = 400
_WIDEST_LABEL = 26
_LOG_FROM = 15.0
"""Experiments whose costs differ by more than this share a logarithmic axis."""


def draw_curves(
    axes: Axes, groups: Sequence[Group], stage: str, against: Against = "rounds"
) -> None:
    """The mean over clients against what was spent; with several seeds their mean and range."""
    metric = common_metric(groups)
    ends: list[float] = []
    for group in groups:
        spent, middle, low, high = _curve(group, stage, against, metric)
        if not len(middle):
            continue
        color = group.style.color
        if against != "rounds" and not spent[-1]:
            axes.axhline(middle[-1], color=color, linestyle=(0, (1, 2)), label=group.label)
            continue
        if against != "rounds":  # before the first communication nothing is spent
            spent, middle, low, high = (part[spent > 0] for part in (spent, middle, low, high))
        ends.append(spent[-1])
        axes.fill_between(spent, low, high, color=color, alpha=0.16, linewidth=0)
        axes.plot(
            spent,
            middle,
            color=color,
            marker=group.style.marker,
            markersize=4.5,
            markevery=_some(len(middle), groups.index(group), len(groups)),
            label=group.label,
        )
    if against != "rounds" and ends and max(ends) > _LOG_FROM * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    _label_spent(axes, against)
    _label_metric(axes, metric, "y")


def draw_clients(axes: Axes, groups: Sequence[Group], stage: str, report: Report = "last") -> None:
    """Every client as a point, with the quartiles and the median of each experiment."""
    metric = common_metric(groups)
    for row, group in enumerate(groups):
        scores = [run_scores(run, stage, report, metric).dropna() for run in group.runs]
        values = np.sort(np.concatenate([part.to_numpy(dtype=np.float64) for part in scores]))
        if not len(values):
            continue
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        color = group.style.color
        axes.barh(row, high - low, left=low, height=0.62, color=color, alpha=0.18, linewidth=0)
        axes.plot([middle, middle], [row - 0.31, row + 0.31], color=color, linewidth=2.2)
        points = _thinned(values)
        offsets = row + 0.46 * (_scattered(len(points)) - 0.5)
        axes.scatter(points, offsets, s=13, color=color, alpha=0.75, linewidths=0)
    labels = [textwrap.fill(group.label, _WIDEST_LABEL) for group in groups]
    axes.set_yticks(range(len(groups)), labels)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _label_metric(axes, metric, "x")


def has_moving_mass(group: Group) -> bool:
    """Whether μ ever left 1 (by more than rounding)."""
    low, high = _extremes(group, "mu_min", np.min), _extremes(group, "mu_max", np.max)
    return bool(len(low)) and bool((low < 1 - 1e-9).any() or (high > 1 + 1e-9).any())


def draw_mass(axes: Axes, groups: Sequence[Group]) -> None:
    """The range of μ over clients, round by round, where it moves."""
    moving = [group for group in groups if has_moving_mass(group)]
    alpha = 0.16 if len(moving) < 3 else 0.06
    for position, group in enumerate(moving):
        # Methods on one graph have one μ: dashes let the line below be seen.
        dashes = "-" if not position else (0, (4, 2 + 2 * position))
        low, high = _extremes(group, "mu_min", np.min), _extremes(group, "mu_max", np.max)
        rounds, color = low.index.to_numpy() + 1, group.style.color
        axes.fill_between(rounds, low, high, color=color, alpha=alpha, linewidth=0)
        for edge in (low, high):
            axes.plot(rounds, edge, color=color, linewidth=1.4, linestyle=dashes)
    axes.axhline(1, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)))
    _logarithmic(axes)
    axes.set_ylabel("μ, smallest to largest")
    _label_spent(axes, "rounds")


def draw_consensus(axes: Axes, groups: Sequence[Group]) -> None:
    """How far the clients' shared parts are apart after each round."""
    for group in groups:
        distance = _extremes(group, "consensus", np.mean)
        if len(distance):
            rounds = distance.index.to_numpy() + 1
            axes.plot(rounds, distance, color=group.style.color, label=group.label)
    _logarithmic(axes)
    axes.set_ylabel("consensus distance")
    _label_spent(axes, "rounds")


def is_agreed(group: Group) -> bool:
    """Whether the clients share one model after every round, as a server's do."""
    distance = _extremes(group, "consensus", np.mean)
    return bool(len(distance)) and bool((distance == 0).all())


def records_consensus(group: Group) -> bool:
    return bool(len(_extremes(group, "consensus", np.mean)))


def has_consensus(groups: Sequence[Group]) -> bool:
    return any(bool((_extremes(group, "consensus", np.mean) > 0).any()) for group in groups)


def picture(draw: Callable[[Axes], None], width: float = 5.4, height: float = 3.3) -> Figure:
    """One axes in the house style; sizes in inches."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """PNG, SVG or PDF by the ending of the name; dates are left out so that equal is equal."""
    buffer = io.BytesIO()
    kind = path.suffix.lstrip(".") or "png"
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200, metadata=_undated(kind))
    replace_file(path, buffer.getvalue())


def _undated(kind: str) -> dict[str, None]:
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})


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


def _extremes(group: Group, name: str, combine: Callable[..., float]) -> pd.Series:
    """A column of the rounds, combined over seeds, at the rounds that every seed has."""
    columns = [
        run.rounds.set_index("round")[name].astype(float).dropna()
        if name in run.rounds
        else pd.Series(dtype=np.float64)
        for run in group.runs
    ]
    return pd.concat(columns, axis=1, join="inner").sort_index().agg(combine, axis=1)


def _some(points: int, turn: int, turns: int) -> tuple[int, int]:
    """About six markers along a curve, those of different curves at different places."""
    step = max(1, points // 6)
    return (turn * step) // max(1, turns), step


def _thinned(values: Floats) -> Floats:
    """All values, or quantiles that stand for them where there are very many."""
    if len(values) <= _MOST_POINTS:
        return values
    return np.quantile(values, np.linspace(0, 1, _MOST_POINTS))


def _scattered(count: int) -> Floats:
    """Evenly scattered over [0, 1) without chance: multiples of the golden ratio."""
    turns = (np.arange(count, dtype=np.float64) + 0.5) * 0.6180339887498949
    scattered: Floats = turns - np.floor(turns)
    return scattered


def _label_spent(axes: Axes, against: Against) -> None:
    axes.set_xlabel(_AXIS_WORDS[against])
    if against == "bytes":
        axes.xaxis.set_major_formatter(FuncFormatter(_short_size))
    elif against == "steps":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.whole(value)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, steps=[1, 2, 5, 10]))
    if axes.get_xscale() == "linear" and against != "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))


def _logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _short_size(count: float, _: object) -> str:
    return numbers.size(count).replace(".0 ", " ")


def _label_metric(axes: Axes, metric: str, side: Literal["x", "y"]) -> None:
    axis = axes.xaxis if side == "x" else axes.yaxis
    if numbers.is_share(metric):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    words = f"test {metric}"
    (axes.set_xlabel if side == "x" else axes.set_ylabel)(words)
