"""The paper's tables, ours beside theirs. The stages stand beside each other, never mixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from quiverfl.data.partition import Partition
from quiverfl.methods import method_title
from quiverfl.paper.reproduce.captions import evaluation_words, setting_words, step_words
from quiverfl.paper.reproduce.catalogue import Item
from quiverfl.paper.reproduce.collect import Results
from quiverfl.paper.reproduce.paper_scores import (
    REFERENCE,
    accuracy_frame,
    case_scores,
    difference_frame,
    equal_steps_frame,
    seed_words,
    target_frame,
)
from quiverfl.results import numbers
from quiverfl.results.mean_ranks import MeanRanks, ranks
from quiverfl.results.mean_ranks import words as rank_words
from quiverfl.results.paired import LEVEL
from quiverfl.results.protocol import REPORT_WORDS, describe
from quiverfl.results.summary import Report
from quiverfl.results.table_formats import Column, Table, TableCell
from quiverfl.results.tables import (
    DIFFERENCE_WORDS,
    REPORT_TITLES,
    p_cell,
    seeds_cell,
    tested,
)

METRIC = "accuracy"
Row = dict[str, Any]

PAPER_WORDS = (
    "“paper” is what the paper prints: mean ± standard deviation of 3 seeds of the full-size "
    "experiment; it does not say at which stage."
)


@dataclass(frozen=True)
class Block:
    """A column: its titles, and what stands there by method."""

    above: str
    title: str
    cells: dict[str, TableCell]


def accuracy_table(
    item: Item, results: Results, stages: Sequence[str], report: Report = "last"
) -> Table:
    """Methods in rows; for each case the paper's number and ours at each stage."""
    frame = accuracy_frame(results, report)
    blocks = []
    for case in results.cases:
        rows = _rows(frame, case.label)
        if any(not math.isnan(row["paper_mean"]) for row in rows):
            shown = _column(rows, lambda row: _spread(row["paper_mean"], row["paper_std"]))
            blocks.append(Block(case.label, "paper", shown))
        blocks += [Block(case.label, stage, _stage_column(rows, stage)) for stage in stages]
    printed = bool(frame["paper_mean"].notna().any())
    caption = [_accuracy_caption(item, results, stages, report, printed)]
    title = f"{item.title}, in % ({REPORT_TITLES[report].lower()})"
    return _table(title, item, results.methods(), blocks, caption)


def series_table(
    item: Item, results: Results, stages: Sequence[str], report: Report = "last"
) -> Table:
    """Cases in rows, such as numbers of neighbours; for each method both stages."""
    frame = accuracy_frame(results, report)
    columns = [Column("", number=False)]
    cells: list[list[TableCell]] = [[TableCell(case.label)] for case in results.cases]
    for method in results.methods():
        rows = frame[frame["method"] == method].rename(columns={"case": "method", "method": "_"})
        records = _records(rows)
        for stage in stages:
            columns.append(Column(stage, method_title(method)))
            shown = _stage_column(records, stage)
            for case, line in zip(results.cases, cells, strict=True):
                line.append(shown.get(case.label, TableCell(numbers.NOTHING)))
    caption = _accuracy_caption(item, results, stages, report, printed=False)
    title = f"{item.title}: test {METRIC} in % ({REPORT_TITLES[report].lower()})"
    return Table(title, tuple(columns), tuple(map(tuple, cells)), caption)


def target_table(item: Item, results: Results, stage: str) -> Table:
    """Rounds to the target and speed-ups over the slowest method that reached it."""
    frame = target_frame(results, stage)
    blocks = []
    for case in results.cases:
        rows = _rows(frame, case.label)
        above = f"{case.label}, acc@{100 * rows[0]['target']:g}"
        if any(not math.isnan(row["paper_rounds"]) for row in rows):
            blocks.append(Block(above, "paper", _column(rows, _paper_rounds)))
            paced = _column(rows, lambda row: _times(row["paper_speedup"]))
            blocks.append(Block(above, "paper speed-up", paced))
        blocks.append(Block(above, "rounds", _rounds_column(rows)))
        paced = _column(rows, lambda row: _times(row["speedup"]))
        blocks.append(Block(above, "speed-up", paced))
    caption = [
        f"Rounds until the unweighted mean over clients of the test {METRIC} at stage “{stage}” "
        "first reached the target with every seed, counted from 1; “–” where one did not. "
        "Speed-ups are over the slowest method that did; the paper's follow from its rounds.",
        _target_words(frame),
        evaluation_words(results),
        "A server round trains only the clients it samples.",
        seed_words(results.all_groups()),
        setting_words(results),
        *results.missing,
    ]
    return _table(item.title, item, results.methods(), blocks, caption)


