"""The numbers behind the paper's tables: finished runs by case, what the paper prints, frames.

Accuracies lie between 0 and 1. Frames have one row per case and method. A spread is over seeds,
and NaN with one seed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd

from quiverfl.errors import QuiverError
from quiverfl.methods import METHODS, method_title
from quiverfl.results.groups import Group, common_metric, split_by_case
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import compare_groups, cost_by_round, rounds_to_target, seed_std
from quiverfl.results.statistics import REFERENCE, case_differences
from quiverfl.results.summary import STAGES, Report, higher_is_better, mean_by_round
from quiverfl.sweeps.api import group_cells
from quiverfl.sweeps.plan import Cell, SweepFolder


@dataclass(frozen=True, eq=False)
class Results:
    """The finished runs of an item: case by case a group for every method."""

    groups: tuple[Group, ...]
    """A group's case is the label of its cells, its name the title of its method."""
    missing: tuple[str, ...]
    """A sentence for every cell without a finished run."""

    @cached_property
    def cases(self) -> dict[str, list[Group]]:
        return split_by_case(self.groups)

    @cached_property
    def methods(self) -> dict[str, str]:
        """Titles of the methods that have a result: Quiver's in their order, then your own."""
        names = sorted({group.method for group in self.groups})
        known = [name for name in METHODS if name in names]
        return {name: method_title(name) for name in dict.fromkeys([*known, *names])}

    @property
    def one_each(self) -> list[Group]:
        """A group of each method, whatever its case."""
        return list({group.method: group for group in reversed(self.groups)}.values())


def collect_results(cells: Sequence[Cell], places: SweepFolder) -> Results:
    """Read the cells that have finished; say which have not."""
    groups, missing = group_cells(cells, places)
    if not groups:
        raise QuiverError(f"nothing has finished yet. {' '.join(missing[:3])}")
    return Results(groups, missing)


# What the paper prints.


def published_accuracy(case: str, method: str) -> tuple[float, float] | None:
    """(mean, standard deviation) between 0 and 1; NaN where the paper gives no deviation."""
    score = _paper_numbers()["accuracy"].get(case, {}).get(method)
    if score is None:
        return None
    mean, std = (*score, float("nan"))[:2]
    return mean / 100, std / 100


def published_target(case: str) -> float | None:
    """The accuracy that counts as reached, between 0 and 1."""
    rounds = _paper_numbers()["rounds"].get(case)
    return None if rounds is None else rounds["target"] / 100


def published_rounds(case: str, method: str) -> float | None:
    """Rounds until the target: infinite if it was never reached, None if the paper is silent."""
    rounds = _paper_numbers()["rounds"].get(case, {}).get(method)
    if rounds is None:
        return None
    return float("inf") if rounds == "never" else float(rounds)


def published_speedup(case: str, method: str) -> float | None:
    """The speed-up over the slowest method that reached the target."""
    own = published_rounds(case, method)
    if own is None:
        return None
    rounds = [n for name, n in _paper_numbers()["rounds"][case].items() if name != "target"]
    return float(max(n for n in rounds if n != "never") / own) or None


