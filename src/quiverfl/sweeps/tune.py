"""Tuning: find a method's best settings on samples set aside from the training data.

A sweep with a section [tuning] is a race by successive halving (Jamieson and Talwalkar, AISTATS
2016): every try runs a part of its rounds, and only the better ones continue.

    [tuning]
    rungs = [0.25, 0.5]   # fractions of a cell's rounds after which tries are dropped
    keep = 0.34           # the fraction of the tries that stays at each of them, at least two
    rounds = 60           # rounds of the runs that the rates are for, if a race has fewer

The race uses the first seed. Tries within an error of the best are then repeated with the next
seed, until one stands out or the sweep has no further seed; so the result says whether a choice is
inside the noise. Dropped tries keep their checkpoints: the same command resumes, and nothing is
computed twice.

A rate that decays in a race of 20 rounds as in the first 20 of 60 is judged while it is still
large, and a decay that is too fast wins. With `rounds` it decays over a race as over a whole run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quiverfl.errors import QuiverError, suggest
from quiverfl.results.run_files import RunResult, read_run
from quiverfl.results.scores import run_scores
from quiverfl.results.summary import Report, headline_metric, higher_is_better
from quiverfl.sweeps.plan import Cell, GridPoint, Sweep, SweepFolder
from quiverfl.types import Floats


@dataclass(frozen=True)
class Try:
    """One point of a method's grid."""

    point: GridPoint
    scores: dict[str, float]
    """Mean over seeds and clients by case; NaN where a seed diverged or has not run."""
    diverged: bool = False
    """With any seed in any case."""

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.scores.values())))


@dataclass(frozen=True)
class TunedMethod:
    """All tries of one method, the best first and diverged ones last."""

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


def select_tuned(
    cells: Sequence[Cell], folder: SweepFolder, stage: str, report: Report
) -> list[TunedMethod]:
    """Rank the tries of each method by their mean over cases.

    Refuses tries that were judged on test data or on different problems.
    """
    _check_tries(cells)
    for cell in cells:
        if cell.config.data.validation is None:
            raise QuiverError(
                "tuning needs data.validation, such as 0.2: choosing by the test data would make "
                "the results that follow look better than they are."
            )
    by_method: dict[str, dict[GridPoint, list[Cell]]] = {}
    for cell in cells:
        by_method.setdefault(cell.config.method.name, {}).setdefault(cell.point, []).append(cell)
    chosen = []
    for method, points in by_method.items():
        tries = [_make_try(point, of, folder, stage, report) for point, of in points.items()]
        sign = next((sign for _, sign in tries if sign is not None), 1.0)
        ranked = sorted((one for one, _ in tries), key=lambda one: _sort_key(one, sign))
        chosen.append(TunedMethod(method, tuple(ranked)))
    return chosen


def _check_tries(cells: Sequence[Cell]) -> None:
    """Refuse a grid over data or task: its points are several problems, not tries on one."""
    values: dict[str, set[str]] = {}
    for cell in cells:
        for key, value in cell.point:
            if key.startswith(("data.", "task.")):
                values.setdefault(key, set()).add(json.dumps(value))
    for key, several in values.items():
        if len(several) > 1:
            raise QuiverError(
                f"tuning: {key} has {len(several)} values in the grid, and each is another "
                "problem, not a try on one: make every value a [[case]] of its own."
            )


def format_overrides(choices: Sequence[TunedMethod]) -> str:
    """Format the choices as sections of a configuration; skip a method without a score."""
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


def _make_try(
    point: GridPoint, cells: Sequence[Cell], folder: SweepFolder, stage: str, report: Report
) -> tuple[Try, float | None]:
    """Score one point over its cases and seeds; also return 1 if higher is better, else -1."""
    by_case: dict[str, list[float]] = {}
    sign = None
    for cell in cells:
        score, better = _read_score(cell, folder, stage, report)
        sign = sign if better is None else better
        by_case.setdefault(cell.case, []).append(score)
    means = {case: float(np.mean(scores)) for case, scores in by_case.items()}
    diverged = any(folder.state(cell) == "diverged" for cell in cells)
    return Try(point, means, diverged), sign


