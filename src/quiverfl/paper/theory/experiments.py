"""The experiments on the theorem: its rate, connectivity, the step on z, what is conserved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy import stats

from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.errors import Diverged, QuiverWarning
from quiverfl.methods.contract import Train
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.methods.push_sum import PushSumState
from quiverfl.paper.theory.problem import (
    METHOD,
    Problem,
    bounded_error,
    make_corollary_training,
    make_training,
    run_problem,
)
from quiverfl.runs.simulate import simulate
from quiverfl.task import Params, Task
from quiverfl.topologies import (
    analyze_topology,
    directed_ring,
    exponential,
    full,
    random_pull,
    random_push,
)
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training
from quiverfl.types import Floats

EXACT = 1e-12
"""Relative lengths below this are rounding."""
Announce: TypeAlias = Callable[[str], None]
"""Called with a line about each piece of work before it begins."""


@dataclass(frozen=True)
class TheorySettings:
    rounds: tuple[int, ...]
    """The T of the rate."""
    part_rounds: tuple[int, ...]
    """The T of its parts: start, noise and diversity alone."""
    seeds: int
    connectivity_rounds: int
    mixing_rounds: int
    limit_rounds: int
    steps: tuple[float, ...]
    """η_u · L_u · K_u of the limits."""


FULL = TheorySettings(
    rounds=(16, 64, 256, 1024),
    part_rounds=(16, 48, 144),
    seeds=3,
    connectivity_rounds=128,
    mixing_rounds=40,
    limit_rounds=120,
    steps=(0.4, 0.2, 0.1),
)
QUICK = TheorySettings(
    rounds=(8, 24, 72),
    part_rounds=(4, 12),
    seeds=2,
    connectivity_rounds=14,
    mixing_rounds=10,
    limit_rounds=16,
    steps=(0.4,),
)


# The corollary's rate: the average of Δ_ū/L_u + Δ_v/L_v over T rounds falls like 1/√T.


SCALE = 1.0
"""c of the step sizes c / (L K √T)."""
RATE_NEIGHBORS = 10

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
    """Slope of the logarithms, fitted for each seed: the mean and its 95 % interval."""

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


def measure_rate(settings: TheorySettings, announce: Announce) -> Rate:
    parts = []
    for name, (words, problem) in PARTS.items():
        rounds = settings.rounds if name == "everything" else settings.part_rounds
        announce(f"rate, {name}: {settings.seeds} seeds, T = {rounds[0]} … {rounds[-1]}")
        parts.append(_measure_part(name, words, problem, rounds, settings.seeds))
    steps = METHOD.personal_epochs, METHOD.shared_epochs
    return Rate(PARTS["everything"][1], SCALE, RATE_NEIGHBORS, *steps, tuple(parts))


def _measure_part(
    name: str, words: str, problem: Problem, rounds: tuple[int, ...], seeds: int
) -> RatePart:
    measured = [
        [_average_error(replace(problem, seed=seed), count, seed) for count in rounds]
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
        fit_slope(rounds, errors),
        float(last),
        tuple((steps < mass / (4 * np.sqrt(2))).tolist()),
    )


def _average_error(
    problem: Problem,
    rounds: int,
    seed: int,
    neighbors: int = RATE_NEIGHBORS,
    method: DFedPGP = METHOD,
) -> tuple[float, float]:
    """(the average over u^1 … u^T, which the rounds start from, the smallest μ on the way)."""
    topology = random_push(problem.clients, neighbors, seed=seed)
    training = make_corollary_training(problem, SCALE, rounds)
    records = run_problem(problem, topology, training, rounds, method=method, seed=seed)
    shared, personal = problem.start_norms
    first = shared / problem.smooth_shared + personal / problem.smooth_personal
    after = bounded_error(problem, records)
    return float(np.mean([first, *after[:-1]])), float(records["mu_min"].min())


def fit_slope(rounds: tuple[int, ...], errors: Floats) -> Slope:
    """Least squares on log T for every seed; Student's interval over the seeds, at least two."""
    slopes = np.polyfit(np.log(rounds), np.log(errors).T, deg=1)[0]
    mean = float(slopes.mean())
    margin = stats.t.ppf(0.975, len(slopes) - 1) * slopes.std(ddof=1) / np.sqrt(len(slopes))
    return Slope(mean, mean - float(margin), mean + float(margin))