@cache
def _paper_numbers() -> dict[str, dict[str, dict[str, Any]]]:
    file = resources.files("quiverfl.paper.reproduce").joinpath("paper_numbers.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


# Frames: the numbers of CSV files and tables.


def accuracy_frame(results: Results, report: Report) -> pd.DataFrame:
    """Both stages beside the paper's number, and what a run cost."""
    frame = compare_groups(results.groups, report)
    cases = zip(frame["case"], frame["method"], strict=True)
    printed = [published_accuracy(*case) or (np.nan, np.nan) for case in cases]
    frame["paper_mean"], frame["paper_std"] = (
        list(column) for column in zip(*printed, strict=True)
    )
    kinds = ("mean", "mean_seed_std", "worst10")
    scores = [f"{stage}_{kind}" for kind in kinds for stage in STAGES]
    costs = ["bytes", "busiest_bytes", "steps"]
    return frame[["case", "method", "seeds", *scores, "paper_mean", "paper_std", *costs]]


def difference_frame(results: Results, report: Report, reference: str = REFERENCE) -> pd.DataFrame:
    """Every method minus the reference, seed by seed; empty where it is missing or alone.

    `p_holm` is corrected for all comparisons of all cases and stages.
    """
    groups = [
        group
        for group in results.groups
        if reference in {other.method for other in results.cases[group.case]}
    ]
    frame = case_differences(groups, report, reference, min_seeds=1)
    if frame.empty:
        return frame
    frame.insert(list(frame).index("p") + 1, "p_holm", frame.pop("p_holm"))
    return frame.drop(columns=["label", "reference"])


def case_scores(results: Results, stage: str, report: Report) -> pd.DataFrame:
    """Means over seeds and clients, cases in rows and methods in columns; larger is better."""
    frame = accuracy_frame(results, report)
    means = frame.pivot(index="case", columns="method", values=f"{stage}_mean")
    return means[list(results.methods)]


def target_frame(results: Results, stage: str) -> pd.DataFrame:
    """Rounds to each case's target, ours and the paper's, with speed-ups over the slowest."""
    targets = {case: choose_target(case, own, stage) for case, own in results.cases.items()}
    frame = rounds_to_target(
        results.groups, {case: goal for case, (goal, _) in targets.items()}, stage
    )
    frame = frame.drop(columns="label")
    frame.insert(2, "target", [targets[case][0] for case in frame["case"]])
    frame.insert(3, "paper_target", [targets[case][1] for case in frame["case"]])
    for name, read in (("rounds", published_rounds), ("speedup", published_speedup)):
        rows = zip(frame["case"], frame["method"], frame["paper_target"], strict=True)
        values = [read(case, method) if printed else None for case, method, printed in rows]
        frame[f"paper_{name}"] = pd.Series(values, dtype=np.float64)
    return frame


def choose_target(case: str, groups: Sequence[Group], stage: str) -> tuple[float, bool]:
    """The paper's target if anybody reaches it, else what half of the methods reach here.

    Returns (target, whether it is the paper's). The second target is a whole percentage, and to
    reach it is to reach it with every seed.
    """
    metric = common_metric(groups)
    best = [min(_best_mean(run, stage, metric) for run in group.runs) for group in groups]
    printed = published_target(case)
    if printed is not None and max(best) >= printed:
        return printed, True
    return float(np.floor(100 * np.median(best) + 1e-9) / 100), False


def equal_steps_frame(results: Results) -> pd.DataFrame:
    """The score of every method after as many local steps as the method with the fewest made.

    The last evaluation within that budget counts; there is none where the first comes later.
    """
    rows = []
    for case, groups in results.cases.items():
        metric = common_metric(groups)
        budget = min(_count_steps(run) for group in groups for run in group.runs)
        for group in groups:
            row: dict[str, object] = {"case": case, "method": group.method}
            row["steps_allowed"] = budget
            for stage in STAGES:
                ends = [_score_within(run, stage, metric, budget) for run in group.runs]
                means = [mean for _, mean in ends]
                row[f"{stage}_rounds"] = float(np.mean([rounds for rounds, _ in ends]))
                row[f"{stage}_mean"] = float(np.mean(means))
                row[f"{stage}_mean_seed_std"] = seed_std(means)
            rows.append(row)
    return pd.DataFrame(rows)


def _score_within(run: RunResult, stage: str, metric: str, budget: float) -> tuple[float, float]:
    """(rounds, mean over clients) at the last evaluation within a budget of local steps."""
    means = mean_by_round(run.values(stage, metric))
    spent = cost_by_round(run, stage).loc[means.index]
    affordable = spent.index[spent["steps"] <= budget]
    if not len(affordable):
        return float("nan"), float("nan")
    return float(affordable[-1]) + 1, float(means.loc[affordable[-1]])


def _count_steps(run: RunResult) -> float:
    return float(run.rounds["steps"].sum())


def _best_mean(run: RunResult, stage: str, metric: str) -> float:
    means = mean_by_round(run.values(stage, metric))
    return float(means.max() if higher_is_better(metric) else means.min())