def equal_steps_table(item: Item, results: Results, stages: Sequence[str]) -> Table:
    """The same runs at equal computation: as many local steps as the method with the fewest."""
    frame = equal_steps_frame(results)
    blocks = []
    for case in results.cases:
        rows = _rows(frame, case.label)
        above = f"{case.label}, {numbers.whole(rows[0]['steps_allowed'])} steps"
        spent = _column(rows, lambda row: TableCell(numbers.whole(row[f"{stages[0]}_rounds"])))
        blocks.append(Block(above, "rounds", spent))
        blocks += [Block(above, stage, _stage_column(rows, stage)) for stage in stages]
    caption = [
        f"Test {METRIC} when a method has made at most the named number of local steps "
        "(mini-batches of all clients together), at the last evaluation before that; "
        "the budget is what the method with the fewest steps made in all its rounds; “–” where a "
        "method was first evaluated beyond it (with --equal participation server methods train "
        "as often as the others). Learning rates follow the rounds, so a method cut short has not "
        "decayed its own.",
        seed_words(results.all_groups()),
        *results.missing,
    ]
    title = f"{item.title}, at equal local steps, in %"
    return _table(title, item, results.methods(), blocks, caption)


def difference_table(
    item: Item, results: Results, stages: Sequence[str], report: Report = "last"
) -> Table | None:
    """Each method minus DFedPGP, paired by seed; None where DFedPGP was not run."""
    frame = difference_frame(results, report)
    if frame.empty:
        return None
    blocks = []
    for case in results.cases:
        for stage in stages:
            rows = _rows(frame[frame["stage"] == stage], case.label)
            if rows:
                blocks.append(Block(case.label, stage, _column(rows, _difference)))
    caption = [
        f"A method's mean test {METRIC} over clients minus {method_title(REFERENCE)}'s, "
        f"{REPORT_WORDS[report]}, taken within each seed, then averaged. Positive: ahead "
        "of it. * where chance is ruled out at 5 %, corrected for all comparisons of all cases "
        "and stages (Holm). The CSV file has Student's 95 % intervals.",
        seed_words(results.all_groups()),
        *results.missing,
    ]
    title = f"{item.title}: against {method_title(REFERENCE)}, paired by seed, in points"
    methods = [method for method in results.methods() if method != REFERENCE]
    return _table(title, item, methods, blocks, caption)


def significance_table(
    item: Item, results: Results, stages: Sequence[str], report: Report = "last"
) -> Table | None:
    """How sure the differences to DFedPGP are; None where no method has two seeds in common."""
    frame = difference_frame(results, report)
    if frame.empty or not bool(frame["p"].notna().any()):
        return None
    blocks = []
    for case in results.cases:
        for stage in stages:
            rows = _rows(frame[frame["stage"] == stage], case.label)
            above = f"{case.label}, {stage}"
            blocks += [
                Block(above, "p (Holm)", _column(rows, lambda row: p_cell(row["p_holm"]))),
                Block(above, "seeds needed", _column(rows, _seeds)),
                Block(above, "won : lost", _column(rows, _won)),
            ]
    found = [(stage, ranks(case_scores(results, stage, report))) for stage in stages]
    caption = [
        f"Against {method_title(REFERENCE)}. {DIFFERENCE_WORDS}",
        *(f"Stage {stage}: {rank_words(titled(one))}" for stage, one in found if one is not None),
    ]
    methods = [method for method in results.methods() if method != REFERENCE]
    return _table(f"{item.title}: how sure the differences are", item, methods, blocks, caption)


def titled(found: MeanRanks) -> MeanRanks:
    """Methods by the names that people read."""
    return replace(found, methods=tuple(map(method_title, found.methods)))


def _seeds(row: Row) -> TableCell:
    return seeds_cell(row["seeds_needed"])


def _won(row: Row) -> TableCell:
    return TableCell(f"{row['clients_won']} : {row['clients_lost']}")


