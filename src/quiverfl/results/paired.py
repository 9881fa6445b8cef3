"""Differences between experiments, paired by seed: how sure they are, and what would make them so.

Seeds share data and start, so the difference within a seed is far less noisy than the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special, stats

from quiverfl.results.groups import Group, common_metric
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import group_called, run_scores
from quiverfl.results.summary import Report, higher_is_better, spread

LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 1000


def paired_differences(
    groups: Sequence[Group], reference: str, stage: str = "local", report: Report = "last"
) -> pd.DataFrame:
    """Every experiment minus the reference: mean, spread, 95 % interval, p and what more it takes.

    `p` is that of Student's paired test, not corrected (see `holm`). `seeds_needed` would find a
    difference of this size with a chance of 80 %. Wins, losses and ties are of clients, those of
    all seeds together.
    """
    against = group_called(groups, reference)
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
                "reference": against.label,
                "seeds": len(differences),
                "difference": float(np.mean(differences)) if differences else math.nan,
                "seed_std": _std(differences),
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
    if len(numbers) < 2 or _coincide(numbers):
        return math.nan, math.nan
    quantile = float(special.stdtrit(len(numbers) - 1, 1 - LEVEL / 2))
    reach = quantile * _std(numbers) / math.sqrt(len(numbers))
    center = float(np.mean(numbers))
    return center - reach, center + reach


def p_value(numbers: Sequence[float]) -> float:
    """Of Student's two-sided test that the mean is zero; unknown where nothing says how sure."""
    if not any(numbers) and len(numbers) > 1:
        return 1.0
    if len(numbers) < 2 or _coincide(numbers):
        return math.nan
    statistic = abs(float(np.mean(numbers))) / (_std(numbers) / math.sqrt(len(numbers)))
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
    mean, std = abs(float(np.mean(numbers))) if len(numbers) else math.nan, _std(numbers)
    if len(numbers) > 1 and mean == 0:
        return math.inf
    if len(numbers) < 2 or _coincide(numbers):
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
    return [(run, base[run.seed]) for run in group.runs if run.seed in base]


def _mean(run: RunResult, stage: str, report: Report, metric: str) -> float:
    return spread(run_scores(run, stage, report, metric), metric)["mean"]


def _coincide(numbers: Sequence[float]) -> bool:
    """Whether all are the same, up to rounding.

    Accuracy on few samples moves in steps, so two or three seeds can show one difference by chance:
    a spread of zero is no proof of certainty.
    """
    return _std(numbers) <= 1e-9 * float(np.max(np.abs(numbers)))


def _std(numbers: Sequence[float]) -> float:
    return float(np.std(numbers, ddof=1)) if len(numbers) > 1 else math.nan
