"""Differences between experiments, paired by seed: how sure they are, and what would make them so.

Seeds share data and start, so the difference within a seed is far less noisy than the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes
from scipy import special, stats

from quiverfl.results.groups import Group, are_comparable, common_metric, split_by_case
from quiverfl.results.palette import normalize_method
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import find_group, run_scores, seed_std
from quiverfl.results.summary import STAGES, Report, describe_spread, higher_is_better

REFERENCE = "dfedpgp"
"""The method that others are compared with where nobody names another: the subject of the paper.
The last method takes its place where it was not run."""
LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 1000


def paired_differences(
    groups: Sequence[Group], reference: str, stage: str = "local", report: Report = "last"
) -> pd.DataFrame:
    """Every experiment minus the reference: mean, spread, 95 % interval, p and what more it takes.

    Runs are paired that have the same seed, data, partition and model; others never.

    `p` is that of Student's paired test, not corrected (see `holm`). `seeds_needed` would find a
    difference of this size with a chance of 80 %. Wins, losses and ties are of clients, those of
    all seeds together.
    """
    against = find_group(groups, reference)
    metric = common_metric(groups)
    rows = []
    for group in groups:
        if group is against:
            continue
        pairs = _pairs(group, against)
        differences = [
            _mean(run, stage, report, metric) - _mean(base, stage, report, metric)
            for run, base in pairs
        ]
        low, high = interval(differences)
        won, lost, tied = client_counts(pairs, stage, report, metric)
        rows.append(
            {
                "label": group.label,
                "method": group.method,
                "reference": against.label,
                "seeds": len(differences),
                "difference": float(np.mean(differences)) if differences else math.nan,
                "seed_std": seed_std(differences),
                "low95": low,
                "high95": high,
                "p": p_value(differences),
                "seeds_needed": seeds_needed(differences),
                "clients_won": won,
                "clients_lost": lost,
                "clients_tied": tied,
            }
        )
    return pd.DataFrame(rows)


def case_differences(
    groups: Sequence[Group],
    report: Report = "last",
    reference: str = REFERENCE,
    min_seeds: int = 2,
) -> pd.DataFrame:
    """The differences within every case at both stages; empty where there is nobody to compare.

    Experiments with fewer than `min_seeds` are left out. `p_holm` is corrected for all of these
    comparisons.
    """
    frames = []
    for case, members in split_by_case(groups).items():
        own = [group for group in members if len(group.runs) >= min_seeds]
        if len(own) < 2:
            continue
        against = choose_reference(own, reference)
        for stage in STAGES:
            frame = paired_differences(own, against.label, stage, report)
            frame.insert(0, "case", case)
            frame.insert(1, "stage", stage)
            frames.append(frame)
    if not frames:
        return pd.DataFrame()
    together = pd.concat(frames, ignore_index=True)
    together["p_holm"] = holm(together["p"].tolist())
    return together


def choose_reference(groups: Sequence[Group], reference: str = REFERENCE) -> Group:
    """The experiment of one case that others are compared with: of this method, or the last."""
    method = normalize_method(reference)
    return next((g for g in groups if normalize_method(g.method) == method), groups[-1])


def client_counts(
    pairs: Sequence[tuple[RunResult, RunResult]], stage: str, report: Report, metric: str
) -> tuple[int, int, int]:
    """(won, lost, tied): clients that are better off than with the reference, in the same seed."""
    won = lost = tied = 0
    for run, base in pairs:
        gains = run_scores(run, stage, report, metric) - run_scores(base, stage, report, metric)
        gains = gains.dropna() if higher_is_better(metric) else -gains.dropna()
        won += int((gains > 0).sum())
        lost += int((gains < 0).sum())
        tied += int((gains == 0).sum())
    return won, lost, tied


def interval(numbers: Sequence[float]) -> tuple[float, float]:
    """Student's 95 % interval of the mean; unknown where nothing says how sure it is."""
    if len(numbers) < 2 or _all_equal(numbers):
        return math.nan, math.nan
    quantile = float(special.stdtrit(len(numbers) - 1, 1 - LEVEL / 2))
    reach = quantile * seed_std(numbers) / math.sqrt(len(numbers))
    center = float(np.mean(numbers))
    return center - reach, center + reach


