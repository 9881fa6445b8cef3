"""The columns of tables: what stands in them, by the key of the row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import pandas as pd

from quiverfl.results import formatting as numbers
from quiverfl.results.formatting import Column, FilledColumn, TableCell
from quiverfl.results.groups import Group, common_metric, split_by_case
from quiverfl.results.scores import compare_groups
from quiverfl.results.statistics import LEVEL
from quiverfl.results.summary import STAGES, Report, Weighting, higher_is_better

Row: TypeAlias = dict[str, Any]
Printed: TypeAlias = Callable[[str, str], tuple[float, float] | None]
"""Published (mean, standard deviation) of a case and a method, between 0 and 1; None if there is
none. The deviation is NaN where only the mean is published."""


def to_rows(frame: pd.DataFrame) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def fill_column(
    title: str, above: str, rows: Sequence[Row], write: Callable[[Row], TableCell], key: str
) -> FilledColumn:
    """A column with a cell for each of the rows; `key` names the entry that identifies a row."""
    return Column(title, above), {row[key]: write(row) for row in rows}


def text_column(
    title: str, above: str, rows: Sequence[Row], write: Callable[[Row], str], key: str = "label"
) -> FilledColumn:
    return fill_column(title, above, rows, lambda row: TableCell(write(row)), key)


def number_column(
    title: str,
    above: str,
    rows: Sequence[Row],
    name: str,
    write: Callable[[float], str],
    key: str = "label",
) -> FilledColumn:
    """A column of the numbers called `name` in the rows."""
    return fill_column(title, above, rows, lambda row: TableCell(write(row[name])), key)


def mean_column(
    title: str,
    above: str,
    rows: Sequence[Row],
    stage: str,
    metric: str,
    key: str = "label",
    among: str = "case",
) -> FilledColumn:
    """Means with their spread over seeds. The best of several is bold, among rows of one case."""
    name, choose = f"{stage}_mean", max if higher_is_better(metric) else min
    values: dict[str, list[float]] = {}
    for row in rows:
        if not math.isnan(row[name]):
            values.setdefault(row[among], []).append(row[name])
    best = {place: choose(several) for place, several in values.items() if len(several) > 1}

    def write(row: Row) -> TableCell:
        text = numbers.format_with_spread(row[name], row[f"{name}_seed_std"], metric)
        value = None if math.isnan(row[name]) else row[name]
        best_of = math.isclose(row[name], best.get(row[among], math.nan), rel_tol=1e-12)
        return TableCell(text, best_of, value, row[f"{name}_seed_std"])

    return fill_column(title, above, rows, write, key)


def case_columns(
    groups: Sequence[Group],
    report: Report = "last",
    weighting: Weighting = "uniform",
    stages: Sequence[str] = STAGES,
    above: Literal["stage", "case"] = "stage",
    printed: Printed | None = None,
) -> list[FilledColumn]:
    """A column for every case and stage, by the groups' names: the body of a paper's table.

    `above` says which of the two is the upper heading; a single case without a name has none.
    `printed` gives every case for which it has numbers a column “paper” before ours.
    """
    cases = split_by_case(groups)
    metrics = {case: common_metric(members) for case, members in cases.items()}
    several_units = len(set(map(numbers.metric_unit, metrics.values()))) > 1
    rows = {case: _score_rows(members, report, weighting) for case, members in cases.items()}
    columns = {}
    for case, metric in metrics.items():
        title = f"{case}, {numbers.metric_unit(metric)}" if several_units else case
        for stage in stages:
            headings = (title, f"stage {stage}") if above == "stage" else (stage, title)
            if not case and above == "stage":
                headings = (f"stage {stage}", "")
            columns[case, stage] = mean_column(*headings, rows[case], stage, metric, "name")
    if above == "stage":
        return [columns[case, stage] for stage in stages for case in cases]
    listed = []
    for case, metric in metrics.items():
        listed += [] if printed is None else _printed_column(case, rows[case], metric, printed)
        listed += [columns[case, stage] for stage in stages]
    return listed


def _score_rows(groups: Sequence[Group], report: Report, weighting: Weighting) -> list[Row]:
    rows = to_rows(compare_groups(groups, report, weighting))
    return [{**row, "name": group.name} for row, group in zip(rows, groups, strict=True)]


def _printed_column(
    case: str, rows: Sequence[Row], metric: str, printed: Printed
) -> list[FilledColumn]:
    known = {row["name"]: printed(case, row["method"]) for row in rows}
    cells = {
        name: TableCell(numbers.format_with_spread(*score, metric))
        for name, score in known.items()
        if score is not None
    }
    return [(Column("paper", case), cells)] if cells else []


def stage_columns(
    rows: Sequence[Row], stage: str, metric: str, gaps: bool, report: Report
) -> list[FilledColumn]:
    above = f"stage {stage}"
    score = partial(numbers.format_score, metric=metric)
    columns = [
        mean_column("mean", above, rows, stage, metric),
        number_column("σ", above, rows, f"{stage}_client_std", score),
        number_column("worst 10 %", above, rows, f"{stage}_worst10", score),
    ]
    if gaps:
        signed = partial(numbers.format_signed, metric=metric)
        columns.append(number_column("gap to Local", above, rows, f"{stage}_gap", signed))
    if report == "best":
        count = numbers.format_count
        columns.append(number_column("rounds", above, rows, f"{stage}_rounds", count))
    return columns


def cost_columns(rows: Sequence[Row], above: str = "") -> list[FilledColumn]:
    columns = [
        number_column("bytes", above, rows, "bytes", numbers.format_bytes),
        number_column("busiest, a round", above, rows, "busiest_bytes", numbers.format_bytes),
        number_column("local steps", above, rows, "steps", numbers.format_count),
        number_column("time", above, rows, "seconds", numbers.format_duration),
        *timed_columns(rows, above),
    ]
    if all(math.isnan(row["epsilon"]) for row in rows):
        return columns
    return [number_column("ε", above, rows, "epsilon", _format_epsilon), *columns]


def timed_columns(rows: Sequence[Row], above: str = "") -> list[FilledColumn]:
    """Seconds and joules on the runs' devices, where any run has devices."""
    if all(math.isnan(row["clock"]) for row in rows):
        return []
    return [
        number_column("on the clock", above, rows, "clock", numbers.format_duration),
        number_column("energy", above, rows, "joules", numbers.format_energy),
    ]