# Better connectivity speeds convergence: the same steps on graphs that contract at different q.


STEP = 0.02
"""η_u · L_u · K_u. Small: random_push with one neighbour lets μ fall to a few thousandths, and z
moves by η/μ."""
ANALYSED_ROUNDS = 60

GRAPHS: dict[str, Callable[[int], Topology]] = {
    "directed ring": directed_ring,
    "random_push, n = 1": lambda clients: random_push(clients, 1),
    "random_push, n = 2": lambda clients: random_push(clients, 2),
    "exponential": exponential,
    "random_push, n = 5": lambda clients: random_push(clients, 5),
    "random_push, n = 10": lambda clients: random_push(clients, 10),
    "full": full,
}


@dataclass(frozen=True)
class GraphRow:
    label: str
    contraction: float
    """q, measured."""
    constant: float
    """C, measured."""
    smallest_mass: float
    """δ of these rounds."""
    error: float
    """Average of Δ_ū/L_u + Δ_v/L_v over the rounds."""
    excess: float
    """What it is above the error on the full graph."""
    disagreement: float
    """Average of (1/m) Σ ‖z_i - ū‖², which Lemma 3 bounds."""
    course: tuple[float, ...]
    """The disagreement after each round."""


@dataclass(frozen=True)
class Connectivity:
    problem: Problem
    step: float
    rounds: int
    rows: tuple[GraphRow, ...]
    """In the order of the errors, largest first."""
    rank_correlation: float
    """Spearman's, between q and the error: 1 where the two orders are the same."""


def measure_connectivity(settings: TheorySettings, announce: Announce) -> Connectivity:
    """Run the same steps on every graph. Clients start apart, as in line 1 of Algorithm 1."""
    problem = Problem(
        coupling=0.8, noise_shared=1.0, noise_personal=1.0, diversity=1.0, start=0.0, apart=4.0
    )
    measured = {}
    for label, graph in GRAPHS.items():
        announce(f"connectivity, {label}")
        measured[label] = _measure_graph(
            problem, graph(problem.clients), settings.connectivity_rounds
        )
    least = measured["full"][3]
    rows = [
        GraphRow(label, q, c, mass, error, error - least, float(np.mean(course)), course)
        for label, (q, c, mass, error, course) in measured.items()
    ]
    rows.sort(key=lambda row: -row.error)
    correlation = stats.spearmanr([r.contraction for r in rows], [r.error for r in rows]).statistic
    return Connectivity(
        problem, STEP, settings.connectivity_rounds, tuple(rows), float(correlation)
    )


def _measure_graph(
    problem: Problem, topology: Topology, rounds: int
) -> tuple[float, float, float, float, tuple[float, ...]]:
    training = make_training(problem, STEP)
    records = run_problem(problem, topology, training, rounds, common_init=False)
    report = analyze_topology(topology, ANALYSED_ROUNDS)
    assert report.rate is not None
    assert report.constant is not None
    return (
        report.rate,
        report.constant,
        float(records["mu_min"].min()),
        float(bounded_error(problem, records).mean()),
        tuple(records["consensus"].tolist()),
    )


# Push-sum conserves the mean and reaches the optimum; averaging by rows does neither.
#
# Three schemes, all through the same method and engine: push-sum on random_push, the same on
# random_pull (rows sum to 1, μ stays 1), and random_push with μ ignored.


NEIGHBORS = 5
SEED = 0


@dataclass(frozen=True)
class WithoutDebiasing(DFedPGP):
    """DFedPGP that takes u for z: μ is sent along and ignored."""

    name = "dfedpgp_without_debiasing"
    title = "DFedPGP without de-biasing"

    def phases(self, task: Task) -> tuple[Train[PushSumState], ...]:
        personal, shared = super().phases(task)
        plain = replace(
            shared, update=lambda state, point: state._replace(u=point.shared), lr_scale=None
        )
        return personal, plain

    def personal(self, state: PushSumState) -> Params:
        return Params(state.u, state.v)


