"""The tables people compare methods by. The stages stand beside each other and are never mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from quiverfl.results import numbers
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.protocol import REPORT_WORDS, UNTUNED, Weighting, describe
from quiverfl.results.scores import comparison, paired_differences, rounds_to_target
from quiverfl.results.summary import STAGES, Report, higher_is_better
from quiverfl.results.table_formats import Cell, Column, Table

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
) -> Table:
    """Methods in rows; for each stage mean, worst tenth and gap to Local; then what it cost."""
    frame = comparison(groups, report, weighting)
    metric = common_metric(groups)
    gaps = any(bool(frame[f"{stage}_gap"].notna().any()) for stage in stages)
    columns, cells = [Column("method", number=False)], [_plain_cells(frame["label"])]
    for stage in stages:
        above = f"stage {stage}"
        for title, texts in _stage_columns(frame, stage, metric, gaps):
            columns.append(Column(title, above))
            cells.append(texts)
    for title, name, write in (
        ("sent in all", "bytes", numbers.size),
        ("busiest, a round", "busiest_bytes", numbers.size),
        ("local steps", "steps", numbers.whole),
        ("time", "seconds", numbers.duration),
    ):
        columns.append(Column(title, "cost"))
        cells.append(_plain_cells(frame[name].map(write)))
    title = f"{REPORT_TITLES[report]}, {numbers.unit(metric)}"
    caption = comparison_caption(groups, report, weighting, stages, gaps)
    return Table(title, tuple(columns), tuple(zip(*cells, strict=True)), caption)


def comparison_caption(
    groups: Sequence[Group],
    report: Report,
    weighting: Weighting,
    stages: Sequence[str],
    gaps: bool,
) -> str:
    """The protocol in a sentence, then what the other columns mean."""
    metric = common_metric(groups)
    parts = [describe(stages, report, weighting, _tested(groups), metric)]
    if any(len(group.runs) > 1 for group in groups):
        parts.append("± is the standard deviation over seeds.")
    parts.append("σ is over clients; worst 10 % is the mean of the worst tenth of the clients.")
    if gaps:
        parts.append("The gap is to the same client under Local, averaged over clients.")
    parts.append("Best means are bold.")
    return " ".join([*parts, *unfinished(groups)])


def unfinished(groups: Sequence[Group]) -> list[str]:
    """A sentence for every run that is not over."""
    return [
        f"{group.label} (seed {run.seed}) has not finished: {run.done_rounds} of "
        f"{'an unknown number of' if run.planned_rounds is None else run.planned_rounds} rounds."
        for group in groups
        for run in group.runs
        if not run.finished
    ]


def target_table(groups: Sequence[Group], target: float, stage: str = "local") -> Table:
    """Rounds to a target and the speed-up over the slowest: the paper's Tables 2 and 7."""
    frame, metric = rounds_to_target(groups, target, stage), common_metric(groups)
    fastest = frame["rounds"].min()
    rows = tuple(
        (
            Cell(str(row["label"])),
            Cell(_rounds(row["rounds"], row["rounds_seed_std"]), best=row["rounds"] == fastest),
            Cell(numbers.NOTHING if math.isnan(row["speedup"]) else f"{row['speedup']:.2f} ×"),
            Cell(numbers.size(row["bytes"])),
            Cell(numbers.whole(row["steps"])),
            Cell(f"{row['reached']} of {row['seeds']}"),
        )
        for row in frame.to_dict("records")
    )
    titles = ("rounds", "speed-up", "sent in all", "local steps", "seeds that reached it")
    columns = (Column("method", number=False), *(Column(title) for title in titles))
    sign = "≥" if higher_is_better(metric) else "≤"
    goal = f"{numbers.score(target, metric)}{' %' if numbers.is_share(metric) else ''}"
    caption = (
        f"Rounds until the unweighted mean over clients of the test {metric} at stage “{stage}” "
        f"is {sign} {goal} for the first time; “{numbers.NOTHING}” where a seed never got there. "
        "The speed-up is over the slowest method that did."
    )
    return Table(f"Rounds to {metric} {sign} {goal}", columns, rows, caption)


def difference_table(
    groups: Sequence[Group], reference: str, stage: str = "local", report: Report = "last"
) -> Table:
    """Each method minus a reference, paired by seed."""
    frame, metric = paired_differences(groups, reference, stage, report), common_metric(groups)
    rows = tuple(
        (
            Cell(str(row["label"])),
            Cell(numbers.signed(row["difference"], metric)),
            Cell(numbers.score(row["seed_std"], metric)),
            Cell(_interval(row["low95"], row["high95"], metric)),
            Cell(numbers.whole(row["seeds"])),
        )
        for row in frame.to_dict("records")
    )
    titles = ("difference", "std over seeds", "95 % interval", "seeds")
    columns = (Column("method", number=False), *(Column(title) for title in titles))
    caption = (
        f"Difference of the mean test {metric} over clients at stage “{stage}”, "
        f"{REPORT_WORDS[report]}, computed within each seed and then averaged over seeds; "
        "the interval is Student's for that mean."
    )
    name = str(frame["reference"].iloc[0]) if len(frame) else reference
    return Table(f"Against {name}, {numbers.unit(metric)}", columns, rows, caption)


def _stage_columns(
    frame: pd.DataFrame, stage: str, metric: str, gaps: bool
) -> list[tuple[str, list[Cell]]]:
    means = frame[f"{stage}_mean"]
    best = means.max() if higher_is_better(metric) else means.min()
    shown = [
        numbers.with_spread(mean, std, metric)
        for mean, std in zip(means, frame[f"{stage}_mean_seed_std"], strict=True)
    ]
    several = len(frame) > 1
    columns = [
        (
            "mean",
            [
                Cell(text, best=several and mean == best)
                for text, mean in zip(shown, means, strict=True)
            ],
        ),
        ("σ", _scores(frame[f"{stage}_client_std"], metric)),
        ("worst 10 %", _scores(frame[f"{stage}_worst10"], metric)),
    ]
    if gaps:
        texts = [numbers.signed(gap, metric) for gap in frame[f"{stage}_gap"]]
        columns.append(("gap to Local", [Cell(text) for text in texts]))
    return columns


def _scores(values: pd.Series, metric: str) -> list[Cell]:
    return [Cell(numbers.score(value, metric)) for value in values]


def _plain_cells(texts: pd.Series) -> list[Cell]:
    return [Cell(str(text)) for text in texts]


def _tested(groups: Sequence[Group]) -> str:
    """How models were tuned before the test; methods may differ in that."""
    tuned: dict[str, list[str]] = {}
    for group in groups:
        protocol = group.first.protocol
        if protocol is not None and protocol.finetune:
            tuned.setdefault(protocol.finetune, []).append(group.label)
    if not tuned:
        return UNTUNED
    parts = [f"{', '.join(labels)} after fine-tuning ({how})" for how, labels in tuned.items()]
    everybody = sum(len(labels) for labels in tuned.values()) == len(groups)
    return "; ".join(parts) + ("" if everybody else f"; the others {UNTUNED}")


def _rounds(mean: float, std: float) -> str:
    if math.isnan(std):
        return numbers.whole(mean)
    return f"{mean:.1f} ± {std:.1f}"


def _interval(low: float, high: float, metric: str) -> str:
    if math.isnan(low):
        return numbers.NOTHING
    return f"{numbers.signed(low, metric)} … {numbers.signed(high, metric)}"