def _format_epsilon(epsilon: float) -> str:
    return numbers.DASH if math.isnan(epsilon) else f"{epsilon:.3g}"


def target_columns(
    rows: Sequence[Row], above: str = "", key: str = "label", printed: bool = False
) -> list[FilledColumn]:
    """Rounds to a target and speed-ups of `rounds_to_target`, after the published ones if any."""
    columns = []
    if printed:
        columns = [
            number_column("paper", above, rows, "paper_rounds", _format_rounds, key),
            number_column("paper speed-up", above, rows, "paper_speedup", _format_factor, key),
        ]
    rounds = [(row["case"], row["rounds"]) for row in rows if not math.isnan(row["rounds"])]

    def write(row: Row) -> TableCell:
        fastest = min((count for case, count in rounds if case == row["case"]), default=math.nan)
        text = _format_rounds(row["rounds"], row["rounds_seed_std"])
        return TableCell(text, best=row["rounds"] == fastest)

    columns.append(fill_column("rounds", above, rows, write, key))
    columns.append(number_column("speed-up", above, rows, "speedup", _format_factor, key))
    return columns


def _format_rounds(mean: float, std: float = math.nan) -> str:
    if not math.isfinite(mean):
        return numbers.DASH
    return numbers.format_count(mean) if math.isnan(std) else f"{mean:.1f} ± {std:.1f}"


def _format_factor(factor: float) -> str:
    return numbers.DASH if math.isnan(factor) else f"{factor:.2f} ×"


def certainty_columns(
    rows: Sequence[Row], above: str, key: str = "label", pairs: str = "won : lost"
) -> list[FilledColumn]:
    """How sure the differences of `case_differences` are."""
    return [
        fill_column("p (Holm)", above, rows, lambda row: _p_cell(row["p_holm"]), key),
        number_column("seeds needed", above, rows, "seeds_needed", _format_seeds, key),
        text_column(
            pairs, above, rows, lambda row: f"{row['clients_won']} : {row['clients_lost']}", key
        ),
    ]


def _p_cell(p: float) -> TableCell:
    """Bold where chance is ruled out."""
    text = numbers.DASH if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return TableCell(text, best=p < LEVEL)


def _format_seeds(count: float) -> str:
    return "> 1,000" if math.isinf(count) else numbers.format_count(count)


def difference_columns(rows: Sequence[Row], above: str, metric: str) -> list[FilledColumn]:
    signed = partial(numbers.format_signed, metric=metric)
    score = partial(numbers.format_score, metric=metric)

    def interval(row: Row) -> str:
        low, high = row["low95"], row["high95"]
        return numbers.DASH if math.isnan(low) else f"{signed(low)} … {signed(high)}"

    return [
        number_column("difference", above, rows, "difference", signed),
        number_column("std", above, rows, "seed_std", score),
        text_column("95 % interval", above, rows, interval),
        *certainty_columns(rows, above, pairs="clients won : lost"),
    ]
