"""The corollary's rate: the average of Δ_ū/L_u + Δ_v/L_v over T rounds falls like 1/√T."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import stats

from quiverfl.paper.theory.descent import METHOD, bounded, corollary_steps, descend
from quiverfl.paper.theory.problem import Problem
from quiverfl.paper.theory.theory_settings import TheorySettings
from quiverfl.topologies import random_push

Floats = npt.NDArray[np.float64]

SCALE = 1.0
"""c of the step sizes c / (L K √T)."""
NEIGHBORS = 10

PARTS = {
    "everything": ("start, noise and diversity together", Problem()),
    "start": (
        "no noise, no diversity",
        Problem(noise_shared=0.0, noise_personal=0.0, diversity=0.0),
    ),
    "noise": ("starts at the optimum, no diversity", Problem(start=0.0, diversity=0.0)),
    "diversity": (
        "starts at the optimum, no noise",
        Problem(start=0.0, noise_shared=0.0, noise_personal=0.0),
    ),
}
"""What the bound adds up: the whole, and each of its three sources alone."""


@dataclass(frozen=True)
class Slope:
    """Of the logarithms, fitted for each seed: the mean and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RatePart:
    name: str
    words: str
    rounds: tuple[int, ...]
    errors: tuple[tuple[float, ...], ...]
    """[seed][T]: averages over the states that the T rounds start from."""
    slope: Slope
    last_slope: float
    """Between the two largest T: nearer to the limit than the fit."""
    allowed: tuple[bool, ...]
    """Whether η_u < δ / (4√2 L_u K_u) with the δ of these rounds, as the theorem asks."""

    @property
    def means(self) -> Floats:
        means: Floats = np.mean(self.errors, axis=0)
        return means


@dataclass(frozen=True)
class Rate:
    problem: Problem
    scale: float
    neighbors: int
    personal_steps: int
    shared_steps: int
    parts: tuple[RatePart, ...]


def measure_rate(settings: TheorySettings) -> Iterator[str | Rate]:
    """Says what it is about to do before each piece of work; the result comes last."""
    parts = []
    for name, (words, problem) in PARTS.items():
        rounds = settings.rounds if name == "everything" else settings.part_rounds
        yield f"rate, {name}: {settings.seeds} seeds, T = {rounds[0]} … {rounds[-1]}"
        parts.append(_part(name, words, problem, rounds, settings.seeds))
    steps = METHOD.personal_epochs, METHOD.shared_epochs
    yield Rate(PARTS["everything"][1], SCALE, NEIGHBORS, *steps, tuple(parts))


def _part(name: str, words: str, problem: Problem, rounds: tuple[int, ...], seeds: int) -> RatePart:
    measured = [
        [_average(replace(problem, seed=seed), count, seed) for count in rounds]
        for seed in range(seeds)
    ]
    errors = np.array([[error for error, _ in row] for row in measured])
    mass = np.array([[low for _, low in row] for row in measured]).min(axis=0)
    steps = SCALE / np.sqrt(rounds)  # η_u · L_u · K_u
    last = np.log(errors[:, -1] / errors[:, -2]).mean() / np.log(rounds[-1] / rounds[-2])
    return RatePart(
        name,
        words,
        rounds,
        tuple(tuple(row) for row in errors.tolist()),
        fitted(rounds, errors),
        float(last),
        tuple((steps < mass / (4 * np.sqrt(2))).tolist()),
    )


def _average(problem: Problem, rounds: int, seed: int) -> tuple[float, float]:
    """(the average over u^1 … u^T, which the rounds start from, the smallest μ on the way)."""
    topology = random_push(problem.clients, NEIGHBORS, seed=seed)
    records = descend(problem, topology, corollary_steps(problem, SCALE, rounds), rounds, seed=seed)
    shared, personal = problem.start_norms
    first = shared / problem.smooth_shared + personal / problem.smooth_personal
    after = bounded(problem, records)
    return float(np.mean([first, *after[:-1]])), float(records["mu_min"].min())


def fitted(rounds: tuple[int, ...], errors: Floats) -> Slope:
    """Least squares on log T for every seed; Student's interval over the seeds, at least two."""
    slopes = np.polyfit(np.log(rounds), np.log(errors).T, deg=1)[0]
    mean = float(slopes.mean())
    margin = stats.t.ppf(0.975, len(slopes) - 1) * slopes.std(ddof=1) / np.sqrt(len(slopes))
    return Slope(mean, mean - float(margin), mean + float(margin))
