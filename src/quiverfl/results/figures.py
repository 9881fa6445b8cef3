"""Pictures of results. Each `draw_…` fills one axes, so that any page can arrange them."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from quiverfl.errors import QuiverError, suggest
from quiverfl.results import formatting as numbers
from quiverfl.results.curves import (
    AXIS_WORDS,
    MOST_POINTS,
    Against,
    Range,
    combine_seeds,
    has_moving_mass,
    is_logarithmic,
    make_curves,
    visible_range,
)
from quiverfl.results.formatting import write_result_file
from quiverfl.results.groups import Group, common_metric, name_alike, split_by_case
from quiverfl.results.scores import compare_groups, run_scores
from quiverfl.results.summary import STAGES, Report, client_frame, headline_metric, mean_by_round
from quiverfl.types import Floats

if TYPE_CHECKING:
    import pandas as pd


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
_WIDEST_LABEL = 26
MOST_WRITTEN = 16
"""With more bars than this their values are not written above them."""


def draw_curves(
    axes: Axes,
    groups: Sequence[Group],
    stage: str,
    against: Against = "rounds",
    metric: str | None = None,
    late: bool = False,
) -> None:
    """The mean over clients against what was spent; with several seeds their mean and range.

    `late` scales by the later values, so that curves which end close together can be told apart.
    """
    metric = metric or common_metric(groups)
    drawn = make_curves(groups, stage, against, metric)
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
            markevery=_choose_markers(len(one.middle), groups.index(one.group), len(groups)),
            label=label,
        )
    if is_logarithmic(drawn, against):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if late:
        _scale(axes, visible_range(drawn))
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
        points = _thin_values(values)
        offsets = row + 0.46 * (_scatter_points(len(points)) - 0.5)
        axes.scatter(points, offsets, s=13, color=color, alpha=0.75, linewidths=0)
    labels = [textwrap.fill(group.label, _WIDEST_LABEL) for group in groups]
    axes.set_yticks(range(len(groups)), labels)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    _label_metric(axes, metric, "x")


def draw_bars(axes: Axes, groups: Sequence[Group], stage: str, report: Report = "last") -> None:
    """A bar for each experiment in each case, from zero, with its deviation over seeds."""
    cases, metric = split_by_case(groups), common_metric(groups)
    most = max(map(len, cases.values()))
    width = 0.84 / most
    for place, own in enumerate(cases.values()):
        rows = compare_groups(own, report).to_dict("records")
        for position, (group, row) in enumerate(zip(own, rows, strict=True)):
            x = place + (position - (len(own) - 1) / 2) * width
            mean, spread = row[f"{stage}_mean"], row[f"{stage}_mean_seed_std"]
            axes.bar(x, mean, 0.9 * width, color=group.style.color, label=group.name)
            if spread > 0:
                axes.errorbar(x, mean, spread, color="#444444", linewidth=1, capsize=2)
            if len(groups) <= MOST_WRITTEN and np.isfinite(mean):
                above = mean + (spread if spread > 0 else 0)
                text = numbers.format_score(mean, metric)
                axes.annotate(text, (x, above), (0, 2), textcoords="offset points", ha="center",
                              fontsize=8, color="#444444")  # fmt: skip
    ticks = [textwrap.fill(case, _WIDEST_LABEL) for case in cases]
    axes.set_xticks(range(len(cases)), ticks)
    axes.tick_params(axis="x", length=0)
    axes.grid(False, axis="x")
    _label_metric(axes, metric, "y")
    axes.label_outer()
    axes.tick_params(labelbottom=True)


def plot_bars(
    groups: Sequence[Group], stages: Sequence[str] = STAGES, report: Report = "last"
) -> NotebookFigure:
    """The bars of every case, the stages beside each other."""
    draw = partial(draw_bars, groups=name_alike(groups), report=report)
    panels = [(f"stage {stage}", partial(draw, stage=stage)) for stage in stages]
    width = max(4.2, 0.8 + 0.34 * len(groups)) * len(stages)
    return make_panels([panels], (width, 3.8), collect_key=True, sharey=True)


def plot_curves(
    rows: Mapping[str, Sequence[Group]],
    stages: Sequence[str] = STAGES,
    against: Against = "rounds",
    metric: str | None = None,
) -> NotebookFigure:
    """A row of panels for each title, the stages beside each other on one scale."""

    def draw(groups: Sequence[Group], stage: str, axes: Axes) -> None:
        draw_curves(axes, groups, stage, against, metric)
        axes.label_outer()
        axes.tick_params(labelbottom=True)

    return make_panels(
        [
            [
                (f"{title}: stage {s}" if title else f"stage {s}", partial(draw, own, s))
                for s in stages
            ]
            for title, own in rows.items()
        ],
        (5.4 * len(stages), 0.5 + 3.2 * len(rows)),
        collect_key=True,
        sharey="row",
        sharex="row",
    )


def draw_mass(axes: Axes, groups: Sequence[Group]) -> None:
    """The range of μ over clients, round by round, where it moves."""
    moving = [group for group in groups if has_moving_mass(group)]
    alpha = 0.16 if len(moving) < 3 else 0.06
    for position, group in enumerate(moving):
        # Methods on one graph have one μ: dashes let the line below be seen.
        dashes = "-" if not position else (0, (4, 2 + 2 * position))
        low, high = combine_seeds(group, "mu_min", np.min), combine_seeds(group, "mu_max", np.max)
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
        distance = combine_seeds(group, "consensus", np.mean)
        if len(distance):
            rounds = distance.index.to_numpy() + 1
            axes.plot(rounds, distance, color=group.style.color, label=group.label)
    _logarithmic(axes)
    axes.set_ylabel("consensus distance")
    _label_spent(axes, "rounds")


def make_figure(draw: Callable[[Axes], None], width: float = 5.4, height: float = 3.3) -> Figure:
    """A figure of one axes in the house style; sizes are in inches."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
    return figure


