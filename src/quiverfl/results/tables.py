"""The tables people compare methods by. The stages stand beside each other and are never mixed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from quiverfl.results import numbers
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.paired import LEVEL, holm, paired_differences
from quiverfl.results.palette import plain
from quiverfl.results.protocol import REPORT_WORDS, UNTUNED, Weighting, describe
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import comparison, group_called, rounds_to_target
from quiverfl.results.summary import STAGES, Report, higher_is_better
from quiverfl.results.table_formats import Column, Table, TableCell

DIFFERENCE_WORDS = (
    "p is that of Student's paired test, corrected for all comparisons at both stages and of all "
    "cases (Holm), bold below 0.05; “seeds needed” would find such a difference at 5 % with a "
    "chance of 80 %, if its size and spread are what these seeds show; clients won and lost are "
    "those better and worse off than with the other method in the same seed, all seeds together."
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
    """Methods in rows; for each stage mean, worst tenth and gap to Local; then what it cost."""
    frame = comparison(groups, report, weighting)
    metric = common_metric(groups)
    gaps = any(bool(frame[f"{stage}_gap"].notna().any()) for stage in stages)
    columns, cells = [Column("method", number=False)], [_plain_cells(frame["label"])]
    for stage in stages:
        above = f"stage {stage}"
        for title, texts in _stage_columns(frame, stage, metric, gaps, report):
            columns.append(Column(title, above))
            cells.append(texts)
    for title, texts in _cost_columns(frame) if cost else []:
        columns.append(Column(title, "cost"))
        cells.append(texts)
    title = f"{REPORT_TITLES[report]}, {numbers.unit(metric)}"
    caption = comparison_caption(groups, report, weighting, stages, gaps)
    return Table(title, tuple(columns), tuple(zip(*cells, strict=True)), caption)


def cost_table(groups: Sequence[Group]) -> Table:
    """What a run took, on average over seeds."""
    frame = comparison(groups)
    titles, cells = zip(*_cost_columns(frame), strict=True)
    columns = (Column("method", number=False), *(Column(title) for title in titles))
    rows = tuple(zip(_plain_cells(frame["label"]), *cells, strict=True))
    caption = (
        "Bytes cross the network: every message counts once, and so does what a server sends. The "
        "busiest node (the server, where there is one) is shown with its busiest round. Local "
        "steps are mini-batches of all clients together."
    )
    return Table("Cost of a run", columns, rows, caption)


def comparison_caption(
    groups: Sequence[Group],
    report: Report,
    weighting: Weighting,
    stages: Sequence[str],
    gaps: bool,
) -> str:
    """The protocol in a sentence, then what the other columns mean."""
    metric = common_metric(groups)
    parts = [describe(stages, report, weighting, tested(groups), metric)]
    if any(len(group.runs) > 1 for group in groups):
        parts.append("± is the standard deviation over seeds.")
    parts.append("σ is over clients; worst 10 % is the mean of the worst tenth of the clients.")
    if gaps:
        several = sum(plain(group.method) == "local" for group in groups) > 1
        closest = " with the closest settings" if several else ""
        parts.append(f"The gap is to the same client under Local{closest}, averaged over clients.")
    if any(run.attackers for group in groups for run in group.runs):
        parts.append("Clients that were made to attack are in no mean.")
    if len(groups) > 1:
        parts.append("Best means are bold.")
    return " ".join([*parts, *untested(groups), *unfinished(groups)])


def untested(groups: Sequence[Group]) -> list[str]:
    """A sentence where clients without test data are not in the means."""
    counts = {
        (int((run.test_counts.sum(axis=1) == 0).sum()), run.clients)
        for group in groups
        for run in group.runs
        if run.test_counts is not None
    }
    worst, clients = max(counts, default=(0, 0))
    return [f"{worst} of {clients} clients have no test data and are in no mean."] if worst else []


def unfinished(groups: Sequence[Group]) -> list[str]:
    """A sentence for every run that is not over, and whether its numbers are in the table."""
    return [
        f"{group.label} (seed {run.seed}) {_ended(run)}: {run.done_rounds} of "
        f"{'an unknown number of' if run.planned_rounds is None else run.planned_rounds} rounds"
        f"{', and is left out' if run in group.under_way else ''}."
        for group in groups
        for run in (*group.runs, *group.under_way)
        if not run.finished
    ]


def _ended(run: RunResult) -> str:
    if run.diverged is None:
        return "has not finished"
    round, client = run.diverged
    return f"diverged in round {round + 1} at client {client}"


def target_table(groups: Sequence[Group], target: float, stage: str = "local") -> Table:
    """Rounds to a target and the speed-up over the slowest: the paper's Tables 2 and 7."""
    frame, metric = rounds_to_target(groups, target, stage), common_metric(groups)
    fastest = frame["rounds"].min()
    rows = tuple(
        (
            TableCell(str(row["label"])),
            TableCell(
                _rounds(row["rounds"], row["rounds_seed_std"]), best=row["rounds"] == fastest
            ),
            TableCell(numbers.NOTHING if math.isnan(row["speedup"]) else f"{row['speedup']:.2f} ×"),
            TableCell(numbers.size(row["bytes"])),
            TableCell(numbers.whole(row["steps"])),
            TableCell(f"{row['reached']} of {row['seeds']}"),
        )
        for row in frame.to_dict("records")
    )
    titles = ("rounds", "speed-up", "bytes", "local steps", "seeds that reached it")
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
    groups: Sequence[Group],
    reference: str,
    report: Report = "last",
    stages: Sequence[str] = STAGES,
) -> Table:
    """Each method minus a reference, paired by seed."""
    metric = common_metric(groups)
    frames = {stage: paired_differences(groups, reference, stage, report) for stage in STAGES}
    first = frames[stages[0]]
    corrected = holm([p for frame in frames.values() for p in frame["p"]])
    for place, frame in enumerate(frames.values()):
        frame["p_holm"] = corrected[place * len(first) : (place + 1) * len(first)]
    columns, cells = [Column("method", number=False)], [_plain_cells(first["label"])]
    for stage in stages:
        for title, texts in _difference_columns(frames[stage], metric):
            columns.append(Column(title, f"stage {stage}"))
            cells.append(texts)
    columns.append(Column("seeds"))
    cells.append(_plain_cells(first["seeds"]))
    caption = (
        f"Difference of the mean test {metric} over clients, {REPORT_WORDS[report]}, taken within "
        "each seed and then averaged over seeds, with its standard deviation over seeds and "
        f"Student's 95 % interval of the mean. {DIFFERENCE_WORDS}"
    )
    title = f"Against {group_called(groups, reference).label}, {numbers.unit(metric)}"
    return Table(title, tuple(columns), tuple(zip(*cells, strict=True)), caption)


