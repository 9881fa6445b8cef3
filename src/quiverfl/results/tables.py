"""Tables that compare methods. The stages stand beside each other and are never mixed.

Every table is made by `make_table` from columns whose cells are known by the key of their row.
So the paper's tables are these tables with a column of published numbers beside our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import pandas as pd
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from quiverfl.errors import QuiverError
from quiverfl.results import formatting as numbers
from quiverfl.results.columns import (
    case_columns,
    cost_columns,
    difference_columns,
    mean_column,
    number_column,
    stage_columns,
    target_columns,
    text_column,
    timed_columns,
    to_rows,
)
from quiverfl.results.formatting import (
    FilledColumn,
    Table,
    format_rich,
    make_table,
    write_result_file,
    write_tables,
)
from quiverfl.results.groups import Group, common_metric, name_alike, split_by_case
from quiverfl.results.palette import normalize_method
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import compare_groups, compare_unseen, find_group, rounds_to_target
from quiverfl.results.statistics import (
    REFERENCE,
    case_differences,
    holm,
    paired_differences,
)
from quiverfl.results.summary import (
    REPORT_WORDS,
    STAGES,
    UNSEEN_STAGES,
    UNTUNED,
    Report,
    Weighting,
    describe_protocol,
    higher_is_better,
)
from quiverfl.support import output_folders

DIFFERENCE_WORDS = (
    "p is that of Student's paired test, corrected for all comparisons at both stages and of all "
    "cases (Holm), bold below 0.05; “seeds needed” would find such a difference at 5 % with a "
    "chance of 80 %, if its size and spread are what these seeds show; clients won and lost are "
    "those better and worse off than with the other method in the same seed, all seeds together."
)
CASE_WORDS = (
    "A case is all runs on the same data, partition and model; only these are compared with each "
    "other. The best means of a case are bold."
)
REPORT_TITLES = {
    "last": "Last round",
    "best": "Best round",
    "last10": "Mean of the last ten evaluated rounds",
}


def comparison_table(
    groups: Sequence[Group],
    report: Report = "last",
    weighting: Weighting = "uniform",
    stages: Sequence[str] = STAGES,
    cost: bool = True,
) -> Table:
    """Methods in rows; for each stage mean, worst tenth and gap to Local; then what a run cost.

    Experiments of several cases may be in the table. The best are then those of a case.
    """
    rows = to_rows(compare_groups(groups, report, weighting))
    metric = common_metric(groups)
    gaps = any(not math.isnan(row[f"{stage}_gap"]) for row in rows for stage in stages)
    columns: list[FilledColumn] = []
    for stage in stages:
        columns += stage_columns(rows, stage, metric, gaps, report)
    columns += cost_columns(rows, "cost") if cost else []
    title = f"{REPORT_TITLES[report]}, {numbers.metric_unit(metric)}"
    caption = _comparison_caption(groups, report, weighting, stages, gaps)
    return make_table(title, _row_names(groups), columns, caption)


def case_table(
    groups: Sequence[Group],
    report: Report = "last",
    weighting: Weighting = "uniform",
    stages: Sequence[str] = STAGES,
) -> Table:
    """Methods in rows and cases in columns, for each stage: the table of a paper.

    Runs of one case make a column for each stage.
    """
    units = {numbers.metric_unit(common_metric(own)) for own in split_by_case(groups).values()}
    title = ", ".join([REPORT_TITLES[report], *(units if len(units) == 1 else ())])
    protocol = describe_protocol(
        stages, report, weighting, describe_tests(groups), common_metric(groups)
    )
    several = len(split_by_case(groups)) > 1
    parts = [protocol, *_spread_words(groups), CASE_WORDS if several else "Best means are bold."]
    caption = " ".join([*parts, *describe_untested(groups), *describe_unfinished(groups)])
    names = {group.name: group.name for group in groups}
    return make_table(title, names, case_columns(groups, report, weighting, stages), caption)


def result_tables(groups: Sequence[Group], stages: Sequence[str] = STAGES) -> list[Table]:
    """The tables of a file: an overview of several cases, then each case with all its columns."""
    cases = split_by_case(groups)
    if len(cases) == 1:
        scores = [comparison_table(groups, stages=stages)]
    else:
        scores = [case_table(groups, stages=stages)]
        for case, own in cases.items():
            scores.append(add_case_to_title(comparison_table(own, stages=stages), case))
    unseen = unseen_table(groups)
    rest = [] if unseen is None else [unseen]
    return [*scores, *rest, *difference_tables(groups, stages=stages).values()]


Columns: TypeAlias = Literal["means", "all"]
"""Means and their spread over seeds in methods × cases; or every column, a table for each case."""


def write_results(
    groups: Sequence[Group],
    files: ResultFiles,
    stage: str = "local",
    report: Report = "last",
    table: Table | None = None,
) -> None:
    """Write tables and figures of experiments: what every command and `result.table()` call.

    `stage` comes first. `table` stands in the place of methods × cases, where there is another.
    """
    stages = order_stages(stage)
    for path in files.tables:
        if files.columns == "all" and path.suffix == ".csv":
            write_result_file(path, compare_groups(groups, report).to_csv(index=False).encode())
        elif files.columns == "all":
            write_tables(result_tables(groups, stages), path)
        else:
            write_tables([table or case_table(groups, report, stages=stages)], path)
    if files.figures or files.bars:
        from quiverfl.results import figures  # late: matplotlib

        for path in files.figures:
            rows = split_by_case(name_alike(groups))
            figures.save_figure(figures.plot_curves(rows, stages), path)
        for path in files.bars:
            figures.save_figure(figures.plot_bars(groups, stages, report), path)


@dataclass(frozen=True)
class ResultFiles:
    """Files of results by what they hold: tables, learning curves, bars of the last round."""

    tables: Sequence[Path] = ()
    figures: Sequence[Path] = ()
    bars: Sequence[Path] = ()
    columns: Columns = "means"

    def check(self, names: tuple[str, str, str] = ("--table", "--figure", "--bars")) -> None:
        """Refuse names of no known format and files of somebody else, before anything is run."""
        pictures = {ending: (start,) for ending, start in output_folders.PICTURES.items()}
        for name, paths in zip(names, (self.tables, self.figures, self.bars), strict=True):
            beginnings = TABLE_BEGINNINGS if paths is self.tables else pictures
            for path in paths:
                if path.suffix not in beginnings:
                    *others, last = beginnings
                    known = f"{', '.join(others)} or {last}"
                    raise QuiverError(f"{name} {path}: its name must end in {known}.")
                output_folders.refuse_other_file(path, name, *beginnings[path.suffix])


TABLE_BEGINNINGS: dict[str, tuple[bytes, ...]] = {
    ".md": (b"**",),
    ".csv": (b"method,", b"label,"),
    ".tex": (rb"\begin{table}",),
}
"""First bytes of the tables that Quiver writes, by file ending."""


def order_stages(stage: str) -> tuple[str, ...]:
    """Both stages, this one first."""
    return (stage, *(other for other in STAGES if other != stage))


def add_case_to_title(table: Table, case: str) -> Table:
    """The table with its case in the title, where there are several."""
    return replace(table, title=f"{case}: {table.title}") if case else table


def cost_table(groups: Sequence[Group]) -> Table:
    """Costs of a run, on average over seeds."""
    caption = (
        "Bytes cross the network: every message counts once, and so does what a server sends. The "
        "busiest node (the server, where there is one) is shown with its busiest round. Local "
        "steps are mini-batches of all clients together."
    )
    columns = cost_columns(to_rows(compare_groups(groups)))
    return make_table("Cost of a run", _row_names(groups), columns, caption)


def unseen_table(groups: Sequence[Group]) -> Table | None:
    """Scores of clients held out of the federation; None where no run held any out."""
    metric = common_metric(groups)
    rows = to_rows(compare_unseen(groups, metric))
    if not rows:
        return None
    score = partial(numbers.format_score, metric=metric)
    columns: list[FilledColumn] = []
    for stage, above in zip(UNSEEN_STAGES, ("as they come", "after fitting"), strict=True):
        columns.append(mean_column("mean", above, rows, stage, metric))
        columns.append(number_column("worst 10 %", above, rows, f"{stage}_worst10", score))
    columns.append(text_column("clients", "", rows, lambda row: str(row["clients"])))
    caption = (
        f"Test {metric} of clients that took no part, at their last evaluation, each on its own "
        "test data: with what it is handed, and after it fitted its own part or a copy of the "
        "whole model on its training data. Numbers are unweighted means over these clients."
    )
    title = f"Clients nobody has seen, {numbers.metric_unit(metric)}"
    names = _row_names(groups)
    return make_table(title, {row["label"]: names[row["label"]] for row in rows}, columns, caption)


def target_table(groups: Sequence[Group], target: float, stage: str = "local") -> Table:
    """Rounds to a target and the speed-up over the slowest, with what they cost."""
    rows, metric = to_rows(rounds_to_target(groups, target, stage)), common_metric(groups)
    columns = [
        *target_columns(rows),
        number_column("bytes", "", rows, "bytes", numbers.format_bytes),
        number_column("local steps", "", rows, "steps", numbers.format_count),
        *timed_columns(rows),
        text_column(
            "seeds that reached it", "", rows, lambda row: f"{row['reached']} of {row['seeds']}"
        ),
    ]
    sign = "≥" if higher_is_better(metric) else "≤"
    percent = " %" if numbers.is_percentage(metric) else ""
    goal = f"{numbers.format_score(target, metric)}{percent}"
    within = " in the same case" if len(split_by_case(groups)) > 1 else ""
    caption = (
        f"Rounds until the unweighted mean over clients of the test {metric} at stage “{stage}” "
        f"is {sign} {goal} for the first time; “{numbers.DASH}” where a seed never got there. "
        f"The speed-up is over the slowest method that did{within}."
    )
    names = {group.label: group.label for group in groups}
    return make_table(f"Rounds to {metric} {sign} {goal}", names, columns, caption)


def difference_table(
    groups: Sequence[Group],
    reference: str,
    report: Report = "last",
    stages: Sequence[str] = STAGES,
) -> Table:
    """Each method minus a reference, paired by seed. Methods of other cases are not in it."""
    against = find_group(groups, reference)
    own = [group for group in groups if group.case == against.case]
    frame = pd.concat(
        [paired_differences(own, reference, s, report).assign(stage=s) for s in STAGES],
        ignore_index=True,
    )
    frame["p_holm"] = holm(frame["p"].tolist())
    return _difference_table(own, frame, report, stages)


def difference_tables(
    groups: Sequence[Group],
    report: Report = "last",
    stages: Sequence[str] = STAGES,
    reference: str = REFERENCE,
) -> dict[str, Table]:
    """A table for every case with several seeds, by its name; p is corrected for all of them."""
    frame = case_differences(groups, report, reference)
    if frame.empty:
        return {}
    cases = split_by_case(groups)
    tables = {}
    for case, of_case in frame.groupby("case", sort=False):
        table = _difference_table(cases[str(case)], of_case, report, stages)
        tables[str(case)] = add_case_to_title(table, str(case))
    return tables


def _difference_table(
    groups: Sequence[Group], frame: pd.DataFrame, report: Report, stages: Sequence[str]
) -> Table:
    """The differences of one case, which `frame` has for both stages."""
    metric = common_metric(groups)
    names = {group.label: group.name for group in groups}
    columns: list[FilledColumn] = []
    for stage in stages:
        rows = to_rows(frame[frame["stage"] == stage])
        columns += difference_columns(rows, f"stage {stage}", metric)
    columns.append(text_column("seeds", "", rows, lambda row: str(row["seeds"])))
    caption = (
        f"Difference of the mean test {metric} over clients, {REPORT_WORDS[report]}, taken within "
        "each seed and then averaged over seeds, with its standard deviation over seeds and "
        f"Student's 95 % interval of the mean. {DIFFERENCE_WORDS}"
    )
    title = f"Against {names[frame['reference'].iloc[0]]}, {numbers.metric_unit(metric)}"
    return make_table(title, {row["label"]: names[row["label"]] for row in rows}, columns, caption)


def _row_names(groups: Sequence[Group]) -> dict[str, str]:
    """Rows by label, named within their case where there is no other."""
    alone = len(split_by_case(groups)) == 1
    return {group.label: group.name if alone else group.label for group in groups}


# Captions.


def _comparison_caption(
    groups: Sequence[Group],
    report: Report,
    weighting: Weighting,
    stages: Sequence[str],
    gaps: bool,
) -> str:
    """The protocol in a sentence, then what the other columns mean."""
    metric = common_metric(groups)
    parts = [describe_protocol(stages, report, weighting, describe_tests(groups), metric)]
    parts += _spread_words(groups)
    parts.append("σ is over clients; worst 10 % is the mean of the worst tenth of the clients.")
    if gaps:
        several = sum(normalize_method(group.method) == "local" for group in groups) > 1
        closest = " with the closest settings" if several else ""
        parts.append(f"The gap is to the same client under Local{closest}, averaged over clients.")
    if any(run.attackers for group in groups for run in group.runs):
        parts.append("Clients that were made to attack are in no mean.")
    if len(split_by_case(groups)) > 1:
        parts.append(CASE_WORDS)
    elif len(groups) > 1:
        parts.append("Best means are bold.")
    return " ".join([*parts, *describe_untested(groups), *describe_unfinished(groups)])


def describe_untested(groups: Sequence[Group]) -> list[str]:
    """A sentence where clients without test data are not in the means."""
    counts = {
        (int((run.test_counts.sum(axis=1) == 0).sum()), run.clients)
        for group in groups
        for run in group.runs
        if run.test_counts is not None
    }
    worst, clients = max(counts, default=(0, 0))
    return [f"{worst} of {clients} clients have no test data and are in no mean."] if worst else []


def describe_unfinished(groups: Sequence[Group]) -> list[str]:
    """A sentence for every run that is not over, and whether its numbers are in the table."""
    return [
        f"{group.label} (seed {run.seed}) {_describe_end(run)}: {run.done_rounds} of "
        f"{'an unknown number of' if run.planned_rounds is None else run.planned_rounds} rounds"
        f"{', and is left out' if run in group.under_way else ''}."
        for group in groups
        for run in (*group.runs, *group.under_way)
        if not run.finished
    ]


def _describe_end(run: RunResult) -> str:
    if run.diverged is None:
        return "has not finished"
    round, client = run.diverged
    return f"diverged in round {round + 1} at client {client}"


def describe_tests(groups: Sequence[Group]) -> str:
    """How models were tuned before the test; methods may differ in that."""
    tuned: dict[str, list[str]] = {}
    for group in groups:
        protocol = group.first.protocol
        if protocol is not None and protocol.finetune:
            tuned.setdefault(protocol.finetune, []).append(group.label)
    if not tuned:
        return UNTUNED
    parts = [f"{', '.join(labels)} after {how}" for how, labels in tuned.items()]
    everybody = sum(len(labels) for labels in tuned.values()) == len(groups)
    return "; ".join(parts) + ("" if everybody else f"; the others {UNTUNED}")


def _spread_words(groups: Sequence[Group]) -> list[str]:
    several = any(len(group.runs) > 1 for group in groups)
    return ["± is the standard deviation over seeds."] if several else []


# Tables in a terminal: as much beside each other as its width allows.


def print_comparison(console: Console, groups: Sequence[Group], stage: str = "local") -> None:
    """Print the comparison with the named stage first, and below it what the numbers are.

    Several cases are printed beside each other first, then each with its own tables.
    """
    stages = order_stages(stage)
    cases = split_by_case(groups)
    if len(cases) > 1:
        overview = case_table(groups, stages=stages)
        _print_in_parts(console, overview)
    for case, own in cases.items():
        if case:
            console.print(Text(f"\n{case}", style="bold"))
        _print_case(console, own, stages)
    unseen = unseen_table(groups)
    if unseen is not None:
        _print_in_parts(console, unseen)
    console.print(Text(comparison_table(groups, stages=stages).caption, style="dim"))


def _print_case(console: Console, groups: Sequence[Group], stages: Sequence[str]) -> None:
    costs = cost_table(groups)
    choices = [
        [comparison_table(groups, stages=stages)],
        [comparison_table(groups, stages=stages, cost=False), costs],
        [*(comparison_table(groups, stages=[one], cost=False) for one in stages), costs],
    ]
    for table in next((c for c in choices if _fit(console, c)), choices[-1]):
        _print_in_parts(console, table)


def print_differences(console: Console, groups: Sequence[Group], stage: str = "local") -> None:
    """Print the differences within each case and their uncertainty, if there are several seeds."""
    stages = order_stages(stage)
    together = difference_tables(groups, stages=stages)
    apart = [difference_tables(groups, stages=[one]) for one in stages]
    for case, table in together.items():
        console.print()
        for one in [table] if _fit(console, [table]) else [tables[case] for tables in apart]:
            _print_in_parts(console, one)
    for caption in dict.fromkeys(table.caption for table in together.values()):
        console.print(Text(caption, style="dim"))


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    """Print tables. A caption that several of them share is printed once, below the last.

    A table that is too wide would leave no room for names: its parts are printed below each other.
    """
    parts = [part for table in tables for part in _split_to_fit(console, table)]
    for position, part in enumerate(parts):
        console.print(format_rich(part, caption=False))
        if part.caption not in [later.caption for later in parts[position + 1 :]]:
            console.print(part.caption, style="dim", markup=False)
            console.print()


def _print_in_parts(console: Console, table: Table) -> None:
    for part in _split_to_fit(console, table):
        console.print(format_rich(part, caption=False))


def _split_to_fit(console: Console, table: Table) -> list[Table]:
    """The table, or tables of as many columns as fit the width, each with the names again."""
    if _fit(console, [table]):
        return [table]
    fitting = []
    for part in table.parts():
        begin, count = 1, len(part.columns)
        while begin < count:
            ends = range(count, begin + 1, -1)
            choices = (part.take_columns(range(begin, end)) for end in ends)
            narrowest = part.take_columns([begin])
            fitting.append(next((one for one in choices if _fit(console, [one])), narrowest))
            begin += len(fitting[-1].columns) - 1
    return fitting


def _fit(console: Console, tables: Sequence[Table]) -> bool:
    unbounded = console.options.update(width=10_000)
    rich_tables = (format_rich(table, caption=False) for table in tables)
    widths = (Measurement.get(console, unbounded, one).maximum for one in rich_tables)
    return all(width <= console.width for width in widths)
