"""Methods compared over several cases by their ranks (Demšar, JMLR 2006), and the picture of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

LEVEL = 0.05


@dataclass(frozen=True)
class MeanRanks:
    """Mean ranks over cases, 1 is the best, the best method first."""

    methods: tuple[str, ...]
    mean: tuple[float, ...]
    cases: int
    p: float
    """Of Friedman's test that all methods are alike."""
    critical: float
    """Nemenyi's critical difference at 5 %: mean ranks that are closer cannot be told apart."""

    def cliques(self) -> list[tuple[int, int]]:
        """The longest runs of methods (first, last) that cannot be told apart, two or more."""
        found: list[tuple[int, int]] = []
        for first in range(len(self.mean)):
            last = max(
                i for i, rank in enumerate(self.mean) if rank - self.mean[first] <= self.critical
            )
            if last > first and (not found or last > found[-1][1]):
                found.append((first, last))
        return found


def ranks(scores: pd.DataFrame) -> MeanRanks | None:
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


def words(found: MeanRanks) -> str:
    """What the ranks say, in a sentence or two."""
    listed = ", ".join(f"{m} {r:.2f}" for m, r in zip(found.methods, found.mean, strict=True))
    verdict = (
        f"methods whose mean ranks are less than {found.critical:.2f} apart cannot be told apart "
        "(Nemenyi, 5 %)"
        if found.p < LEVEL
        else "so the methods cannot be told apart by their ranks over so few cases"
    )
    return (
        f"Mean ranks over {found.cases} cases: {listed}. Friedman's test of all being alike: "
        f"p = {found.p:.3g}; {verdict}."
    )


def draw_ranks(axes: Axes, found: MeanRanks, titles: Sequence[str]) -> None:
    """The critical-difference diagram: bars join what cannot be told apart."""
    count = len(found.mean)
    half = (count + 1) // 2
    low, high = 1.0, float(count)
    axes.set_xlim(low - 0.35 * (high - low), high + 0.35 * (high - low))
    bottom = -0.6 - 0.45 * half - 0.22 * len(found.cliques())
    axes.set_ylim(bottom, 1.1)
    axes.axis("off")
    axes.plot([low, high], [0, 0], color="#444444", linewidth=1)
    for tick in range(1, count + 1):
        axes.plot([tick, tick], [0, 0.1], color="#444444", linewidth=1)
        axes.text(tick, 0.15, str(tick), ha="center", va="bottom", fontsize=9)
    reach = min(found.critical, high - low)
    axes.plot([low, low + reach], [0.75, 0.75], color="#444444", linewidth=2)
    axes.text(low + reach / 2, 0.8, f"CD = {found.critical:.2f}", ha="center", fontsize=9)
    below = -0.2
    for first, last in found.cliques():
        ends = [found.mean[first] - 0.05, found.mean[last] + 0.05]
        axes.plot(ends, [below, below], color="#222222", linewidth=3.5, solid_capstyle="butt")
        below -= 0.22
    for place, (rank, title) in enumerate(zip(found.mean, titles, strict=True)):
        left = place < half
        height = below - 0.25 - 0.45 * (place if left else count - 1 - place)
        side = low - 0.06 * (high - low) if left else high + 0.06 * (high - low)
        axes.plot([rank, rank, side], [0, height, height], color="#888888", linewidth=0.9)
        text = f"{title}  {rank:.2f} " if left else f" {rank:.2f}  {title}"
        axes.text(side, height, text, ha="right" if left else "left", va="center", fontsize=9.5)
