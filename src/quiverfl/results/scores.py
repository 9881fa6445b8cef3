"""What tables are made of: scores, gaps and rounds to a target, as plain frames.

Everything here is a number (accuracies from 0 to 1, bytes, steps), one row per experiment. A spread
over seeds is that of a sample (divided by n - 1) and NaN with one seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from quiverfl.errors import QuiverError, suggest
from quiverfl.results.groups import (
    Group,
    are_comparable,
    common_metric,
    experiment_settings,
    split_by_case,
)
from quiverfl.results.palette import normalize_method
from quiverfl.results.run_files import RunResult
from quiverfl.results.summary import (
    STAGES,
    UNSEEN_STAGES,
    Report,
    Weighting,
    client_scores,
    cost_column,
    describe_spread,
    find_best_round,
    higher_is_better,
    mean_by_round,
    sum_costs,
)

COSTS = ("bytes", "busiest_bytes", "steps", "seconds")
TIMED = ("clock", "joules", "epsilon")
"""Costs that only some runs have."""


def compare_groups(
    groups: Sequence[Group], report: Report = "last", weighting: Weighting = "uniform"
) -> pd.DataFrame:
    """One row per experiment: both stages (mean, spreads, worst tenth, gap to Local) and costs."""
    metric = common_metric(groups)
    cases = split_by_case(groups)
    return pd.DataFrame(
        [_score_row(group, cases[group.case], report, weighting, metric) for group in groups]
    )


def run_scores(
    run: RunResult, stage: str, report: Report, metric: str, weighting: Weighting = "uniform"
) -> pd.Series:
    """One number per client, by client; empty where the run has nothing at this stage."""
    values = run.values(stage, metric)
    if values.empty:
        return pd.Series(dtype=np.float64)
    return client_scores(values, report, metric, _weights(run, weighting))


def rounds_to_target(
    groups: Sequence[Group], target: float | Mapping[str, float], stage: str = "local"
) -> pd.DataFrame:
    """Rounds, bytes, local steps, seconds and joules until the mean first reaches the target.

    Rounds are counted from 1. A method that does not reach the target with every seed has none.
    Speed-ups are over the slowest method of the case that does. Seconds and joules are those of
    runs with devices. Cases may have targets of their
    own, by their names.
    """
    metric = common_metric(groups)
    rows = []
    for group in groups:
        goal = target[group.case] if isinstance(target, Mapping) else target
        costs = [_first_reaching(run, goal, stage, metric) for run in group.runs]
        reached = [cost for cost in costs if cost is not None]
        row: dict[str, object] = {
            "label": group.label,
            "case": group.case,
            "method": group.method,
            "seeds": len(group.runs),
            "reached": len(reached),
        }
        for name in ("rounds", "bytes", "steps", "clock", "joules"):
            numbers = [float(cost[name]) for cost in reached]
            everybody = len(reached) == len(group.runs)
            row[name] = float(np.mean(numbers)) if everybody else np.nan
            row[f"{name}_seed_std"] = seed_std(numbers) if everybody else np.nan
        rows.append(row)
    frame = pd.DataFrame(rows)
    frame["speedup"] = frame.groupby("case")["rounds"].transform("max") / frame["rounds"]
    return frame


def find_group(groups: Sequence[Group], name: str) -> Group:
    """The experiment with this label, or the only one with this method."""
    for group in groups:
        if group.label == name:
            return group
    same = [
        g
        for g in groups
        if normalize_method(name) in (normalize_method(g.method), normalize_method(g.title))
    ]
    if len(same) == 1:
        return same[0]
    labels = [group.label for group in groups]
    reason = "could be several of these runs" if same else "is none of these runs"
    raise QuiverError(f"{name!r} {reason}: {suggest(name, labels)}")


def _score_row(
    group: Group, groups: Sequence[Group], report: Report, weighting: Weighting, metric: str
) -> dict[str, object]:
    row: dict[str, object] = {
        "label": group.label,
        "case": group.case,
        "method": group.method,
        "topology": group.first.topology,
        "clients": group.first.clients,
        "seeds": len(group.runs),
        "finished": group.finished,
        "metric": metric,
    }
    for stage in STAGES:
        figures = [_score_run(run, groups, stage, report, weighting, metric) for run in group.runs]
        for name in figures[0]:
            numbers = [figure[name] for figure in figures]
            row[f"{stage}_{name}"] = float(np.mean(numbers))
            if name in ("mean", "gap"):
                row[f"{stage}_{name}_seed_std"] = seed_std(numbers)
    for name in COSTS:
        row[name] = float(np.mean([sum_costs(run.rounds)[name] for run in group.runs]))
    for name in TIMED:
        row[name] = float(np.mean([sum_costs(r.rounds).get(name, np.nan) for r in group.runs]))
    return row


def compare_unseen(groups: Sequence[Group], metric: str) -> pd.DataFrame:
    """One row per experiment that held clients out: how these did, as they came and fitted."""
    rows = []
    for group in groups:
        row: dict[str, object] = {"label": group.label, "case": group.case}
        for stage in UNSEEN_STAGES:
            scores = [run_scores(run, stage, "last", metric) for run in group.runs]
            figures = [describe_spread(values, metric) for values in scores if len(values)]
            row["clients"] = max((len(values) for values in scores), default=0)
            means = [figure["mean"] for figure in figures]
            row[f"{stage}_mean"] = float(np.mean(means)) if means else np.nan
            row[f"{stage}_mean_seed_std"] = seed_std(means)
            worst = [figure["worst10"] for figure in figures]
            row[f"{stage}_worst10"] = float(np.mean(worst)) if worst else np.nan
        rows.append(row)
    return pd.DataFrame([row for row in rows if row["clients"]])


def _score_run(
    run: RunResult,
    groups: Sequence[Group],
    stage: str,
    report: Report,
    weighting: Weighting,
    metric: str,
) -> dict[str, float]:
    scores = run_scores(run, stage, report, metric, weighting)
    figures = describe_spread(scores, metric, _weights(run, weighting))
    return {
        "mean": figures["mean"],
        "client_std": figures["std"],
        "worst10": figures["worst10"],
        "gap": _gap(run, scores, groups, stage, report, weighting, metric),
        "rounds": _rounds_until(run, stage, report, metric, weighting),
    }


def _rounds_until(
    run: RunResult, stage: str, report: Report, metric: str, weighting: Weighting
) -> float:
    """How many rounds had been run when it was like this: to the best or to the last one."""
    values = run.values(stage, metric)
    if values.empty:
        return float("nan")
    if report == "best":
        return find_best_round(values, metric, _weights(run, weighting)) + 1
    return int(values.index[-1]) + 1


def _gap(
    run: RunResult,
    scores: pd.Series,
    groups: Sequence[Group],
    stage: str,
    report: Report,
    weighting: Weighting,
    metric: str,
) -> float:
    """Mean over clients of a client's score minus the same client's score under Local."""
    local = _local_beside(run, groups)
    if local is None or local is run:
        return float("nan")
    alone = run_scores(local, stage, report, metric, weighting)
    if len(alone) != len(scores):
        return float("nan")
    return describe_spread(scores - alone, metric, _weights(run, weighting))["mean"]


def _local_beside(run: RunResult, groups: Sequence[Group]) -> RunResult | None:
    """The Local run on the same partition with the same model and seed, if it is among these runs.

    If there are several, as in a grid, the one whose other settings are closest.
    """
    mine = experiment_settings(run)

    def differences(other: RunResult) -> int:
        theirs = experiment_settings(other)
        sections = ("training.", "run.", "model.")
        keys = {key for key in {**mine, **theirs} if key.startswith(sections)}
        return sum(mine.get(key) != theirs.get(key) for key in keys)

    beside = [
        other
        for group in groups
        for other in group.runs
        if normalize_method(other.method) == "local" and other.seed == run.seed
        if are_comparable(run, other)
    ]
    return min(beside, key=differences, default=None)


def _first_reaching(run: RunResult, target: float, stage: str, metric: str) -> pd.Series | None:
    """What was spent when the mean over clients first was at the target."""
    means = mean_by_round(run.values(stage, metric))
    good = means >= target if higher_is_better(metric) else means <= target
    if not bool(good.any()):
        return None
    spent: pd.Series = cost_by_round(run, stage).loc[means.index[int(np.argmax(good.to_numpy()))]]
    return spent


def cost_by_round(run: RunResult, stage: str) -> pd.DataFrame:
    """Rounds, bytes, local steps, seconds and joules spent when a round is evaluated, by round.

    Stage `local` comes before the round's communication, whose bytes it has not cost yet. Seconds
    and joules are NaN for a run without devices.
    """
    index = pd.Index(run.rounds["round"].astype(int), name="round")
    crossed = cost_column(run.rounds, "network_bytes").to_numpy(dtype=np.float64)
    total = crossed.cumsum()
    when = "clock_local" if stage == "local" else "clock"
    timed = {"clock": run.rounds.get(when, np.nan), "joules": run.rounds.get("joules", np.nan)}
    seconds, joules = (
        np.asarray(v, dtype=np.float64) * np.ones(len(index)) for v in timed.values()
    )
    return pd.DataFrame(
        {
            "rounds": index.to_numpy() + 1,
            "bytes": total - crossed if stage == "local" else total,
            "steps": cost_column(run.rounds, "steps").to_numpy(dtype=np.float64).cumsum(),
            "clock": seconds,
            "joules": joules.cumsum(),
        },
        index=index,
    )


def _weights(run: RunResult, weighting: Weighting) -> pd.Series | None:
    if weighting == "uniform":
        return None
    if run.is_condensed:
        raise QuiverError(
            f"{run.path} recorded hundredths of its clients and no client's own numbers: use the "
            'uniform weighting, or run it with run.history = "clients".'
        )
    if run.test_samples is None:
        raise QuiverError(
            f"{run.path} does not say how many test samples each client has (no test_counts in "
            "partition.npz): use the uniform weighting."
        )
    return run.test_samples


def seed_std(numbers: Sequence[float]) -> float:
    """The standard deviation of a sample, NaN for a single number."""
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else float("nan")