def _sort_key(one: Try, sign: float) -> float:
    return math.inf if math.isnan(one.mean) else -sign * one.mean


def _read_score(
    cell: Cell, folder: SweepFolder, stage: str, report: Report
) -> tuple[float, float | None]:
    """Return the mean over clients and 1 if higher is better, else -1; NaN, None if unfinished."""
    if folder.state(cell) != "finished":
        return math.nan, None
    run = read_run(folder.run(cell))
    metric = headline_metric(run.history)
    score = float(run_scores(run, stage, report, metric).mean())
    return score, 1.0 if higher_is_better(metric) else -1.0


Run = Callable[[Mapping[str, int], Sequence[Cell]], None]
"""Runs cells up to the given rounds, by the name of a cell."""

ONLY_THE_GRAPH = (("dfedavgm", "osgp"), ("dfedavgmp", "dfedpgp"))
"""Pairs of methods that differ in the graph alone. They share a grid and also get one common
choice, so that only the graph is left between them."""


@dataclass(frozen=True)
class Rules:
    rungs: tuple[float, ...] = (0.25, 0.5)
    keep: float = 0.34
    rounds: int | None = None

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Rules:
        known = ("rungs", "keep", "rounds")
        for key in written:
            if key not in known:
                raise QuiverError(f"[tuning] has no key {key!r}; {suggest(key, known)}")
        rungs = written.get("rungs", list(cls.rungs))
        keep = written.get("keep", cls.keep)
        if not isinstance(rungs, list) or not all(_is_fraction(rung) for rung in rungs):
            raise QuiverError(
                f"tuning.rungs = {rungs!r}: write fractions of the rounds, like [0.25]."
            )
        if not _is_fraction(keep):
            raise QuiverError(f"tuning.keep = {keep!r}: it must be between 0 and 1.")
        rounds = written.get("rounds")
        if rounds is not None and (type(rounds) is not int or rounds < 1):
            raise QuiverError(f"tuning.rounds = {rounds!r}: write a number of rounds, like 60.")
        return cls(tuple(sorted(set(rungs))), keep, rounds)

    def survivors(self, tries: int) -> int:
        return min(tries, max(2, math.ceil(self.keep * tries)))


def fit_decay(plan: Sweep) -> Sweep:
    """Return the sweep with rates that decay over each race as over the runs they are for."""
    rounds = Rules.read(plan.tuning or {}).rounds
    if rounds is None:
        return plan
    return replace(plan, cells=tuple(_fit_cell_decay(cell, rounds) for cell in plan.cells))


def _fit_cell_decay(cell: Cell, rounds: int) -> Cell:
    config = cell.config
    decay = config.training.lr_decay ** (rounds / config.run.rounds)
    return replace(cell, config=config.with_values([("training.lr_decay", decay)]))


@dataclass(frozen=True)
class RankedTry:
    """The result of a try in one bracket."""

    point: GridPoint
    rounds: int
    """Rounds of each of its runs, when it was dropped or at the end."""
    seeds: int
    score: float
    """Mean over methods, cases, seeds and clients; NaN if it diverged or could not run."""
    behind: float
    """Distance to the best try, at the same rounds and with the same seeds."""
    error: float
    """The standard error of that difference, paired by client."""
    diverged: bool = False

    @property
    def inside_the_noise(self) -> bool:
        """Whether the best try is no clearer than the error; never for NaN."""
        return abs(self.behind) <= self.error


