"""Which of a method's tries did best, on samples set aside from the training data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.results.run_files import read_run
from quiverfl.results.scores import run_scores
from quiverfl.results.summary import Report, headline, higher_is_better
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell, Point


@dataclass(frozen=True)
class Try:
    """One point of a method's grid."""

    point: Point
    scores: dict[str, float]
    """By case, the mean over seeds and clients; NaN where a seed diverged or has not run."""
    diverged: bool = False
    """With any seed in any case."""

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.scores.values())))


@dataclass(frozen=True)
class Tuned:
    """All tries of one method, the best first; those that diverged come last."""

    method: str
    tries: tuple[Try, ...]

    @property
    def best(self) -> Try | None:
        """None if no try has a score with every seed."""
        return None if math.isnan(self.tries[0].mean) else self.tries[0]

    def at_the_edge(self) -> list[str]:
        """Keys whose best value is the smallest or largest of three or more that were tried."""
        keys: list[str] = []
        if self.best is None:
            return keys
        for key, value in self.best.point:
            values = sorted({dict(one.point)[key] for one in self.tries})
            if len(values) > 2 and value in (values[0], values[-1]):
                keys.append(key)
        return keys


def tuned(cells: Sequence[Cell], places: Places, stage: str, report: Report) -> list[Tuned]:
    """For each method its tries, by their mean over cases. Test data is refused."""
    for cell in cells:
        if cell.config.data.validation is None:
            raise QuiverError(
                "tuning needs data.validation, such as 0.2: choosing by the test data would make "
                "the results that follow look better than they are."
            )
    found: dict[str, dict[Point, list[Cell]]] = {}
    for cell in cells:
        found.setdefault(cell.config.method.name, {}).setdefault(cell.point, []).append(cell)
    chosen = []
    for method, points in found.items():
        tries = [_try(point, of, places, stage, report) for point, of in points.items()]
        sign = next((sign for _, sign in tries if sign is not None), 1.0)
        ranked = sorted((one for one, _ in tries), key=lambda one: _rank(one, sign))
        chosen.append(Tuned(method, tuple(ranked)))
    return chosen


def as_overrides(choices: Sequence[Tuned]) -> str:
    """The choices as sections of a configuration; nothing for a method without a score."""
    lines: list[str] = []
    for choice in choices:
        sections: dict[str, list[str]] = {}
        for path, value in () if choice.best is None else choice.best.point:
            section, _, key = path.partition(".")
            sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
        for section, settings in sections.items():
            name = json.dumps(choice.method) if ":" in choice.method else choice.method
            lines += [f"[overrides.{name}.{section}]", *settings, ""]
    return "\n".join(lines)


def _try(
    point: Point, cells: Sequence[Cell], places: Places, stage: str, report: Report
) -> tuple[Try, float | None]:
    """One point over all its cases and seeds, and the sign of what is better, if it is known."""
    by_case: dict[str, list[float]] = {}
    sign = None
    for cell in cells:
        score, better = _score(cell, places, stage, report)
        sign = sign if better is None else better
        by_case.setdefault(cell.case, []).append(score)
    means = {case: float(np.mean(scores)) for case, scores in by_case.items()}
    diverged = any(places.state(cell) == "diverged" for cell in cells)
    return Try(point, means, diverged), sign


def _rank(one: Try, sign: float) -> float:
    return math.inf if math.isnan(one.mean) else -sign * one.mean


def _score(cell: Cell, places: Places, stage: str, report: Report) -> tuple[float, float | None]:
    """(mean over clients, 1 if higher is better else -1); NaN and None without a finished run."""
    if places.state(cell) != "finished":
        return math.nan, None
    run = read_run(places.run(cell))
    metric = headline(run.history)
    score = float(run_scores(run, stage, report, metric).mean())
    return score, 1.0 if higher_is_better(metric) else -1.0
