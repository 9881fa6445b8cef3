"""The paper's figures: learning curves by case or by number, and who holds which classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import matplotlib
from matplotlib.figure import Figure

from quiverfl.methods import method_title
from quiverfl.paper.reproduce.collect import Results
from quiverfl.paper.reproduce.paper_scores import case_scores
from quiverfl.results.curve_data import Against
from quiverfl.results.figures import STYLE, draw_curves, picture
from quiverfl.results.groups import Group
from quiverfl.results.mean_ranks import draw_ranks, ranks
from quiverfl.results.palette import Style
from quiverfl.results.partition_picture import draw_counts
from quiverfl.results.run_files import Counts
from quiverfl.results.summary import Report

SERIES = ("#440154", "#3B528B", "#21908C", "#5DC863", "#C7A300", "#D55E00", "#882255")
MARKERS = ("o", "s", "D", "^", "v", "P", "X")
"""For what is counted: from dark to light, as the numbers grow."""


@dataclass(frozen=True)
class Panels:
    """A row of a figure: what it shows, and the curves in it."""

    title: str
    groups: tuple[Group, ...]


def by_case(results: Results) -> list[Panels]:
    """A row per case, a curve per method."""
    return [Panels(case.label, case.groups) for case in results.cases]


def by_method(results: Results) -> list[Panels]:
    """A row per method, a curve per case."""
    rows = []
    for method in results.methods():
        found = [(case.label, case.group(method)) for case in results.cases]
        there = [(label, group) for label, group in found if group is not None]
        rows.append(Panels(method_title(method), tuple(_restyled(there))))
    return rows


def _restyled(groups: Sequence[tuple[str, Group]]) -> list[Group]:
    return [
        replace(
            group,
            label=label,
            style=Style(SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]),
        )
        for place, (label, group) in enumerate(groups)
    ]


def draw_case_ranks(results: Results, stage: str, report: Report) -> Figure | None:
    """The critical-difference diagram of the methods over the cases; None where there are few."""
    found = ranks(case_scores(results, stage, report))
    if found is None:
        return None
    titles = [method_title(method) for method in found.methods]
    height = 1.6 + 0.28 * len(titles)
    return picture(lambda axes: draw_ranks(axes, found, titles), width=8.0, height=height)


def draw_panels(rows: Sequence[Panels], stages: Sequence[str], against: Against) -> Figure:
    """One row of panels for each, the stages beside each other on one scale."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.8, 0.5 + 3.2 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), len(stages), squeeze=False, sharey="row", sharex="row")
        for row, line in zip(rows, grid, strict=True):
            for stage, axes in zip(stages, line, strict=True):
                draw_curves(axes, row.groups, stage, against)
                axes.set_title(f"{row.title}: stage {stage}")
                axes.label_outer()
                axes.tick_params(labelbottom=True)
        named = {
            label: handle
            for line in grid
            for handle, label in zip(*line[0].get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            named.values(), named.keys(), loc="outside lower center", ncols=min(6, len(named))
        )
    return figure


def draw_partitions(counts: Sequence[tuple[str, Counts]]) -> Figure:
    """Heat-maps beside each other, clients across and classes down."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4 * len(counts), 5.2), layout="constrained")
        for axes, (title, table) in zip(
            figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True
        ):
            axes.grid(False)
            draw_counts(table, axes, numbers=False)
            axes.set_title(title)
    return figure