@dataclass(frozen=True)
class Scheme:
    label: str
    method: DFedPGP
    push: bool
    neighbors: int = NEIGHBORS

    def topology(self, clients: int, static: bool) -> Topology:
        draw = random_push if self.push else random_pull
        return draw(clients, self.neighbors, seed=SEED, static=static)

    def models(self, state: dict[str, Floats]) -> Floats:
        """What the clients use as their shared part."""
        if isinstance(self.method, WithoutDebiasing):
            return state["u"]
        return state["u"] / state["mu"][:, None]


SCHEMES = (
    Scheme("push-sum", METHOD, push=True),
    Scheme("pull", METHOD, push=False),
    Scheme(
        "push without μ",
        WithoutDebiasing(METHOD.personal_epochs, METHOD.shared_epochs),
        push=True,
    ),
)


@dataclass(frozen=True)
class Mixing:
    """Nobody trains; lengths are relative to how far apart the clients start."""

    label: str
    drift: tuple[float, ...]
    """‖ū_t - ū_0‖ after each round."""
    disagreement: float
    """Distance of the clients' final models from their mean (root mean square)."""
    distance: float
    """Distance of the clients' final models from ū_0 (root mean square)."""


@dataclass(frozen=True)
class Limit:
    """Training without noise; averages over the last quarter of the rounds."""

    label: str
    static: bool
    step: float
    mean_distance: float
    """‖ū - u*‖"""
    client_distance: float
    """Distance of the clients' models from u* (root mean square)."""


@dataclass(frozen=True)
class Conservation:
    mixing_problem: Problem
    limit_problem: Problem
    neighbors: int
    mixing_rounds: int
    limit_rounds: int
    mixing: tuple[Mixing, ...]
    limits: tuple[Limit, ...]


def measure_conservation(settings: TheorySettings, announce: Announce) -> Conservation:
    quiet = Problem(noise_shared=0.0, noise_personal=0.0)
    apart = replace(quiet, apart=1.0)
    mixing, limits = [], []
    for scheme in SCHEMES:
        announce(f"conservation, {scheme.label}: mixing")
        mixing.append(_measure_mixing(scheme, apart, settings.mixing_rounds))
        for static in (False, True):
            kind = "one fixed graph" if static else "a new graph every round"
            announce(f"conservation, {scheme.label}: limit on {kind}")
            for step in settings.steps:
                limits.append(_measure_limit(scheme, quiet, static, step, settings.limit_rounds))
    return Conservation(
        apart,
        quiet,
        NEIGHBORS,
        settings.mixing_rounds,
        settings.limit_rounds,
        tuple(mixing),
        tuple(limits),
    )


def _measure_mixing(scheme: Scheme, problem: Problem, rounds: int) -> Mixing:
    still = replace(scheme.method, personal_epochs=0, shared_epochs=0)
    topology = scheme.topology(problem.clients, static=False)
    begin = _initial_params(problem, topology)
    states = _record_states(
        problem, topology, still, Training(batch_size=None), rounds, common=False
    )
    mean = begin.mean(axis=0)
    spread = _root_mean_square(begin - mean)
    models = scheme.models(states[-1])
    return Mixing(
        scheme.label,
        tuple(float(np.linalg.norm(s["u"].mean(axis=0) - mean)) / spread for s in states),
        _root_mean_square(models - models.mean(axis=0)) / spread,
        _root_mean_square(models - mean) / spread,
    )