@dataclass
class Bracket:
    """The tries of one method, or of a pair that must choose the same."""

    methods: tuple[str, ...]
    tries: dict[GridPoint, list[Cell]]
    stage: str
    folder: SweepFolder
    reached: dict[GridPoint, int] = field(default_factory=dict)
    """How many rungs each try has run."""
    seeds: dict[GridPoint, int] = field(default_factory=dict)

    def cells(self, point: GridPoint, seeds: int) -> list[Cell]:
        order = sorted({cell.config.run.seed for cell in self.tries[point]})[:seeds]
        return [cell for cell in self.tries[point] if cell.config.run.seed in order]

    def scores(
        self, point: GridPoint, fraction: float, seeds: int
    ) -> dict[tuple[str, str, int], Floats]:
        """Return a number per client by method, case and seed; nothing if one is missing."""
        scores = {}
        for cell in self.cells(point, seeds):
            values = read_client_scores(cell, self.folder, self.stage, rung_round(cell, fraction))
            if values is None:
                return {}
            config = cell.config
            scores[config.method.name, cell.case, config.run.seed] = values
        return scores

    def sort_points(
        self, points: Sequence[GridPoint], fraction: float, seeds: int
    ) -> list[GridPoint]:
        """Sort points, the best first and those without a score last."""
        means = {}
        for point in points:
            values = self.scores(point, fraction, seeds)
            means[point] = np.mean([v.mean() for v in values.values()]) if values else -math.inf
        return sorted(points, key=lambda point: -means[point])

    def compare_with(
        self, one: GridPoint, best: GridPoint, fraction: float, seeds: int
    ) -> tuple[float, float]:
        """Return how far `one` is behind the best, and its standard error; NaN without a score."""
        mine, theirs = self.scores(one, fraction, seeds), self.scores(best, fraction, seeds)
        if not mine or not theirs:
            return math.nan, math.nan
        return paired_difference(
            [theirs[key] - mine[key] for key in mine], [key[2] for key in mine]
        )


def make_brackets(cells: Sequence[Cell], folder: SweepFolder, stage: str) -> list[Bracket]:
    """Make a bracket for each method, and for each pair that differs in the graph alone."""
    by_method: dict[str, dict[GridPoint, list[Cell]]] = {}
    for cell in cells:
        tries = by_method.setdefault(cell.config.method.name, {})
        tries.setdefault(cell.point, []).append(cell)
    brackets = [Bracket((method,), tries, stage, folder) for method, tries in by_method.items()]
    for pair in ONLY_THE_GRAPH:
        if all(method in by_method for method in pair):
            one, other = (by_method[method] for method in pair)
            if set(one) != set(other):
                raise QuiverError(
                    f"{pair[0]} and {pair[1]} differ in the graph alone, but their grids differ: "
                    "give both the same [[grid]], or tune one of them with --methods."
                )
            both = {point: one[point] + other[point] for point in one}
            brackets.append(Bracket(pair, both, stage, folder))
    return brackets


def run_brackets(brackets: Sequence[Bracket], rules: Rules, run: Run) -> None:
    """Run the tries of all brackets rung by rung, then repeat those that are too close."""
    alive = {id(bracket): list(bracket.tries) for bracket in brackets}
    fractions = (*rules.rungs, 1.0)
    for rung, fraction in enumerate(fractions):
        _run_points(brackets, alive, fraction, 1, run)
        for bracket in brackets:
            points = alive[id(bracket)]
            bracket.reached.update(dict.fromkeys(points, rung))
            bracket.seeds.update(dict.fromkeys(points, 1))
            if fraction < 1:
                alive[id(bracket)] = bracket.sort_points(points, fraction, 1)[
                    : rules.survivors(len(points))
                ]
    seeds = max(
        len({c.config.run.seed for c in of}) for one in brackets for of in one.tries.values()
    )
    for count in range(2, seeds + 1):
        close = {
            id(bracket): find_close_tries(bracket, alive[id(bracket)], count - 1)
            for bracket in brackets
        }
        if not any(close.values()):
            return
        _run_points(brackets, close, 1.0, count, run)
        for bracket in brackets:
            bracket.seeds.update(dict.fromkeys(close[id(bracket)], count))
            alive[id(bracket)] = close[id(bracket)] or alive[id(bracket)]


def find_close_tries(bracket: Bracket, points: Sequence[GridPoint], seeds: int) -> list[GridPoint]:
    """Return the best and all within an error of it; nothing if the best stands alone."""
    if any(bracket.seeds[point] < seeds for point in points):
        return []  # decided with fewer seeds
    best, *others = bracket.sort_points(points, 1.0, seeds)
    near = []
    for point in others:
        behind, error = bracket.compare_with(point, best, 1.0, seeds)
        if abs(behind) <= error:
            near.append(point)
    return [best, *near] if near else []


