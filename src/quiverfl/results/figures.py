"""Pictures of results. Each `draw_…` fills one axes, so that any page can arrange them."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from quiverfl.results import numbers
from quiverfl.results.curve_data import (
    Against,
    Floats,
    Range,
    curves,
    extremes,
    has_moving_mass,
    is_logarithmic,
    shown_range,
)
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.output_files import replace_file
from quiverfl.results.scores import run_scores
from quiverfl.results.summary import Report

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
AXIS_WORDS = {
    "rounds": "rounds",
    "bytes": "bytes over the network",
    "steps": "local steps, all clients together",
}
MOST_POINTS = 400
_WIDEST_LABEL = 26


def draw_curves(
    axes: Axes,
    groups: Sequence[Group],
    stage: str,
    against: Against = "rounds",
    metric: str | None = None,
    late: bool = False,
) -> None:
    """The mean over clients against what was spent; with several seeds their mean and range.

    `late` scales by the later values, so that those who end close together can be told apart.
    """
    metric = metric or common_metric(groups)
    drawn = curves(groups, stage, against, metric)
    for one in drawn:
        style, label = one.group.style, one.group.label
        if one.level:
            axes.axhline(one.middle[-1], color=style.color, linestyle=(0, (1, 2)), label=label)
            continue
        axes.fill_between(one.spent, one.low, one.high, color=style.color, alpha=0.16, linewidth=0)
        axes.plot(
            one.spent,
            one.middle,
            color=style.color,
            marker=style.marker,
            markersize=4.5,
            markevery=_some(len(one.middle), groups.index(one.group), len(groups)),
            label=label,
        )
    if is_logarithmic(drawn, against):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if late:
        _scale(axes, shown_range(drawn))
    _label_spent(axes, against)
    _label_metric(axes, metric, "y")


def _scale(axes: Axes, values: Range | None) -> None:
    if values is None or not np.isfinite(values).all():
        return
    margin = 0.05 * (values[1] - values[0]) or 0.05 * abs(values[0]) or 1.0
    axes.set_ylim(values[0] - margin, values[1] + margin)


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


def draw_mass(axes: Axes, groups: Sequence[Group]) -> None:
    """The range of μ over clients, round by round, where it moves."""
    moving = [group for group in groups if has_moving_mass(group)]
    alpha = 0.16 if len(moving) < 3 else 0.06
    for position, group in enumerate(moving):
        # Methods on one graph have one μ: dashes let the line below be seen.
        dashes = "-" if not position else (0, (4, 2 + 2 * position))
        low, high = extremes(group, "mu_min", np.min), extremes(group, "mu_max", np.max)
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
        distance = extremes(group, "consensus", np.mean)
        if len(distance):
            rounds = distance.index.to_numpy() + 1
            axes.plot(rounds, distance, color=group.style.color, label=group.label)
    _logarithmic(axes)
    axes.set_ylabel("consensus distance")
    _label_spent(axes, "rounds")


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


def _some(points: int, turn: int, turns: int) -> tuple[int, int]:
    """About six markers along a curve, those of different curves at different places."""
    step = max(1, points // 6)
    return (turn * step) // max(1, turns), step


def _thinned(values: Floats) -> Floats:
    """All values, or quantiles that stand for them where there are very many."""
    if len(values) <= MOST_POINTS:
        return values
    return np.quantile(values, np.linspace(0, 1, MOST_POINTS))


def _scattered(count: int) -> Floats:
    """Evenly scattered over [0, 1) without chance: multiples of the golden ratio."""
    turns = (np.arange(count, dtype=np.float64) + 0.5) * 0.6180339887498949
    scattered: Floats = turns - np.floor(turns)
    return scattered


def _label_spent(axes: Axes, against: Against) -> None:
    axes.set_xlabel(AXIS_WORDS[against])
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
