"""Successive halving: every try runs a part of its rounds, the better ones run on.

    [tuning]
    rungs = [0.25, 0.5]   # shares of a cell's rounds after which tries are dropped
    keep = 0.34           # the share of the tries that stays at each of them, at least two
    rounds = 60           # of the runs that the rates are for, if a race has fewer

The race is run with the first seed. Tries that are then within an error of the best are repeated
with the next seed, and so on until one stands out or the seeds of the sweep are used up; so the
choice says by itself whether it is inside the noise. Dropped tries keep their checkpoints: the same
command resumes, and nothing is computed twice (Jamieson and Talwalkar, AISTATS 2016).

A learning rate that decays in a race of 20 rounds as in the first 20 of 60 is judged while it is
still large, and a decay that is too fast wins. With `rounds` it decays over the whole of a race as
it will over the whole of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError, nearest
from quiverfl.results.run_files import RunResult, read_run
from quiverfl.results.summary import headline, higher_is_better
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell, Point, Sweep

Floats = npt.NDArray[np.float64]
Run = Callable[[Mapping[str, int], Sequence[Cell]], None]
"""Brings cells to the rounds that are named, by the name of the cell."""

ONLY_THE_GRAPH = (("dfedavgm", "osgp"), ("dfedavgmp", "dfedpgp"))
"""Methods that differ in the graph alone: they have the same grid, and a choice in common too, so
that what is left between them is the graph."""


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
                raise QuiverError(f"[tuning] has no key {key!r}; {nearest(key, known)}")
        rungs = written.get("rungs", list(cls.rungs))
        keep = written.get("keep", cls.keep)
        if not isinstance(rungs, list) or not all(_share(rung) for rung in rungs):
            raise QuiverError(f"tuning.rungs = {rungs!r}: write shares of the rounds, like [0.25].")
        if not _share(keep):
            raise QuiverError(f"tuning.keep = {keep!r}: it must be between 0 and 1.")
        rounds = written.get("rounds")
        if rounds is not None and (type(rounds) is not int or rounds < 1):
            raise QuiverError(f"tuning.rounds = {rounds!r}: write a number of rounds, like 60.")
        return cls(tuple(sorted(set(rungs))), keep, rounds)

    def stay(self, tries: int) -> int:
        return min(tries, max(2, math.ceil(self.keep * tries)))


def fitted(plan: Sweep) -> Sweep:
    """The sweep with rates that decay over each race as over the runs they are for."""
    rounds = Rules.read(plan.tuning or {}).rounds
    if rounds is None:
        return plan
    return replace(plan, cells=tuple(_fitted(cell, rounds) for cell in plan.cells))


def _fitted(cell: Cell, rounds: int) -> Cell:
    config = cell.config
    decay = config.training.lr_decay ** (rounds / config.run.rounds)
    return replace(cell, config=config.with_values([("training.lr_decay", decay)]))


@dataclass(frozen=True)
class Standing:
    """Where a try of one contest ended."""

    point: Point
    rounds: int
    """Of each of its runs, when it was dropped or at the end."""
    seeds: int
    score: float
    """Mean over methods, cases, seeds and clients; NaN if it diverged or could not be run."""
    behind: float
    """Of the best, on what both have run: at the same rounds, with the same seeds."""
    error: float
    """The standard error of that difference, paired by client."""
    diverged: bool = False

    @property
    def inside_the_noise(self) -> bool:
        """NaN is not."""
        return abs(self.behind) <= self.error


@dataclass
class Contest:
    """The tries of a method, or of two that must have the same."""

    methods: tuple[str, ...]
    tries: dict[Point, list[Cell]]
    stage: str
    places: Places
    reached: dict[Point, int] = field(default_factory=dict)
    """How many rungs each try has run."""
    seeds: dict[Point, int] = field(default_factory=dict)

    def cells(self, point: Point, seeds: int) -> list[Cell]:
        order = sorted({cell.config.run.seed for cell in self.tries[point]})[:seeds]
        return [cell for cell in self.tries[point] if cell.config.run.seed in order]

    def scores(self, point: Point, share: float, seeds: int) -> dict[tuple[str, str, int], Floats]:
        """By method, case and seed, one number per client; empty where one is missing."""
        found = {}
        for cell in self.cells(point, seeds):
            values = client_values(cell, self.places, self.stage, rung_round(cell, share))
            if values is None:
                return {}
            config = cell.config
            found[config.method.name, cell.case, config.run.seed] = values
        return found

    def ranked(self, points: Sequence[Point], share: float, seeds: int) -> list[Point]:
        """The best first, those without a score last."""
        means = {}
        for point in points:
            values = self.scores(point, share, seeds)
            means[point] = np.mean([v.mean() for v in values.values()]) if values else -math.inf
        return sorted(points, key=lambda point: -means[point])

    def against(self, one: Point, best: Point, share: float, seeds: int) -> tuple[float, float]:
        """(how far one is behind the best, its standard error), NaN where one has no score."""
        mine, theirs = self.scores(one, share, seeds), self.scores(best, share, seeds)
        if not mine or not theirs:
            return math.nan, math.nan
        return paired([theirs[key] - mine[key] for key in mine], [key[2] for key in mine])


def contests(cells: Sequence[Cell], places: Places, stage: str) -> list[Contest]:
    """One for each method, and one for each pair that differs in the graph alone."""
    by_method: dict[str, dict[Point, list[Cell]]] = {}
    for cell in cells:
        tries = by_method.setdefault(cell.config.method.name, {})
        tries.setdefault(cell.point, []).append(cell)
    found = [Contest((method,), tries, stage, places) for method, tries in by_method.items()]
    for pair in ONLY_THE_GRAPH:
        if all(method in by_method for method in pair):
            one, other = (by_method[method] for method in pair)
            if set(one) != set(other):
                raise QuiverError(
                    f"{pair[0]} and {pair[1]} differ in the graph alone, but their grids differ: "
                    "give both the same [[grid]], or tune one of them with --methods."
                )
            both = {point: one[point] + other[point] for point in one}
            found.append(Contest(pair, both, stage, places))
    return found


def race(found: Sequence[Contest], rules: Rules, run: Run) -> None:
    """Run the tries of all contests rung by rung, then repeat those that are too close."""
    alive = {id(contest): list(contest.tries) for contest in found}
    shares = (*rules.rungs, 1.0)
    for rung, share in enumerate(shares):
        _bring(found, alive, share, 1, run)
        for contest in found:
            points = alive[id(contest)]
            contest.reached.update(dict.fromkeys(points, rung))
            contest.seeds.update(dict.fromkeys(points, 1))
            if share < 1:
                alive[id(contest)] = contest.ranked(points, share, 1)[: rules.stay(len(points))]
    seeds = max(len({c.config.run.seed for c in of}) for one in found for of in one.tries.values())
    for count in range(2, seeds + 1):
        close = {
            id(contest): too_close(contest, alive[id(contest)], count - 1) for contest in found
        }
        if not any(close.values()):
            return
        _bring(found, close, 1.0, count, run)
        for contest in found:
            contest.seeds.update(dict.fromkeys(close[id(contest)], count))
            alive[id(contest)] = close[id(contest)] or alive[id(contest)]


def too_close(contest: Contest, points: Sequence[Point], seeds: int) -> list[Point]:
    """The best and all within an error of it; nothing if it stands alone."""
    if any(contest.seeds[point] < seeds for point in points):
        return []  # decided with fewer seeds
    best, *others = contest.ranked(points, 1.0, seeds)
    near = []
    for point in others:
        behind, error = contest.against(point, best, 1.0, seeds)
        if abs(behind) <= error:
            near.append(point)
    return [best, *near] if near else []


def standings(contest: Contest, rules: Rules) -> list[Standing]:
    """The choice first; then by how far each got, and by its score there."""
    shares = (*rules.rungs, 1.0)
    groups: dict[tuple[int, int], list[Point]] = {}
    for point in contest.tries:
        got = (contest.seeds.get(point, 0), contest.reached.get(point, 0))
        groups.setdefault(got, []).append(point)
    ordered: list[tuple[Point, float, int]] = []
    for (seeds, rung), points in sorted(groups.items(), reverse=True):
        share = shares[rung]
        ordered += [(point, share, seeds) for point in contest.ranked(points, share, seeds)]
    return [_standing(contest, *one, best=ordered[0][0]) for one in ordered]


def _standing(contest: Contest, point: Point, share: float, seeds: int, best: Point) -> Standing:
    values = contest.scores(point, share, seeds)
    cells = contest.cells(point, max(1, seeds))
    behind, error = contest.against(point, best, share, seeds)
    return Standing(
        point=point,
        rounds=rung_round(cells[0], share),
        seeds=seeds,
        score=float(np.mean([v.mean() for v in values.values()])) if values else math.nan,
        behind=behind,
        error=error,
        diverged=any(contest.places.state(cell) == "diverged" for cell in cells),
    )


def paired(differences: Sequence[Floats], seeds: Sequence[int]) -> tuple[float, float]:
    """The mean of differences, an array over clients each, and its standard error.

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