def rank_tries(bracket: Bracket, rules: Rules) -> list[RankedTry]:
    """Rank tries: the choice first, then by the rounds each reached and by its score there."""
    fractions = (*rules.rungs, 1.0)
    groups: dict[tuple[int, int], list[GridPoint]] = {}
    for point in bracket.tries:
        got = (bracket.seeds.get(point, 0), bracket.reached.get(point, 0))
        groups.setdefault(got, []).append(point)
    ordered: list[tuple[GridPoint, float, int]] = []
    for (seeds, rung), points in sorted(groups.items(), reverse=True):
        fraction = fractions[rung]
        ordered += [
            (point, fraction, seeds) for point in bracket.sort_points(points, fraction, seeds)
        ]
    return [_rank_point(bracket, *one, best=ordered[0][0]) for one in ordered]


def _rank_point(
    bracket: Bracket, point: GridPoint, fraction: float, seeds: int, best: GridPoint
) -> RankedTry:
    values = bracket.scores(point, fraction, seeds)
    cells = bracket.cells(point, max(1, seeds))
    behind, error = bracket.compare_with(point, best, fraction, seeds)
    return RankedTry(
        point=point,
        rounds=rung_round(cells[0], fraction),
        seeds=seeds,
        score=float(np.mean([v.mean() for v in values.values()])) if values else math.nan,
        behind=behind,
        error=error,
        diverged=any(bracket.folder.state(cell) == "diverged" for cell in cells),
    )


def paired_difference(differences: Sequence[Floats], seeds: Sequence[int]) -> tuple[float, float]:
    """Return the mean of differences, an array over clients each, and its standard error.

    Over all clients; where there are several seeds also over the means of the seeds, and the
    larger of the two, since clients of one seed share its luck.
    """
    together = np.concatenate(differences)
    error = _standard_error(together)
    means = [
        np.mean(np.concatenate([d for d, of in zip(differences, seeds, strict=True) if of == seed]))
        for seed in dict.fromkeys(seeds)
    ]
    return float(together.mean()), max(error, _standard_error(np.array(means)))


def rung_round(cell: Cell, fraction: float) -> int:
    """Return the rounds of a fraction of a cell, up to the next evaluated one."""
    run = cell.config.run
    rounds = math.ceil(fraction * run.rounds)
    return min(run.rounds, -(-rounds // run.evaluate_every) * run.evaluate_every)


def read_client_scores(cell: Cell, folder: SweepFolder, stage: str, rounds: int) -> Floats | None:
    """Read each client's score after `rounds` rounds, negated if lower is better.

    None if there is none; a seed that diverged counts for the whole try.
    """
    if folder.state(cell) in ("new", "diverged"):
        return None
    run = read_run(folder.run(cell))
    metric = headline_metric(run.history)
    values = run.values(stage, metric)
    if rounds - 1 not in values.index:
        return None
    scores: Floats = values.loc[rounds - 1].dropna().to_numpy(dtype=np.float64)
    return scores if higher_is_better(metric) else -scores


def count_rounds(cells: Sequence[Cell], folder: SweepFolder) -> tuple[int, int]:
    """Return the number of started runs and the sum of their rounds."""
    started: list[RunResult] = [
        read_run(folder.run(cell)) for cell in cells if folder.state(cell) != "new"
    ]
    return len(started), sum(run.done_rounds for run in started)


def _run_points(
    brackets: Sequence[Bracket],
    points: Mapping[int, list[GridPoint]],
    fraction: float,
    seeds: int,
    run: Run,
) -> None:
    cells = {
        cell.name: cell
        for bracket in brackets
        for point in points[id(bracket)]
        for cell in bracket.cells(point, seeds)
    }
    folder = brackets[0].folder
    until = {name: rung_round(cell, fraction) for name, cell in cells.items()}
    behind = [
        cell for name, cell in cells.items() if _count_done_rounds(cell, folder) < until[name]
    ]
    if behind:
        run({cell.name: until[cell.name] for cell in behind}, behind)


def _count_done_rounds(cell: Cell, folder: SweepFolder) -> float:
    state = folder.state(cell)
    if state == "new":
        return 0
    return math.inf if state in ("finished", "diverged") else read_run(folder.run(cell)).done_rounds


def _standard_error(values: Floats) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _is_fraction(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1