def partition_table(item: Item, shares: Mapping[str, Partition]) -> Table:
    """What a heat-map shows, in numbers."""
    titles = ("clients", "samples", "classes", "mean", "heterogeneity")
    columns = (Column("case", number=False), *(Column(title) for title in titles))
    rows = []
    for label, share in shares.items():
        classes = (share.train_counts > 0).sum(axis=1)
        sizes = share.train_counts.sum(axis=1)
        texts = (
            str(share.clients),
            f"{sizes.min()}–{sizes.max()}",
            f"{classes.min()}–{classes.max()}",
            f"{classes.mean():.1f}",
            f"{share.heterogeneity():.3f}",
        )
        rows.append((TableCell(label), *map(TableCell, texts)))
    caption = (
        "Training samples and classes of a client. Heterogeneity is the mean total-variation "
        "distance of the clients' class shares from those of all together: 0 when all are alike."
    )
    return Table(item.title, columns, tuple(rows), caption)


def _accuracy_caption(
    item: Item, results: Results, stages: Sequence[str], report: Report, printed: bool
) -> str:
    parts = [
        describe(stages, report, "uniform", tested(results.one_each()), METRIC),
        seed_words(results.all_groups()),
        PAPER_WORDS if printed else "",
        "Best means are bold.",
        item.note,
        setting_words(results),
        step_words(results),
        *results.missing,
    ]
    return " ".join(filter(None, parts))


def _table(
    title: str,
    item: Item,
    methods: Sequence[str],
    blocks: Sequence[Block],
    caption: Sequence[str],
) -> Table:
    traits = item.traits or {}
    columns = [Column("method", number=False), *(Column(name, number=False) for name in traits)]
    columns += [Column(block.title, block.above) for block in blocks]
    rows = [
        (
            TableCell(method_title(method)),
            *(TableCell(texts.get(method, "")) for texts in traits.values()),
            *(block.cells.get(method, TableCell(numbers.NOTHING)) for block in blocks),
        )
        for method in methods
    ]
    return Table(title, tuple(columns), tuple(rows), " ".join(filter(None, caption)))


def _rows(frame: pd.DataFrame, case: str) -> list[Row]:
    return _records(frame[frame["case"] == case])


def _records(frame: pd.DataFrame) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _column(rows: Sequence[Row], show: Callable[[Row], TableCell]) -> dict[str, TableCell]:
    return {row["method"]: show(row) for row in rows}


def _stage_column(rows: Sequence[Row], stage: str) -> dict[str, TableCell]:
    means = [row[f"{stage}_mean"] for row in rows if row[f"{stage}_mean"] >= 0]
    best = max(means) if len(means) > 1 else None
    return _column(rows, lambda row: _spread(row[f"{stage}_mean"], row[f"{stage}_std"], best))


def _spread(mean: float, std: float, best: float | None = None) -> TableCell:
    return TableCell(numbers.with_spread(mean, std, METRIC), best=mean == best)


def _difference(row: Row) -> TableCell:
    text, std = numbers.signed(row["difference"], METRIC), row["seed_std"]
    sure = " *" if row["p_holm"] < LEVEL else ""
    return TableCell(text if math.isnan(std) else f"{text} ± {numbers.score(std, METRIC)}{sure}")


def _rounds_column(rows: Sequence[Row]) -> dict[str, TableCell]:
    fastest = min((row["rounds"] for row in rows if row["rounds"] > 0), default=math.nan)
    return _column(rows, lambda row: _rounds(row, fastest))


def _rounds(row: Row, fastest: float) -> TableCell:
    mean, std = row["rounds"], row["rounds_seed_std"]
    text = numbers.whole(mean) if math.isnan(std) else f"{mean:.1f} ± {std:.1f}"
    return TableCell(text, best=mean == fastest)


def _paper_rounds(row: Row) -> TableCell:
    value = row["paper_rounds"]
    return TableCell(numbers.whole(value) if math.isfinite(value) else numbers.NOTHING)


def _times(factor: float) -> TableCell:
    return TableCell(f"{factor:.2f} ×" if factor > 0 else numbers.NOTHING)  # NaN is not


def _target_words(frame: pd.DataFrame) -> str:
    if frame["paper_target"].all():
        return "The targets are the paper's."
    return (
        "Where nobody reaches the paper's target, or it has none, the target is the accuracy that "
        "half of the methods reach here at their best, in whole percent."
    )