def reference_of(groups: Sequence[Group]) -> tuple[Sequence[Group], str] | None:
    """The experiments with several seeds and the one to compare with; None where that is nobody."""
    several = [group for group in groups if len(group.runs) > 1]
    if len(several) < 2:
        return None
    reference = next((g for g in several if plain(g.method) == "dfedpgp"), several[-1])
    return several, reference.label


def p_cell(p: float) -> TableCell:
    """Bold where chance is ruled out."""
    text = numbers.NOTHING if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
    return TableCell(text, best=p < LEVEL)


def seeds_cell(needed: float) -> TableCell:
    if math.isinf(needed):
        return TableCell("> 1,000")
    return TableCell(numbers.whole(needed))


def _difference_columns(frame: pd.DataFrame, metric: str) -> list[tuple[str, list[TableCell]]]:
    reach = zip(frame["low95"], frame["high95"], strict=True)
    return [
        ("difference", [TableCell(numbers.signed(value, metric)) for value in frame["difference"]]),
        ("std", _scores(frame["seed_std"], metric)),
        ("95 % interval", [TableCell(_interval(low, high, metric)) for low, high in reach]),
        ("p (Holm)", [p_cell(p) for p in frame["p_holm"]]),
        ("seeds needed", [seeds_cell(needed) for needed in frame["seeds_needed"]]),
        (
            "clients won : lost",
            [
                TableCell(f"{won} : {lost}")
                for won, lost in zip(frame["clients_won"], frame["clients_lost"], strict=True)
            ],
        ),
    ]


def _stage_columns(
    frame: pd.DataFrame, stage: str, metric: str, gaps: bool, report: Report
) -> list[tuple[str, list[TableCell]]]:
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
                TableCell(text, best=several and mean == best)
                for text, mean in zip(shown, means, strict=True)
            ],
        ),
        ("σ", _scores(frame[f"{stage}_client_std"], metric)),
        ("worst 10 %", _scores(frame[f"{stage}_worst10"], metric)),
    ]
    if gaps:
        texts = [numbers.signed(gap, metric) for gap in frame[f"{stage}_gap"]]
        columns.append(("gap to Local", [TableCell(text) for text in texts]))
    if report == "best":
        columns.append(("rounds", _plain_cells(frame[f"{stage}_rounds"].map(numbers.whole))))
    return columns


def _cost_columns(frame: pd.DataFrame) -> list[tuple[str, list[TableCell]]]:
    spent = [numbers.NOTHING if math.isnan(value) else f"{value:.3g}" for value in frame["epsilon"]]
    private = [("ε", [TableCell(text) for text in spent])] if frame["epsilon"].notna().any() else []
    return [
        *private,
        ("bytes", _plain_cells(frame["bytes"].map(numbers.size))),
        ("busiest, a round", _plain_cells(frame["busiest_bytes"].map(numbers.size))),
        ("local steps", _plain_cells(frame["steps"].map(numbers.whole))),
        ("time", _plain_cells(frame["seconds"].map(numbers.duration))),
    ]


def _scores(values: pd.Series, metric: str) -> list[TableCell]:
    return [TableCell(numbers.score(value, metric)) for value in values]


def _plain_cells(texts: pd.Series) -> list[TableCell]:
    return [TableCell(str(text)) for text in texts]


def tested(groups: Sequence[Group]) -> str:
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


def _rounds(mean: float, std: float) -> str:
    if math.isnan(std):
        return numbers.whole(mean)
    return f"{mean:.1f} ± {std:.1f}"


def _interval(low: float, high: float, metric: str) -> str:
    if math.isnan(low):
        return numbers.NOTHING
    return f"{numbers.signed(low, metric)} … {numbers.signed(high, metric)}"
