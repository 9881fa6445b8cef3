"""Push-sum conserves the mean and reaches the optimum; averaging by rows does neither.

Three schemes, all through the same method and engine: push-sum on random_push, the same on
random_pull (rows sum to 1, μ stays 1), and random_push with μ ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.simulate import simulate
from quiverfl.methods.contract import Train
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.methods.pushsum import PushSumState
from quiverfl.paper.theory.descent import METHOD, descend, steps
from quiverfl.paper.theory.problem import Problem
from quiverfl.paper.theory.theory_settings import TheorySettings
from quiverfl.task import Point, Task
from quiverfl.topologies import random_pull, random_push
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training

Floats = npt.NDArray[np.float64]

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
            shared, absorb=lambda state, point: state._replace(u=point.shared), scale=None
        )
        return personal, plain

    def personal(self, state: PushSumState) -> Point:
        return Point(state.u, state.v)


@dataclass(frozen=True)
class Scheme:
    label: str
    method: DFedPGP
    push: bool

    def topology(self, clients: int, static: bool) -> Topology:
        draw = random_push if self.push else random_pull
        return draw(clients, NEIGHBORS, seed=SEED, static=static)

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
    """Of what clients use at the end, from its own mean (root of the mean square)."""
    distance: float
    """Of what clients use at the end, from ū_0 (root of the mean square)."""


@dataclass(frozen=True)
class Limit:
    """Training without noise; averages over the last quarter of the rounds."""

    label: str
    static: bool
    step: float
    mean_distance: float
    """‖ū - u*‖"""
    client_distance: float
    """Of what clients use, from u* (root of the mean square)."""


@dataclass(frozen=True)
class Conservation:
    mixing_problem: Problem
    limit_problem: Problem
    neighbors: int
    mixing_rounds: int
    limit_rounds: int
    mixing: tuple[Mixing, ...]
    limits: tuple[Limit, ...]


def measure_conservation(settings: TheorySettings) -> Iterator[str | Conservation]:
    quiet = Problem(noise_shared=0.0, noise_personal=0.0)
    apart = replace(quiet, apart=1.0)
    mixing, limits = [], []
    for scheme in SCHEMES:
        yield f"conservation, {scheme.label}: mixing"
        mixing.append(_mixed(scheme, apart, settings.mixing_rounds))
        for static in (False, True):
            yield f"conservation, {scheme.label}: limit on {kind_of(static)}"
            for step in settings.steps:
                limits.append(_limit(scheme, quiet, static, step, settings.limit_rounds))
    yield Conservation(
        apart,
        quiet,
        NEIGHBORS,
        settings.mixing_rounds,
        settings.limit_rounds,
        tuple(mixing),
        tuple(limits),
    )


def kind_of(static: bool) -> str:
    return "one fixed graph" if static else "a new graph every round"


def _mixed(scheme: Scheme, problem: Problem, rounds: int) -> Mixing:
    still = replace(scheme.method, personal_epochs=0, shared_epochs=0)
    topology = scheme.topology(problem.clients, static=False)
    begin = _starts(problem, topology)
    states = _states(problem, topology, still, Training(batch_size=None), rounds, common=False)
    mean = begin.mean(axis=0)
    spread = _root_mean_square(begin - mean)
    models = scheme.models(states[-1])
    return Mixing(
        scheme.label,
        tuple(float(np.linalg.norm(s["u"].mean(axis=0) - mean)) / spread for s in states),
        _root_mean_square(models - models.mean(axis=0)) / spread,
        _root_mean_square(models - mean) / spread,
    )


def _limit(scheme: Scheme, problem: Problem, static: bool, step: float, rounds: int) -> Limit:
    topology = scheme.topology(problem.clients, static)
    states = _states(problem, topology, scheme.method, steps(problem, step), rounds, common=True)
    last = states[-max(1, rounds // 4) :]
    return Limit(
        scheme.label,
        static,
        step,
        float(np.mean([np.linalg.norm(s["u"].mean(axis=0) - problem.optimum) for s in last])),
        float(np.mean([_root_mean_square(scheme.models(s) - problem.optimum) for s in last])),
    )


def _states(
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

    descend(
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


def _starts(problem: Problem, topology: Topology) -> Floats:
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
    """Of the lengths of the rows."""
    return float(np.sqrt((vectors**2).sum(axis=1).mean()))
