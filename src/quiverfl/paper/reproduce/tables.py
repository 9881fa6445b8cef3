"""The paper's tables: tables of results with the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from quiverfl.data.partition import Partition
from quiverfl.methods import method_title
from quiverfl.paper.reproduce.catalogue import Item
from quiverfl.paper.reproduce.scores import (
    Results,
    case_scores,
    difference_frame,
    equal_steps_frame,
    published_accuracy,
    target_frame,
)
from quiverfl.results import formatting as numbers
from quiverfl.results.columns import (
    Row,
    case_columns,
    certainty_columns,
    mean_column,
    number_column,
    target_columns,
    text_column,
    to_rows,
)
from quiverfl.results.formatting import Column, FilledColumn, Table, TableCell, make_table
from quiverfl.results.groups import Group
from quiverfl.results.report.page import describe_partition
from quiverfl.results.scores import compare_groups
from quiverfl.results.statistics import (
    LEVEL,
    REFERENCE,
    MeanRanks,
    describe_ranks,
    rank_methods,
)
from quiverfl.results.summary import REPORT_WORDS, Report, describe_protocol
from quiverfl.results.tables import DIFFERENCE_WORDS, REPORT_TITLES, describe_tests

METRIC = "accuracy"


def accuracy_table(
    item: Item, results: Results, stages: Sequence[str], report: Report = "last"
) -> Table:
    """Methods in rows; for each case the paper's number and ours at each stage."""
    columns = case_columns(
        results.groups, report, stages=stages, above="case", printed=published_accuracy
    )
    printed = any(column.title == "paper" for column, _ in columns)
    caption = _accuracy_caption(item, results, stages, report, printed)
    title = f"{item.title}, in % ({REPORT_TITLES[report].lower()})"
    titles = {title: title for title in results.methods.values()}
    return make_table(
        title, titles, [*_trait_columns(item, results, results.methods), *columns], caption
    )


def series_table(
    item: Item, results: Results, stages: Sequence[str], report: Report = "last"
) -> Table:
    """Cases in rows, such as numbers of neighbours; for each method both stages."""
    rows = to_rows(compare_groups(results.groups, report))
    columns = []
    for method, title in results.methods.items():
        own = [row for row in rows if row["method"] == method]
        columns += [mean_column(s, title, own, s, METRIC, "case", "method") for s in stages]
    caption = _accuracy_caption(item, results, stages, report, printed=False)
    title = f"{item.title}: test {METRIC} in % ({REPORT_TITLES[report].lower()})"
    return make_table(title, {case: case for case in results.cases}, columns, caption, head="")


def target_table(item: Item, results: Results, stage: str) -> Table:
    """Rounds to the target and speed-ups over the slowest method that reached it."""
    frame = target_frame(results, stage)
    columns = []
    for case, rows in _rows_by_case(frame).items():
        printed = any(not math.isnan(row["paper_rounds"]) for row in rows)
        above = f"{case}, acc@{100 * rows[0]['target']:g}"
        columns += target_columns(rows, above, "method", printed)
    caption = [
        f"Rounds until the unweighted mean over clients of the test {METRIC} at stage “{stage}” "
        "first reached the target with every seed, counted from 1; “–” where one did not. "
        "Speed-ups are over the slowest method that did; the paper's follow from its rounds.",
        _describe_targets(frame),
        _describe_evaluations(results),
        "A server round trains only the clients it samples.",
        _describe_seeds(results.groups),
        describe_settings(results),
    ]
    return _make_table(item.title, item, results, columns, caption)


def equal_steps_table(item: Item, results: Results, stages: Sequence[str]) -> Table:
    """The same runs at equal computation: as many local steps as the method with the fewest."""
    columns: list[FilledColumn] = []
    name = f"{stages[0]}_rounds"
    for case, rows in _rows_by_case(equal_steps_frame(results)).items():
        above = f"{case}, {numbers.format_count(rows[0]['steps_allowed'])} steps"
        count = numbers.format_count
        columns.append(number_column("rounds", above, rows, name, count, "method"))
        columns += [mean_column(s, above, rows, s, METRIC, "method") for s in stages]
    caption = [
        f"Test {METRIC} when a method has made at most the named number of local steps "
        "(mini-batches of all clients together), at the last evaluation before that; "
        "the budget is what the method with the fewest steps made in all its rounds; “–” where a "
        "method was first evaluated beyond it (with --equal participation server methods train "
        "as often as the others). Learning rates follow the rounds, so a method cut short has not "
        "decayed its own.",
        _describe_seeds(results.groups),
    ]
    return _make_table(f"{item.title}, at equal local steps, in %", item, results, columns, caption)