def _measure_limit(
    scheme: Scheme, problem: Problem, static: bool, step: float, rounds: int
) -> Limit:
    topology = scheme.topology(problem.clients, static)
    states = _record_states(
        problem, topology, scheme.method, make_training(problem, step), rounds, common=True
    )
    last = states[-max(1, rounds // 4) :]
    return Limit(
        scheme.label,
        static,
        step,
        float(np.mean([np.linalg.norm(s["u"].mean(axis=0) - problem.optimum) for s in last])),
        float(np.mean([_root_mean_square(scheme.models(s) - problem.optimum) for s in last])),
    )


def _record_states(
    problem: Problem,
    topology: Topology,
    method: DFedPGP,
    training: Training,
    rounds: int,
    *,
    common: bool,
) -> list[dict[str, Floats]]:
    """u and μ of all clients after each round."""
    states: list[dict[str, Floats]] = []

    def keep(checkpoint: Checkpoint) -> None:
        named = {name: checkpoint.tensors[f"state/{name}"].clone().numpy() for name in ("u", "mu")}
        states.append(named)

    run_problem(
        problem,
        topology,
        training,
        rounds,
        method=method,
        seed=SEED,
        common_init=common,
        gradients=False,
        checkpoint=keep,
    )
    return states


def _initial_params(problem: Problem, topology: Topology) -> Floats:
    """u of all clients before the first round, where each starts from its own."""
    run = simulate(
        problem.task,
        problem.data,
        method=METHOD,
        topology=topology,
        training=Training(batch_size=None),
        rounds=0,
        seed=SEED,
        dtype=torch.float64,
        common_init=False,
    )
    return np.stack([run.state(client).u["u"].numpy() for client in range(problem.clients)])


def _root_mean_square(vectors: Floats) -> float:
    """Root mean square of the rows' lengths."""
    return float(np.sqrt((vectors**2).sum(axis=1).mean()))


# The theorem's step moves z by η/μ. Two others never move z by more than η.


STEP_RULES = {
    "paper": METHOD,
    "step_floor = 1": replace(METHOD, step_floor=1.0),
    "debiased": replace(METHOD, step="debiased"),
}
STEP_NEIGHBORS = (2, 10)
DIVERGED = 1e3
"""Nobody starts further from the optimum than a few units."""


@dataclass(frozen=True)
class StepRow:
    rule: str
    neighbors: int
    rounds: tuple[int, ...]
    errors: tuple[float, ...]
    """Average of Δ_ū/L_u + Δ_v/L_v over T rounds, mean over the seeds."""
    slope: Slope
    limits: tuple[float | None, float | None]
    """‖ū - u*‖ without noise at the smallest step: a new graph every round, one fixed graph; none
    where training diverges."""


def measure_steps(settings: TheorySettings, announce: Announce) -> tuple[StepRow, ...]:
    """The corollary's rate and where training ends, for three steps on few and many neighbours."""
    noisy, quiet = Problem(), Problem(noise_shared=0.0, noise_personal=0.0)
    rounds, rows = settings.part_rounds, []
    for neighbors in STEP_NEIGHBORS:
        for rule, method in STEP_RULES.items():
            announce(f"steps, {rule}, {neighbors} neighbours")
            errors = np.array(
                [
                    [
                        _average_error(replace(noisy, seed=seed), count, seed, neighbors, method)[0]
                        for count in rounds
                    ]
                    for seed in range(settings.seeds)
                ]
            )
            scheme = Scheme(rule, method, push=True, neighbors=neighbors)
            new, fixed = (_find_limit(scheme, quiet, static, settings) for static in (False, True))
            means = tuple(errors.mean(axis=0).tolist())
            slope = fit_slope(rounds, errors)
            rows.append(StepRow(rule, neighbors, rounds, means, slope, (new, fixed)))
    return tuple(rows)


def _find_limit(
    scheme: Scheme, problem: Problem, static: bool, settings: TheorySettings
) -> float | None:
    try:
        limit = _measure_limit(scheme, problem, static, settings.steps[-1], settings.limit_rounds)
    except Diverged:
        return None
    return limit.mean_distance if limit.mean_distance < DIVERGED else None


# All findings, one after the other.


@dataclass(frozen=True)
class Findings:
    settings: TheorySettings
    rate: Rate
    connectivity: Connectivity
    conservation: Conservation
    steps: tuple[StepRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def measure_theory(
    settings: TheorySettings = FULL, announce: Announce = lambda _: None
) -> Findings:
    """Run the experiments; `announce` hears of each piece of work before it begins."""
    with warnings.catch_warnings():
        # The problem is judged by its gradients, not on test data, and one run asks for the start.
        unjudged = "no client has test data|run.rounds = 0"
        warnings.filterwarnings("ignore", unjudged, QuiverWarning)
        return Findings(
            settings,
            measure_rate(settings, announce),
            measure_connectivity(settings, announce),
            measure_conservation(settings, announce),
            measure_steps(settings, announce),
        )