def make_panels(
    rows: Sequence[Sequence[tuple[str, Callable[[Axes], None]]]],
    size: tuple[float, float],
    key: Sequence[Artist] = (),
    collect_key: bool = False,
    **options: Any,
) -> NotebookFigure:
    """A figure of titled panels in rows, with a common key below them; sizes are in inches.

    The key has the given artists, or with `collect_key` what the panels label. `options` are those
    of matplotlib's `Figure.subplots`.
    """
    with matplotlib.rc_context(STYLE):
        figure = NotebookFigure(figsize=size, layout="constrained")
        grid = figure.subplots(len(rows), len(rows[0]), squeeze=False, **options)
        for panels, line in zip(rows, grid, strict=True):
            for (title, draw), axes in zip(panels, line, strict=True):
                draw(axes)
                axes.set_title(title)
        artists = {str(artist.get_label()): artist for artist in key}
        for axes in figure.axes if collect_key else ():
            handles, labels = axes.get_legend_handles_labels()
            artists |= zip(labels, handles, strict=True)
        if artists:
            labels, handles, columns = list(artists), list(artists.values()), min(6, len(artists))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def render_figure(
    figure: Figure,
    format: str,
    dpi: float | Literal["figure"] = 200,
    style: Any = None,
    **options: Any,
) -> bytes:
    """The figure as PNG, SVG or PDF. Equal figures give equal bytes: the date is left out."""
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format, {})
    with matplotlib.rc_context(STYLE if style is None else style):
        figure.savefig(buffer, format=format, dpi=dpi, metadata=metadata, **options)
    return buffer.getvalue()


def save_figure(figure: Figure, path: Path) -> None:
    """Write PNG, SVG or PDF, by the ending of the name."""
    write_result_file(path, render_figure(figure, path.suffix.lstrip(".") or "png"))


def _choose_markers(points: int, turn: int, turns: int) -> tuple[int, int]:
    """About six markers along a curve, those of different curves at different places."""
    step = max(1, points // 6)
    return (turn * step) // max(1, turns), step


def _thin_values(values: Floats) -> Floats:
    """All values, or quantiles that stand for them where there are very many."""
    if len(values) <= MOST_POINTS:
        return values
    return np.quantile(values, np.linspace(0, 1, MOST_POINTS))


def _scatter_points(count: int) -> Floats:
    """Evenly scattered over [0, 1) without chance: multiples of the golden ratio."""
    turns = (np.arange(count, dtype=np.float64) + 0.5) * 0.6180339887498949
    scattered: Floats = turns - np.floor(turns)
    return scattered


def _label_spent(axes: Axes, against: Against) -> None:
    axes.set_xlabel(AXIS_WORDS[against])
    if against == "bytes":
        axes.xaxis.set_major_formatter(FuncFormatter(_short_size))
    elif against in ("clock", "joules"):
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    elif against == "steps":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: numbers.format_count(value)))
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
    return numbers.format_bytes(count).replace(".0 ", " ")


def _label_metric(axes: Axes, metric: str, side: Literal["x", "y"]) -> None:
    axis = axes.xaxis if side == "x" else axes.yaxis
    if numbers.is_percentage(metric):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    words = f"test {metric}"
    (axes.set_xlabel if side == "x" else axes.set_ylabel)(words)


_COLUMNS = ("round", "stage", "client")


class NotebookFigure(Figure):
    """A matplotlib figure that a notebook shows by itself."""

    def _repr_png_(self) -> bytes:
        return render_figure(self, "png", dpi=110)


def plot_run(
    history: pd.DataFrame, title: str, metric: str | None = None, stage: str | None = None
) -> NotebookFigure:
    """Plot the mean over clients at both stages or at one, with the quartiles of the clients."""
    stages = STAGES if stage is None else (check_stage(stage),)
    metric = check_metric([history], metric)
    with matplotlib.rc_context(STYLE):
        figure = NotebookFigure(figsize=(5.8, 3.5), layout="constrained")
        axes = figure.add_subplot()
        for name in stages:
            values = client_frame(history, name, metric)
            if not len(values):
                continue
            rounds = values.index.to_numpy() + 1
            (line,) = axes.plot(rounds, mean_by_round(values), label=name)
            low, high = (values.quantile(part, axis=1) for part in (0.25, 0.75))
            axes.fill_between(rounds, low, high, color=line.get_color(), alpha=0.14, lw=0)
        axes.set_title(title)
        _label_spent(axes, "rounds")
        _label_metric(axes, metric, "y")
        if len(axes.lines):
            axes.legend()
    return figure


def check_stage(stage: str) -> str:
    if stage not in STAGES:
        raise QuiverError(f"stage {stage!r}: {suggest(str(stage), STAGES)}")
    return stage


def check_metric(histories: list[pd.DataFrame], metric: str | None) -> str:
    evaluated = [history for history in histories if len(history)]
    if not evaluated:
        raise QuiverError("nothing was evaluated: there are no learning curves to draw.")
    known = [name for name in evaluated[0].columns if name not in _COLUMNS]
    if metric is not None and metric not in known:
        raise QuiverError(f"no metric {metric!r}; {suggest(metric, known)}")
    return headline_metric(evaluated[0]) if metric is None else metric