def difference_table(
    item: Item,
    results: Results,
    stages: Sequence[str],
    report: Report = "last",
    reference: str = REFERENCE,
) -> Table | None:
    """Each method minus the reference, paired by seed; None where the reference was not run."""
    frame = difference_frame(results, report, reference)
    if frame.empty:
        return None
    columns = [
        text_column(stage, str(case), rows, _format_difference, "method")
        for case, of_case in frame.groupby("case", sort=False)
        for stage, rows in _rows_by_stage(of_case, stages)
    ]
    title = method_title(reference)
    caption = [
        f"A method's mean test {METRIC} over clients minus {title}'s, "
        f"{REPORT_WORDS[report]}, taken within each seed, then averaged. Positive: ahead "
        "of it. * where chance is ruled out at 5 %, corrected for all comparisons of all cases "
        "and stages (Holm). The CSV file has Student's 95 % intervals.",
        _describe_seeds(results.groups),
    ]
    heading = f"{item.title}: against {title}, paired by seed, in points"
    return _make_table(heading, item, results, columns, caption, reference)


def significance_table(
    item: Item,
    results: Results,
    stages: Sequence[str],
    report: Report = "last",
    reference: str = REFERENCE,
) -> Table | None:
    """How sure the differences are; None where no method has two seeds in common."""
    frame = difference_frame(results, report, reference)
    if frame.empty or not bool(frame["p"].notna().any()):
        return None
    columns = []
    for case, of_case in frame.groupby("case", sort=False):
        for stage, rows in _rows_by_stage(of_case, stages):
            columns += certainty_columns(rows, f"{case}, {stage}", "method")
    ranks = [(stage, rank_methods(case_scores(results, stage, report))) for stage in stages]
    caption = [
        f"Against {method_title(reference)}. {DIFFERENCE_WORDS}",
        *(
            f"Stage {stage}: {describe_ranks(title_methods(one))}"
            for stage, one in ranks
            if one is not None
        ),
    ]
    heading = f"{item.title}: how sure the differences are"
    return _make_table(heading, item, replace(results, missing=()), columns, caption, reference)


def title_methods(ranks: MeanRanks) -> MeanRanks:
    """The ranks with methods by the names that people read."""
    return replace(ranks, methods=tuple(map(method_title, ranks.methods)))


def partition_table(item: Item, partitions: Mapping[str, Partition]) -> Table:
    """What a heat-map shows, in numbers."""
    titles = ("clients", "samples", "classes", "mean", "heterogeneity")
    cells: list[dict[str, TableCell]] = [{} for _ in titles]
    for label, partition in partitions.items():
        classes = (partition.train_counts > 0).sum(axis=1)
        sizes = partition.train_counts.sum(axis=1)
        texts = (
            str(partition.clients),
            f"{sizes.min()}–{sizes.max()}",
            f"{classes.min()}–{classes.max()}",
            f"{classes.mean():.1f}",
            f"{partition.heterogeneity():.3f}",
        )
        for column, text in zip(cells, texts, strict=True):
            column[label] = TableCell(text)
    caption = (
        "Training samples and classes of a client. Heterogeneity is the mean total-variation "
        "distance of the clients' class proportions from the overall ones: 0 when all are alike."
    )
    columns = list(zip(map(Column, titles), cells, strict=True))
    return make_table(item.title, {label: label for label in partitions}, columns, caption, "case")


def _trait_columns(item: Item, results: Results, keys: Mapping[str, str]) -> list[FilledColumn]:
    """Columns of the item's traits; `keys` has the key of each method's row."""
    return [
        (
            Column(name, number=False),
            {keys[method]: TableCell(texts.get(method, "")) for method in results.methods},
        )
        for name, texts in (item.traits or {}).items()
    ]


def _make_table(
    title: str,
    item: Item,
    results: Results,
    columns: Sequence[FilledColumn],
    caption: Sequence[str],
    reference: str = "",
) -> Table:
    """Methods in rows, but for the reference; the caption ends with what is missing."""
    rows = {name: title for name, title in results.methods.items() if name != reference}
    traits = _trait_columns(item, results, {method: method for method in results.methods})
    parts = filter(None, [*caption, *results.missing])
    return make_table(title, rows, [*traits, *columns], " ".join(parts))


def _rows_by_case(frame: pd.DataFrame) -> dict[str, list[Row]]:
    return {str(case): to_rows(rows) for case, rows in frame.groupby("case", sort=False)}


def _rows_by_stage(frame: pd.DataFrame, stages: Sequence[str]) -> list[tuple[str, list[Row]]]:
    return [(stage, to_rows(frame[frame["stage"] == stage])) for stage in stages]


def _format_difference(row: Row) -> str:
    text, std = numbers.format_signed(row["difference"], METRIC), row["seed_std"]
    star = " *" if row["p_holm"] < LEVEL else ""
    return text if math.isnan(std) else f"{text} ± {numbers.format_score(std, METRIC)}{star}"


# Captions: how the runs of a table were made, in sentences.


TRAINING_WORDS = {
    "lr": "lr",
    "personal_lr": "personal lr",
    "lr_decay": "decay",
    "momentum": "momentum",
    "weight_decay": "weight decay",
    "batch_size": "batch",
    "clip_norm": "clipping at norm",
}
GRAPH_WORDS = {
    "neighbors": "neighbors",
    "sampled": "sampled",
    "participation": "participation",
    "link_failure": "link failure",
}


