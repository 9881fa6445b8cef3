"""The numbers of the paper's tables as plain frames: what CSV files hold and tables are made of.

Accuracies are shares. One row per case and method; a spread is over seeds and NaN with one seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from quiverfl.paper.reproduce import published
from quiverfl.paper.reproduce.collect import CaseResult, Results
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.paired import holm, paired_differences
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import comparison, rounds_to_target, spent_by_round
from quiverfl.results.summary import STAGES, Report, higher_is_better, mean_by_round

REFERENCE = "dfedpgp"


def accuracy_frame(results: Results, report: Report) -> pd.DataFrame:
    """Both stages beside the paper's number, and what a run cost."""
    rows = []
    for case in results.cases:
        frame = comparison(case.groups, report)
        for row in frame.to_dict("records"):
            printed = published.accuracy(case.label, str(row["method"])) or (np.nan, np.nan)
            rows.append(
                {
                    "case": case.label,
                    "method": row["method"],
                    "seeds": row["seeds"],
                    **{f"{stage}_mean": row[f"{stage}_mean"] for stage in STAGES},
                    **{f"{stage}_std": row[f"{stage}_mean_seed_std"] for stage in STAGES},
                    **{f"{stage}_worst10": row[f"{stage}_worst10"] for stage in STAGES},
                    "paper_mean": printed[0],
                    "paper_std": printed[1],
                    **{name: row[name] for name in ("bytes", "busiest_bytes", "steps")},
                }
            )
    return pd.DataFrame(rows)


def difference_frame(results: Results, report: Report) -> pd.DataFrame:
    """Every method minus DFedPGP, seed by seed; empty where it is not there or is alone.

    `p_holm` is corrected for all comparisons of all cases and stages.
    """
    rows = []
    for case in (results.family or results).cases:
        if case.group(REFERENCE) is None or len(case.groups) == 1:
            continue
        for stage in STAGES:
            frame = paired_differences(case.groups, REFERENCE, stage, report)
            frame.insert(0, "case", case.label)
            frame.insert(1, "stage", stage)
            frame.insert(2, "method", [g.method for g in case.groups if g.method != REFERENCE])
            rows.append(frame.drop(columns=["label", "reference"]))
    if not rows:
        return pd.DataFrame()
    found = pd.concat(rows, ignore_index=True)
    found.insert(list(found).index("p") + 1, "p_holm", holm(found["p"].tolist()))
    shown = [case.label for case in results.cases]
    return found[found["case"].isin(shown)].reset_index(drop=True)


def case_scores(results: Results, stage: str, report: Report) -> pd.DataFrame:
    """Means over seeds and clients, cases in rows and methods in columns; larger is better."""
    frame = accuracy_frame(results.family or results, report)
    return frame.pivot(index="case", columns="method", values=f"{stage}_mean")[results.methods()]


def target_frame(results: Results, stage: str) -> pd.DataFrame:
    """Rounds to each case's target, ours and the paper's, with speed-ups over the slowest."""
    frames = []
    for case in results.cases:
        goal, printed = target_of(case, stage)
        frame = rounds_to_target(case.groups, goal, stage)
        frame.insert(0, "case", case.label)
        frame.insert(1, "method", [group.method for group in case.groups])
        frame.insert(2, "target", goal)
        frame.insert(3, "paper_target", printed)
        for name, of in (("rounds", published.rounds), ("speedup", published.speedup)):
            values = [of(case.label, method) if printed else None for method in frame["method"]]
            frame[f"paper_{name}"] = [_number(value) for value in values]
        frames.append(frame.drop(columns="label"))
    return pd.concat(frames, ignore_index=True)


def target_of(case: CaseResult, stage: str) -> tuple[float, bool]:
    """The paper's target, if anybody reaches it; else what half of the methods reach here.

    (target, whether it is the paper's). The second is a whole percentage, and to reach it is to
    reach it with every seed.
    """
    metric = common_metric(case.groups)
    best = [min(_best(run, stage, metric) for run in group.runs) for group in case.groups]
    printed = published.target(case.label)
    if printed is not None and max(best) >= printed:
        return printed, True
    return float(np.floor(100 * np.median(best) + 1e-9) / 100), False


def equal_steps_frame(results: Results) -> pd.DataFrame:
    """Where every method stands after as many local steps as the method with the fewest made.

    The last evaluation within that budget counts; there is none where the first comes later.
    """
    rows = []
    for case in results.cases:
        metric = common_metric(case.groups)
        budget = min(_steps(run) for group in case.groups for run in group.runs)
        for group in case.groups:
            row: dict[str, object] = {"case": case.label, "method": group.method}
            row["steps_allowed"] = budget
            for stage in STAGES:
                found = [_within(run, stage, metric, budget) for run in group.runs]
                means = [mean for _, mean in found]
                row[f"{stage}_rounds"] = float(np.mean([rounds for rounds, _ in found]))
                row[f"{stage}_mean"] = float(np.mean(means))
                row[f"{stage}_std"] = _std(means)
            rows.append(row)
    return pd.DataFrame(rows)


def _within(run: RunResult, stage: str, metric: str, budget: float) -> tuple[float, float]:
    means = mean_by_round(run.values(stage, metric))
    spent = spent_by_round(run, stage).loc[means.index]
    affordable = spent.index[spent["steps"] <= budget]
    if not len(affordable):
        return float("nan"), float("nan")
    return float(affordable[-1]) + 1, float(means.loc[affordable[-1]])


def _steps(run: RunResult) -> float:
    return float(run.rounds["steps"].sum())


def _best(run: RunResult, stage: str, metric: str) -> float:
    means = mean_by_round(run.values(stage, metric))
    return float(means.max() if higher_is_better(metric) else means.min())


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def seed_words(groups: Sequence[Group]) -> str:
    """How many seeds, or the range where methods differ in that, and what ± is then."""
    counts = sorted({len(group.runs) for group in groups})
    if counts == [1]:
        return "1 seed."
    several = "–".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
    return f"{several} seeds; ± is the standard deviation over seeds."
