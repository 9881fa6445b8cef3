"""The files of a table or a figure of the paper, from finished cells: tables, pictures, a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quiverfl.errors import QuiverError
from quiverfl.methods import method_title
from quiverfl.paper.reproduce import scores, tables
from quiverfl.paper.reproduce.catalogue import Item
from quiverfl.paper.reproduce.scores import Results, collect_results
from quiverfl.results.curves import AGAINST, list_axes
from quiverfl.results.figures import make_figure, make_panels, plot_curves, save_figure
from quiverfl.results.formatting import Table, make_file_name, write_result_file, write_tables
from quiverfl.results.groups import Group
from quiverfl.results.palette import Style
from quiverfl.results.pictures import draw_counts
from quiverfl.results.report.html import (
    Markup,
    data_table,
    lead_paragraph,
    make_page,
    panels,
    section,
    tag,
)
from quiverfl.results.report.page import write_report
from quiverfl.results.run_files import Counts
from quiverfl.results.statistics import draw_ranks, rank_methods
from quiverfl.results.summary import Report
from quiverfl.results.tables import ResultFiles, order_stages, write_results
from quiverfl.runs.experiment import load_data, partition_data
from quiverfl.sweeps.plan import WRITTEN, SweepFolder
from quiverfl.sweeps.plan import Cell as SweepCell


class OutputFolder:
    """A folder whose files belong together: an earlier call's are deleted unless written again.

    A list beside them says which files those are. Other files are not touched.
    """

    LIST = WRITTEN

    def __init__(self, folder: Path) -> None:
        self._folder, self._names = folder, set[str]()

    def add(self, name: str) -> Path:
        """The path for a file of this name."""
        self._names.add(name)
        return self._folder / name

    def finish(self) -> None:
        for name in list_written_files(self._folder):
            if name not in self._names:
                (self._folder / name).unlink(missing_ok=True)
        content = json.dumps(sorted(self._names)).encode()
        write_result_file(self._folder / self.LIST, content)

    def write_table(self, table: Table, stem: str) -> None:
        for ending in (".md", ".tex"):
            write_tables([table], self.add(f"{stem}{ending}"))

    def write_frame(self, frame: pd.DataFrame, stem: str) -> None:
        write_result_file(self.add(f"{stem}.csv"), frame.to_csv(index=False).encode())

    def write_figure(self, figure: Figure, stem: str) -> None:
        for ending in (".png", ".svg"):
            save_figure(figure, self.add(f"{stem}{ending}"))


def list_written_files(folder: Path) -> list[str]:
    """The names of the files that were last written into a folder."""
    try:
        names = json.loads((folder / OutputFolder.LIST).read_text())
    except (OSError, ValueError):
        return []
    # A folder may come from somebody else: a name must not lead out of it.
    return [name for name in map(str, names) if Path(name).name == name]


@dataclass(frozen=True)
class TableOptions:
    """Which stage comes first, which rounds count, and files besides those of the folder."""

    stage: str = "local"
    report: Report = "last"
    files: ResultFiles = field(default_factory=ResultFiles)

    @property
    def stages(self) -> tuple[str, ...]:
        return order_stages(self.stage)


def write_item(
    name: str,
    item: Item,
    cells: Sequence[SweepCell],
    places: SweepFolder,
    folder: Path,
    options: TableOptions,
) -> list[Table]:
    """Write every file of an item into a folder; its tables, for the terminal."""
    output = OutputFolder(folder)
    if item.kind == "partition":
        item_tables = _write_partitions(name, item, cells, output, options.files)
    else:
        item_tables = _write_results(name, item, cells, places, output, options)
    output.finish()
    return item_tables


def _write_results(
    name: str,
    item: Item,
    cells: Sequence[SweepCell],
    places: SweepFolder,
    output: OutputFolder,
    options: TableOptions,
) -> list[Table]:
    results = collect_results(cells, places)
    item_tables = _make_tables(name, item, results, options)
    for stem, table in item_tables.items():
        output.write_table(table, stem)
    for stem, frame in _make_frames(name, item, results, options).items():
        if len(frame):
            output.write_frame(frame.rename(columns=_shorten_column), stem)
    figures = _make_figures(item, results, options)
    for (stem, _), figure in figures.items():
        output.write_figure(figure, f"{name}-{stem}")
    reports = {}
    if item.kind == "accuracy":
        reports = _write_reports(cells, places, output, options.stage)
    first, *_ = item_tables.values()
    write_results(results.groups, options.files, options.stage, options.report, first)
    by_title = {title: figure for (_, title), figure in figures.items()}
    text = make_item_page(name, item, list(item_tables.values()), by_title, results, reports)
    write_result_file(output.add("report.html"), text.encode())
    return list(item_tables.values())


def _shorten_column(name: str) -> str:
    """`local_std` for `local_mean_seed_std`: the CSV files know no other deviation."""
    return name.replace("_mean_seed_std", "_std")


def _make_tables(
    name: str, item: Item, results: Results, options: TableOptions
) -> dict[str, Table]:
    stages, report = options.stages, options.report
    if item.kind == "target":
        return {name: tables.target_table(item, results, options.stage)}
    if item.kind == "series":
        return {name: tables.series_table(item, results, stages, report)}
    made: dict[str, Table | None] = {name: tables.accuracy_table(item, results, stages, report)}
    if item.kind == "accuracy":
        made[f"{name}-equal-steps"] = tables.equal_steps_table(item, results, stages)
        made[f"{name}-differences"] = tables.difference_table(item, results, stages, report)
        made[f"{name}-significance"] = tables.significance_table(item, results, stages, report)
    return {stem: table for stem, table in made.items() if table is not None and table.rows}


def _make_frames(
    name: str, item: Item, results: Results, options: TableOptions
) -> dict[str, pd.DataFrame]:
    if item.kind == "target":
        return {name: scores.target_frame(results, options.stage)}
    frames = {name: scores.accuracy_frame(results, options.report)}
    if item.kind == "accuracy":
        frames[f"{name}-equal-steps"] = scores.equal_steps_frame(results)
        frames[f"{name}-differences"] = scores.difference_frame(results, options.report)
    return frames


def _make_figures(
    item: Item, results: Results, options: TableOptions
) -> dict[tuple[str, str], Figure]:
    """Figures by the stem of their files and their title."""
    rows = curves_by_method(results) if item.kind == "series" else results.cases
    figures: dict[tuple[str, str], Figure] = {
        ("curves", "Learning curves, against rounds"): plot_curves(rows, options.stages, "rounds"),
        ("curves-steps", "Learning curves, against local steps"): plot_curves(
            rows, options.stages, "steps"
        ),
    }
    for against in list_axes(results.groups)[len(AGAINST) :]:  # of runs with devices
        title = f"Learning curves, against {'seconds' if against == 'clock' else against}"
        figures[f"curves-{against}", title] = plot_curves(rows, options.stages, against)
    for stage in options.stages if item.kind == "accuracy" else ():
        figure = draw_case_ranks(results, stage, options.report)
        if figure is not None:
            figures[f"ranks-{stage}", f"Mean ranks over cases: stage {stage}"] = figure
    return figures


def _write_reports(
    cells: Sequence[SweepCell], places: SweepFolder, output: OutputFolder, stage: str
) -> dict[str, str]:
    """Write a report for each case; their addresses by title."""
    runs: dict[str, list[Path]] = {}
    for cell in cells:
        if places.state(cell) == "finished":
            runs.setdefault(cell.label, []).append(places.run(cell))
    addresses = {}
    for label, folders in runs.items():
        file = f"case-{make_file_name(label)}.html"
        write_report(folders, output.add(file), stage)
        addresses[label or "all runs"] = file
    return addresses


def _write_partitions(
    name: str,
    item: Item,
    cells: Sequence[SweepCell],
    output: OutputFolder,
    files: ResultFiles,
) -> list[Table]:
    """Write heat-maps and a few numbers about them; nothing is trained."""
    if files.bars:
        raise QuiverError(f"--bars: {name} has no results to draw as bars; use --figure.")
    configs = {cell.label: cell.config for cell in cells}
    partitions = {
        label: partition_data(config, load_data(config)) for label, config in configs.items()
    }
    table = tables.partition_table(item, partitions)
    counts = {label: partition.train_counts for label, partition in partitions.items()}
    figure = draw_partitions(counts)
    output.write_table(table, name)
    write_tables([table], output.add(f"{name}.csv"))
    output.write_figure(figure, f"{name}-partitions")
    for path in files.tables:
        write_tables([table], path)
    for path in files.figures:
        save_figure(figure, path)
    text = make_item_page(name, item, [table], {"Clients across, classes down": figure})
    write_result_file(output.add("report.html"), text.encode())
    return [table]


def make_item_page(
    name: str,
    item: Item,
    item_tables: Sequence[Table],
    figures: Mapping[str, Figure],
    results: Results | None = None,
    reports: Mapping[str, str] | None = None,
) -> str:
    """Everything about an item on one page; `reports` are pages about cases: title → address."""
    groups = [] if results is None else results.one_each
    sections = [
        section(f"table-{number}", table.title, data_table(table, groups))
        for number, table in enumerate(item_tables)
    ]
    sections.append(section("figures", "Figures", panels(list(figures.items()), "figure-", "one")))
    if reports:
        links = [tag("li", tag("a", title, href=address)) for title, address in reports.items()]
        words = "Costs, clients, graphs, settings and the range of μ of every method."
        sections.append(
            section("more", "Each case in full", lead_paragraph(words), tag("ul", *links))
        )
    return make_page(
        f"{name}: {item.title}",
        sections,
        heading=item.title,
        eyebrow=f"Quiver, {name}",
        notes=() if results is None else results.missing,
        footer=[Markup("Rounds are counted from 1.")],
    )


# Figures: learning curves by case or by number, ranks, and who holds which classes.


SERIES_COLORS = ("#440154", "#3B528B", "#21908C", "#5DC863", "#C7A300", "#D55E00", "#882255")
SERIES_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
"""Styles for what is counted: from dark to light, as the numbers grow."""


def curves_by_method(results: Results) -> dict[str, list[Group]]:
    """A row of panels per method, with a curve for every case."""
    rows = {}
    for method, title in results.methods.items():
        own = {group.case: group for group in results.groups if group.method == method}
        rows[title] = [
            replace(group, label=case, style=_series_style(index))
            for index, (case, group) in enumerate(own.items())
        ]
    return rows


def _series_style(index: int) -> Style:
    return Style(
        SERIES_COLORS[index % len(SERIES_COLORS)], SERIES_MARKERS[index % len(SERIES_MARKERS)]
    )


def draw_case_ranks(results: Results, stage: str, report: Report) -> Figure | None:
    """The critical-difference diagram of the methods over the cases; None where there are few."""
    ranks = rank_methods(scores.case_scores(results, stage, report))
    if ranks is None:
        return None
    titles = [method_title(method) for method in ranks.methods]
    height = 1.6 + 0.28 * len(titles)
    return make_figure(lambda axes: draw_ranks(axes, ranks, titles), width=8.0, height=height)


def draw_partitions(counts: Mapping[str, Counts]) -> Figure:
    """Heat-maps beside each other, clients across and classes down."""

    def draw(of_case: Counts, axes: Axes) -> None:
        axes.grid(False)
        draw_counts(of_case, axes, numbers=False)

    panels: list[tuple[str, Callable[[Axes], None]]] = [
        (title, partial(draw, of_case)) for title, of_case in counts.items()
    ]
    return make_panels([panels], (6.4 * len(counts), 5.2))