def _accuracy_caption(
    item: Item, results: Results, stages: Sequence[str], report: Report, printed: bool
) -> str:
    parts = [
        describe_protocol(stages, report, "uniform", describe_tests(results.one_each), METRIC),
        _describe_seeds(results.groups),
        item.printed if printed else "",
        "Best means are bold.",
        item.note,
        describe_settings(results),
        _describe_steps(results),
        *results.missing,
    ]
    return " ".join(filter(None, parts))


def _describe_targets(frame: pd.DataFrame) -> str:
    if frame["paper_target"].all():
        return "The targets are the paper's."
    return (
        "Where nobody reaches the paper's target, or it has none, the target is the accuracy that "
        "half of the methods reach here at their best, in whole percent."
    )


def _describe_seeds(groups: Sequence[Group]) -> str:
    """How many seeds, or the range where methods differ in that, and what ± is then."""
    counts = sorted({len(group.runs) for group in groups})
    if counts == [1]:
        return "1 seed."
    several = "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return f"{several} seeds; ± is the standard deviation over seeds."


def describe_settings(results: Results) -> str:
    """Clients, samples, model, rounds, optimizer and graphs."""
    groups = results.groups
    samples = [
        str(round(float(group.first.train_counts.sum(axis=1).mean())))
        for group in groups
        if group.first.train_counts is not None
    ]
    augment = [str(_setting(group, "data", "augment") or "none") for group in groups]
    parts = [
        _list_values([describe_partition(group.first) for group in groups]),
        f"{_format_range([group.first.clients for group in groups])} clients",
        f"about {_list_values(samples)} training samples each" if samples else "",
        _list_values([str(_setting(group, "model", "name")) for group in groups]),
        f"{_format_range([group.first.planned_rounds or 0 for group in groups])} rounds",
        _describe_epochs(groups),
        *(_describe_training(groups, key, word) for key, word in TRAINING_WORDS.items()),
        "" if set(augment) == {"none"} else f"augmentation {_list_values(augment)}",
    ]
    return f"{', '.join(filter(None, parts))}. {_describe_graphs(groups)}"


def _describe_epochs(groups: Sequence[Group]) -> str:
    epochs = [_setting(group, "run", "epoch_groups") for group in groups]
    return _list_values([f"{', '.join(map(str, some))} local epochs" for some in epochs if some])


def _describe_steps(results: Results) -> str:
    """How much each method trained in all: equal rounds are not equal computation."""
    steps = [
        (group.method, numbers.format_count(float(group.first.rounds["steps"].sum())))
        for group in results.groups
    ]
    if len({count for _, count in steps}) == 1:
        return ""
    return f"Local steps of a run, all clients together: {list_by_method(steps)}."


def _describe_evaluations(results: Results) -> str:
    """How late a target may be seen."""
    every = [
        (group.method, str(_setting(group, "run", "evaluate_every") or 1))
        for group in results.groups
    ]
    if {count for _, count in every} == {"1"}:
        return ""
    return (
        f"Evaluated every {list_by_method(every)} rounds: a target counts as reached at the next "
        "evaluation."
    )


def _describe_training(groups: Sequence[Group], key: str, word: str) -> str:
    values = [(group.method, _format_value(_setting(group, "training", key))) for group in groups]
    if {value for _, value in values} == {"None"}:
        return "no clipping" if key == "clip_norm" else ""
    absent = "none" if key == "clip_norm" else "as lr"
    return f"{word} {list_by_method(values).replace('None', absent)}"


def list_by_method(values: Sequence[tuple[str, str]]) -> str:
    """The usual value, and in brackets who has another: “0.02 (0.01 for Local, OSGP)”."""
    methods: dict[str, list[str]] = {}
    for method, value in values:
        titles = methods.setdefault(value, [])
        if method_title(method) not in titles:
            titles.append(method_title(method))
    if sum(map(len, methods.values())) > len({method for method, _ in values}):
        return " / ".join(methods)  # a method has several: they differ between cases, too
    usual = max(methods, key=lambda value: len(methods[value]))
    others = [f"{value} for {', '.join(m)}" for value, m in methods.items() if value != usual]
    return f"{usual} ({'; '.join(others)})" if others else usual


def _describe_graphs(groups: Sequence[Group]) -> str:
    """Which methods ran on which topology; what its theory does not cover is said."""
    kinds: dict[str, list[str]] = {}
    for group in groups:
        options = group.first.topology_options
        listed = [f"{words} {options[key]}" for key, words in GRAPH_WORDS.items() if key in options]
        kind = f"{group.first.topology} ({', '.join(listed)})" if listed else group.first.topology
        kinds.setdefault(kind, []).append(method_title(group.method))
    methods = "; ".join(f"{', '.join(dict.fromkeys(n))} on {k}" for k, n in kinds.items())
    pull = " On random_pull μ stays 1 and the paper's theorem does not apply."
    return f"{methods}.{pull if any(k.startswith('random_pull') for k in kinds) else ''}"


def _setting(group: Group, section: str, key: str) -> Any:
    return group.first.config.get(section, {}).get(key)


def _format_value(value: Any) -> str:
    """A decay that was spread over more rounds has more digits than anybody reads."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _format_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def _list_values(values: Sequence[str]) -> str:
    return " / ".join(dict.fromkeys(values))
