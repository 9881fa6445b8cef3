"""DFedPGP on a problem, with the step sizes of the corollary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.simulate import simulate
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.paper.theory.problem import Problem
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training

Floats = npt.NDArray[np.float64]

METHOD = DFedPGP(personal_epochs=1, shared_epochs=2)
"""K_v = 1 and K_u = 2: here an epoch is one step."""


def steps(problem: Problem, length: float) -> Training:
    """η_u L_u K_u = η_v L_v K_v = length."""
    return Training(
        lr=length / (problem.smooth_shared * METHOD.shared_epochs),
        personal_lr=length / (problem.smooth_personal * METHOD.personal_epochs),
        batch_size=None,
    )


def corollary_steps(problem: Problem, scale: float, rounds: int) -> Training:
    """η_u = c / (L_u K_u √T) and η_v = c / (L_v K_v √T); c is the scale."""
    return steps(problem, scale / rounds**0.5)


def descend(
    problem: Problem,
    topology: Topology,
    training: Training,
    rounds: int,
    *,
    method: DFedPGP = METHOD,
    seed: int = 0,
    common_init: bool = True,
    gradients: bool = True,
    checkpoint: Callable[[Checkpoint], None] | None = None,
) -> pd.DataFrame:
    """The records of the rounds; `checkpoint` is shown the state after each of them."""
    run = simulate(
        problem.task,
        problem.data,
        method=method,
        topology=topology,
        training=training,
        rounds=rounds,
        seed=seed,
        dtype=torch.float64,
        threads=1,
        executor="vectorized",
        common_init=common_init,
        evaluate_every=1 if gradients else rounds,
        keep_local=False,
        gradients=gradients,
        checkpoint=checkpoint,
        checkpoint_every=1,
    )
    return run.rounds


def bounded(problem: Problem, records: pd.DataFrame) -> Floats:
    """Δ_ū/L_u + Δ_v/L_v after each round: what the theorem bounds on average."""
    shared = records["gradient_shared"].to_numpy(dtype=np.float64)
    personal = records["gradient_personal"].to_numpy(dtype=np.float64)
    both: Floats = shared / problem.smooth_shared + personal / problem.smooth_personal
    return both