def rung_round(cell: Cell, share: float) -> int:
    """How many rounds a share of a cell is: up to the next that is evaluated."""
    run = cell.config.run
    rounds = math.ceil(share * run.rounds)
    return min(run.rounds, -(-rounds // run.evaluate_every) * run.evaluate_every)


def client_values(cell: Cell, places: Places, stage: str, rounds: int) -> Floats | None:
    """What each client scored after this many rounds, larger is better; None where that is unknown.

    What a seed lost by diverging counts for the whole try.
    """
    if places.state(cell) in ("new", "diverged"):
        return None
    run = read_run(places.run(cell))
    metric = headline(run.history)
    values = run.values(stage, metric)
    if rounds - 1 not in values.index:
        return None
    found: Floats = values.loc[rounds - 1].dropna().to_numpy(dtype=np.float64)
    return found if higher_is_better(metric) else -found


def rounds_run(cells: Sequence[Cell], places: Places) -> tuple[int, int]:
    """(runs begun, rounds of them all)."""
    begun: list[RunResult] = [
        read_run(places.run(cell)) for cell in cells if places.state(cell) != "new"
    ]
    return len(begun), sum(run.done_rounds for run in begun)


def _bring(
    found: Sequence[Contest], points: Mapping[int, list[Point]], share: float, seeds: int, run: Run
) -> None:
    cells = {
        cell.name: cell
        for contest in found
        for point in points[id(contest)]
        for cell in contest.cells(point, seeds)
    }
    places = found[0].places
    until = {name: rung_round(cell, share) for name, cell in cells.items()}
    behind = [cell for name, cell in cells.items() if _done(cell, places) < until[name]]
    if behind:
        run({cell.name: until[cell.name] for cell in behind}, behind)


def _done(cell: Cell, places: Places) -> float:
    state = places.state(cell)
    if state == "new":
        return 0
    return math.inf if state in ("finished", "diverged") else read_run(places.run(cell)).done_rounds


def _standard_error(values: Floats) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1
