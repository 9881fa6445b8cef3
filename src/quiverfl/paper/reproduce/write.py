"""A table or a figure of the paper, from finished cells to files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from quiverfl.experiment import load_data, share_out
from quiverfl.paper.reproduce import paper_figures, paper_scores, paper_tables
from quiverfl.paper.reproduce.catalogue import Item
from quiverfl.paper.reproduce.collect import Results, collect
from quiverfl.paper.reproduce.paper_page import page
from quiverfl.results import table_formats
from quiverfl.results.figures import write_figure
from quiverfl.results.html_report import write_report
from quiverfl.results.output_files import file_name, replace_file
from quiverfl.results.summary import STAGES, Report
from quiverfl.results.table_formats import Table
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell as SweepCell


class Written:
    """A folder whose files belong together: those of an earlier call that are not written again go.

    A list beside them says which those are; other files are not touched.
    """

    LIST = ".written.json"

    def __init__(self, folder: Path) -> None:
        self._folder, self._names = folder, set[str]()

    def place(self, name: str) -> Path:
        """Where a file of this name is to be written."""
        self._names.add(name)
        return self._folder / name

    def finish(self) -> None:
        for name in written_files(self._folder):
            if name not in self._names:
                (self._folder / name).unlink(missing_ok=True)
        content = json.dumps(sorted(self._names)).encode()
        replace_file(self._folder / self.LIST, content)


def written_files(folder: Path) -> list[str]:
    """The names of what was last written into a folder."""
    try:
        names = json.loads((folder / Written.LIST).read_text())
    except (OSError, ValueError):
        return []
    # A folder may come from somebody else: nothing outside of it is meant.
    return [name for name in map(str, names) if Path(name).name == name]


@dataclass(frozen=True)
class Shown:
    """How results are to be shown: which stage first, which rounds count."""

    stage: str = "local"
    report: Report = "last"

    @property
    def stages(self) -> tuple[str, ...]:
        return (self.stage, *(other for other in STAGES if other != self.stage))


def write(
    name: str, item: Item, cells: Sequence[SweepCell], places: Places, folder: Path, shown: Shown
) -> list[Table]:
    """Write every file of an item into a folder; its tables, for the terminal."""
    made = Written(folder)
    if item.kind == "partition":
        tables_made = _write_partitions(name, item, cells, made)
    else:
        tables_made = _write_results(name, item, cells, places, made, shown)
    made.finish()
    return tables_made


def _write_results(
    name: str, item: Item, cells: Sequence[SweepCell], places: Places, made: Written, shown: Shown
) -> list[Table]:
    results = collect(cells, places)
    shown_tables = _tables(name, item, results, shown)
    for stem, table in shown_tables.items():
        _write_table(table, made, stem)
    for stem, frame in _frames(name, item, results, shown).items():
        if len(frame):
            replace_file(made.place(f"{stem}.csv"), frame.to_csv(index=False).encode())
    drawn = _figures(item, results, shown)
    for (stem, _), figure in drawn.items():
        _write_figure(figure, made, f"{name}-{stem}")
    reports = {}
    if item.kind == "accuracy":
        reports = _write_reports(cells, places, made, shown.stage)
    titled = {title: figure for (_, title), figure in drawn.items()}
    text = page(name, item, list(shown_tables.values()), titled, results, reports)
    replace_file(made.place("report.html"), text.encode())
    return list(shown_tables.values())


def per_case(
    name: str, item: Item, cells: Sequence[SweepCell], places: Places, shown: Shown
) -> list[Table]:
    """The same tables one case at a time, for a narrow terminal."""
    results = collect(cells, places)
    made = [_tables(name, item, results.alone(case), shown) for case in results.cases]
    stems = dict.fromkeys(stem for one in made for stem in one)
    return [one[stem] for stem in stems for one in made if stem in one]


def _tables(name: str, item: Item, results: Results, shown: Shown) -> dict[str, Table]:
    if item.kind == "target":
        return {name: paper_tables.target_table(item, results, shown.stage)}
    if item.kind == "series":
        return {name: paper_tables.series_table(item, results, shown.stages, shown.report)}
    made = {name: paper_tables.accuracy_table(item, results, shown.stages, shown.report)}
    if item.kind == "accuracy":
        made[f"{name}-equal-steps"] = paper_tables.equal_steps_table(item, results, shown.stages)
        against = paper_tables.difference_table(item, results, shown.stages, shown.report)
        if against is not None and against.rows:
            made[f"{name}-differences"] = against
        sure = paper_tables.significance_table(item, results, shown.stages, shown.report)
        if sure is not None and sure.rows:
            made[f"{name}-significance"] = sure
    return made


def _frames(name: str, item: Item, results: Results, shown: Shown) -> dict[str, pd.DataFrame]:
    if item.kind == "target":
        return {name: paper_scores.target_frame(results, shown.stage)}
    made = {name: paper_scores.accuracy_frame(results, shown.report)}
    if item.kind == "accuracy":
        made[f"{name}-equal-steps"] = paper_scores.equal_steps_frame(results)
        made[f"{name}-differences"] = paper_scores.difference_frame(results, shown.report)
    return made


def _figures(item: Item, results: Results, shown: Shown) -> dict[tuple[str, str], Figure]:
    rows = (
        paper_figures.by_method(results)
        if item.kind == "series"
        else paper_figures.by_case(results)
    )
    drawn = {
        ("curves", "Learning curves, against rounds"): paper_figures.draw_panels(
            rows, shown.stages, "rounds"
        ),
        ("curves-steps", "Learning curves, against local steps"): paper_figures.draw_panels(
            rows, shown.stages, "steps"
        ),
    }
    for stage in shown.stages if item.kind == "accuracy" else ():
        figure = paper_figures.draw_case_ranks(results, stage, shown.report)
        if figure is not None:
            drawn[f"ranks-{stage}", f"Mean ranks over cases: stage {stage}"] = figure
    return drawn


def _write_reports(
    cells: Sequence[SweepCell], places: Places, made: Written, stage: str
) -> dict[str, str]:
    """One page per case with everything there is to know about its runs."""
    runs: dict[str, list[Path]] = {}
    for cell in cells:
        if places.state(cell) == "finished":
            runs.setdefault(cell.label, []).append(places.run(cell))
    addresses = {}
    for label, found in runs.items():
        file = f"case-{file_name(label)}.html"
        write_report(found, made.place(file), stage)
        addresses[label or "all runs"] = file
    return addresses


def _write_partitions(
    name: str, item: Item, cells: Sequence[SweepCell], made: Written
) -> list[Table]:
    """Heat-maps and a few numbers about them; nothing is trained."""
    one_each = {cell.label: cell.config for cell in cells}
    shares = {label: share_out(config, load_data(config)) for label, config in one_each.items()}
    table = paper_tables.partition_table(item, shares)
    figure = paper_figures.draw_partitions([(label, s.train_counts) for label, s in shares.items()])
    _write_table(table, made, name)
    frame = pd.DataFrame([[cell.text for cell in row] for row in table.rows])
    frame.columns = pd.Index([column.title for column in table.columns])
    replace_file(made.place(f"{name}.csv"), frame.to_csv(index=False).encode())
    _write_figure(figure, made, f"{name}-partitions")
    text = page(name, item, [table], {"Clients across, classes down": figure})
    replace_file(made.place("report.html"), text.encode())
    return [table]


def _write_table(table: Table, made: Written, stem: str) -> None:
    replace_file(made.place(f"{stem}.md"), table_formats.markdown(table).encode())
    replace_file(made.place(f"{stem}.tex"), table_formats.latex(table).encode())


def _write_figure(figure: Figure, made: Written, stem: str) -> None:
    for kind in ("png", "svg"):
        write_figure(figure, made.place(f"{stem}.{kind}"))
