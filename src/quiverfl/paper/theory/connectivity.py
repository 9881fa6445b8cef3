"""Better connectivity speeds convergence: the same steps on graphs that contract at different q."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import stats

from quiverfl.paper.theory.descent import bounded, descend, steps
from quiverfl.paper.theory.problem import Problem
from quiverfl.paper.theory.theory_settings import TheorySettings
from quiverfl.topologies import analyse, directed_ring, exponential, full, random_push
from quiverfl.topologies.topology import Topology

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


def measure_connectivity(settings: TheorySettings) -> Iterator[str | Connectivity]:
    """Clients start apart, as in line 1 of Algorithm 1, on every graph alike."""
    problem = Problem(
        coupling=0.8, noise_shared=1.0, noise_personal=1.0, diversity=1.0, start=0.0, apart=4.0
    )
    found = {}
    for label, graph in GRAPHS.items():
        yield f"connectivity, {label}"
        found[label] = _measured(problem, graph(problem.clients), settings.connectivity_rounds)
    least = found["full"][3]
    rows = [
        GraphRow(label, q, c, mass, error, error - least, float(np.mean(course)), course)
        for label, (q, c, mass, error, course) in found.items()
    ]
    rows.sort(key=lambda row: -row.error)
    correlation = stats.spearmanr([r.contraction for r in rows], [r.error for r in rows]).statistic
    yield Connectivity(problem, STEP, settings.connectivity_rounds, tuple(rows), float(correlation))


def _measured(
    problem: Problem, topology: Topology, rounds: int
) -> tuple[float, float, float, float, tuple[float, ...]]:
    training = steps(problem, STEP)
    records = descend(problem, topology, training, rounds, common_init=False)
    report = analyse(topology, ANALYSED_ROUNDS)
    assert report.rate is not None
    assert report.constant is not None
    return (
        report.rate,
        report.constant,
        float(records["mu_min"].min()),
        float(bounded(problem, records).mean()),
        tuple(records["consensus"].tolist()),
    )