def p_value(numbers: Sequence[float]) -> float:
    """p of Student's two-sided test that the mean is zero; NaN where it is not defined."""
    if not any(numbers) and len(numbers) > 1:
        return 1.0
    if len(numbers) < 2 or _all_equal(numbers):
        return math.nan
    statistic = abs(float(np.mean(numbers))) / (seed_std(numbers) / math.sqrt(len(numbers)))
    return float(2 * stats.t.sf(statistic, len(numbers) - 1))


def holm(p: Sequence[float]) -> npt.NDArray[np.float64]:
    """p corrected for being one of many (Holm 1979); NaN is no comparison and stays NaN."""
    values = np.asarray(p, dtype=np.float64)
    corrected = np.full(len(values), np.nan)
    known = np.flatnonzero(~np.isnan(values))
    order = known[np.argsort(values[known], kind="stable")]
    steps = values[order] * np.arange(len(order), 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected


def seeds_needed(numbers: Sequence[float]) -> float:
    """Seeds with which Student's test would find such a difference in 80 % of all cases.

    Infinite beyond a thousand; the size and the spread are taken as these few seeds show them.
    """
    mean, std = abs(float(np.mean(numbers))) if len(numbers) else math.nan, seed_std(numbers)
    if len(numbers) > 1 and mean == 0:
        return math.inf
    if len(numbers) < 2 or _all_equal(numbers):
        return math.nan
    for seeds in range(2, MOST_SEEDS + 1):
        if power(mean / std, seeds) >= POWER:
            return float(seeds)
    return math.inf


def power(effect: float, seeds: int) -> float:
    """The chance that the test at 5 % finds a difference of this many standard deviations."""
    limit = float(special.stdtrit(seeds - 1, 1 - LEVEL / 2))
    shift = effect * math.sqrt(seeds)
    above = float(stats.nct.sf(limit, seeds - 1, shift))
    below = float(stats.nct.cdf(-limit, seeds - 1, shift))
    # Far out scipy's noncentral t is NaN where it is 1 and 0.
    return (1.0 if math.isnan(above) else above) + (0.0 if math.isnan(below) else below)


def _pairs(group: Group, against: Group) -> list[tuple[RunResult, RunResult]]:
    base = {run.seed: run for run in against.runs}
    return [
        (run, base[run.seed])
        for run in group.runs
        if run.seed in base and are_comparable(run, base[run.seed])
    ]


def _mean(run: RunResult, stage: str, report: Report, metric: str) -> float:
    return describe_spread(run_scores(run, stage, report, metric), metric)["mean"]


def _all_equal(numbers: Sequence[float]) -> bool:
    """Whether all are the same, up to rounding.

    Accuracy on few samples moves in steps, so two or three seeds can show one difference by chance:
    a spread of zero is no proof of certainty.
    """
    return seed_std(numbers) <= 1e-9 * float(np.max(np.abs(numbers)))


# Methods compared over several cases by their ranks (Demšar, JMLR 2006), and the picture of it.


@dataclass(frozen=True)
class MeanRanks:
    """Mean ranks over cases, 1 is the best, the best method first."""

    methods: tuple[str, ...]
    mean: tuple[float, ...]
    cases: int
    p: float
    """p of Friedman's test that all methods are alike."""
    critical: float
    """Nemenyi's critical difference at 5 %: mean ranks that are closer cannot be told apart."""

    def cliques(self) -> list[tuple[int, int]]:
        """The longest runs of methods (first, last) that cannot be told apart, two or more."""
        cliques: list[tuple[int, int]] = []
        for first in range(len(self.mean)):
            last = max(
                i for i, rank in enumerate(self.mean) if rank - self.mean[first] <= self.critical
            )
            if last > first and (not cliques or last > cliques[-1][1]):
                cliques.append((first, last))
        return cliques


def rank_methods(scores: pd.DataFrame) -> MeanRanks | None:
    """From scores, cases in rows and methods in columns, larger is better.

    Cases in which a method is missing are left out. None with fewer than three methods or two
    cases: there is nothing to rank.
    """
    whole = scores.dropna()
    cases, methods = whole.shape
    if cases < 2 or methods < 3:
        return None
    places = whole.rank(axis=1, ascending=False)
    mean = places.mean(axis=0).sort_values(kind="stable")
    alike = bool((places.nunique(axis=1) == 1).all())
    p = 1.0 if alike else float(stats.friedmanchisquare(*(whole[c] for c in whole)).pvalue)
    return MeanRanks(
        methods=tuple(map(str, mean.index)),
        mean=tuple(float(rank) for rank in mean),
        cases=cases,
        p=p,
        critical=critical_difference(methods, cases),
    )


def critical_difference(methods: int, cases: int) -> float:
    """Nemenyi's: q · √(k (k + 1) / 6N), q of the studentized range over √2."""
    q = float(stats.studentized_range.ppf(1 - LEVEL, methods, np.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * cases))


def describe_ranks(ranks: MeanRanks) -> str:
    """What the ranks say, in a sentence or two."""
    listed = ", ".join(f"{m} {r:.2f}" for m, r in zip(ranks.methods, ranks.mean, strict=True))
    verdict = (
        f"methods whose mean ranks are less than {ranks.critical:.2f} apart cannot be told apart "
        "(Nemenyi, 5 %)"
        if ranks.p < LEVEL
        else "so the methods cannot be told apart by their ranks over so few cases"
    )
    return (
        f"Mean ranks over {ranks.cases} cases: {listed}. Friedman's test of all being alike: "
        f"p = {ranks.p:.3g}; {verdict}."
    )


def draw_ranks(axes: Axes, ranks: MeanRanks, titles: Sequence[str]) -> None:
    """The critical-difference diagram: bars join what cannot be told apart."""
    count = len(ranks.mean)
    half = (count + 1) // 2
    low, high = 1.0, float(count)
    axes.set_xlim(low - 0.35 * (high - low), high + 0.35 * (high - low))
    bottom = -0.6 - 0.45 * half - 0.22 * len(ranks.cliques())
    axes.set_ylim(bottom, 1.1)
    axes.axis("off")
    axes.plot([low, high], [0, 0], color="#444444", linewidth=1)
    for tick in range(1, count + 1):
        axes.plot([tick, tick], [0, 0.1], color="#444444", linewidth=1)
        axes.text(tick, 0.15, str(tick), ha="center", va="bottom", fontsize=9)
    reach = min(ranks.critical, high - low)
    axes.plot([low, low + reach], [0.75, 0.75], color="#444444", linewidth=2)
    axes.text(low + reach / 2, 0.8, f"CD = {ranks.critical:.2f}", ha="center", fontsize=9)
    below = -0.2
    for first, last in ranks.cliques():
        ends = [ranks.mean[first] - 0.05, ranks.mean[last] + 0.05]
        axes.plot(ends, [below, below], color="#222222", linewidth=3.5, solid_capstyle="butt")
        below -= 0.22
    for place, (rank, title) in enumerate(zip(ranks.mean, titles, strict=True)):
        left = place < half
        height = below - 0.25 - 0.45 * (place if left else count - 1 - place)
        side = low - 0.06 * (high - low) if left else high + 0.06 * (high - low)
        axes.plot([rank, rank, side], [0, height, height], color="#888888", linewidth=0.9)
        text = f"{title}  {rank:.2f} " if left else f" {rank:.2f}  {title}"
        axes.text(side, height, text, ha="right" if left else "left", va="center", fontsize=9.5)
