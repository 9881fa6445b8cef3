"""Quadratics with a shared and a personal part, all of whose constants are known.

    F_i(u, v) = h_i · [ L_u/2 ‖u - a_i‖² + κ ⟨u - a_i, v - b_i⟩ + L_v/2 ‖v - b_i‖² ]

    paper        here                 meaning
    L_u, L_v     smooth_shared, …     Lipschitz constants: the largest h_i is 1
    L_uv, L_vu   cross                κ = χ √(L_u L_v)
    χ            coupling
    σ_u, σ_v     noise_shared, …      a stochastic gradient is the gradient plus signs · σ/√d: its
                                      mean is the gradient, its squared distance from it is σ²
    σ_g          diversity            largest ‖∇_u F_i - ∇_u F‖ at the optimum
    F^1 - F*     start_gap

The a_i and b_i lie such that the optimum is the same point u = v_i = `optimum` for every client,
although no two of them alone would want the same u. A client has one example, which holds its h, a
and b and places for the noise: zero in the data, drawn at every visit by the data's
augmentation. So an epoch is one stochastic step, K counts steps as in the paper, and F_i, which is
without augmentation, is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import sqrt

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.errors import QuiverError
from quiverfl.methods.dfedpgp import DFedPGP
from quiverfl.runs.simulate import simulate
from quiverfl.seeds import Hashes, stream
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training
from quiverfl.types import Floats


@dataclass(frozen=True)
class Problem:
    """`centre` is how far the optimum is from the origin: there, forgetting to de-bias would do no
    harm. `start` is how far u⁰ and v⁰ are from the optimum, in every client alike, and `apart` how
    far the clients' u⁰ lie from that where each starts from its own (root of the mean square).
    """

    clients: int = 20
    dimension: int = 32
    smooth_shared: float = 1.0
    smooth_personal: float = 2.0
    coupling: float = 0.5
    noise_shared: float = 4.0
    noise_personal: float = 4.0
    diversity: float = 4.0
    centre: float = 1.0
    start: float = 1.0
    apart: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.dimension <= 32:
            raise QuiverError(f"dimension = {self.dimension}: it must be 1 … 32.")

    @property
    def cross(self) -> float:
        return self.coupling * sqrt(self.smooth_shared * self.smooth_personal)

    @property
    def optimum(self) -> float:
        """Every coordinate of the optimal u and of every v_i."""
        return self.centre / sqrt(self.dimension)

    @property
    def beginning(self) -> float:
        """Every coordinate of u⁰ and v⁰."""
        return self.optimum + self.start / sqrt(self.dimension)

    @cached_property
    def curvatures(self) -> Floats:
        """h: from 1/2 to 1, assigned at random."""
        spread = np.linspace(0.5, 1.0, self.clients)
        return stream(self.seed, "theory-curvatures").permutation(spread)

    @cached_property
    def optima(self) -> tuple[Floats, Floats]:
        """(a, b), each [clients, dimension]: where F_i alone would be smallest."""
        h = self.curvatures[:, None]
        shared = stream(self.seed, "theory-optima").standard_normal((self.clients, self.dimension))
        shared -= (h * shared).sum(axis=0) / h.sum()  # then Σ ∇_u F_i = 0 at the optimum
        steepness = self.smooth_shared - self.cross**2 / self.smooth_personal
        largest = np.linalg.norm(h * steepness * shared, axis=1).max()
        shared *= self.diversity / largest
        personal = -self.cross / self.smooth_personal * shared  # then ∇_v F_i = 0 at the optimum
        return self.optimum + shared, self.optimum + personal

    def losses(self, shared: Floats, personal: Floats) -> Floats:
        """F_i of every client at [clients, dimension] points."""
        along, across = shared - self.optima[0], personal - self.optima[1]
        value = self.smooth_shared / 2 * along**2 + self.smooth_personal / 2 * across**2
        value += self.cross * along * across
        losses: Floats = self.curvatures * value.sum(axis=1)
        return losses

    def gradients(self, shared: Floats, personal: Floats) -> tuple[Floats, Floats]:
        """(∇_u F_i, ∇_v F_i) of every client at [clients, dimension] points."""
        along, across = shared - self.optima[0], personal - self.optima[1]
        h = self.curvatures[:, None]
        return (
            h * (self.smooth_shared * along + self.cross * across),
            h * (self.cross * along + self.smooth_personal * across),
        )

    @property
    def start_gap(self) -> float:
        """F(ū¹, V¹) - F*."""
        begin, best = self._fill_clients(self.beginning), self._fill_clients(self.optimum)
        return float((self.losses(begin, begin) - self.losses(best, best)).mean())

    @property
    def start_norms(self) -> tuple[float, float]:
        """(Δ_ū, Δ_v) before the first round, where all clients start alike."""
        begin = self._fill_clients(self.beginning)
        shared, personal = self.gradients(begin, begin)
        return float((shared.mean(axis=0) ** 2).sum()), float((personal**2).sum(axis=1).mean())

    def _fill_clients(self, value: float) -> Floats:
        return np.full((self.clients, self.dimension), value)

    @cached_property
    def task(self) -> Task:
        return Task(partial(Bowl, self), personal=("v",), loss=_identity_loss, metrics={})

    @cached_property
    def data(self) -> FederatedData:
        blank = np.zeros((self.clients, 2 * self.dimension))
        rows = np.concatenate([self.curvatures[:, None], *self.optima, blank], axis=1)
        pairs = [(row[None], np.zeros(1)) for row in rows]
        nothing = [(row[:0], target[:0]) for row, target in pairs]
        noisy = self.noise_shared > 0 or self.noise_personal > 0
        return FederatedData.from_arrays(pairs, nothing, augment=self._noisy if noisy else None)

    def _noisy(self, x: Tensor, keys: Hashes) -> Tensor:
        """Fill the places for the noise: the 64 random bits of a visit are its 2 · 32 signs."""
        width = 2 * self.dimension
        bits = keys[:, None] >> np.arange(width, dtype=np.uint64) & np.uint64(1)
        signs = torch.from_numpy(1.0 - 2.0 * bits.astype(np.float64)).to(x)
        signs[:, : self.dimension] *= self.noise_shared / sqrt(self.dimension)
        signs[:, self.dimension :] *= self.noise_personal / sqrt(self.dimension)
        return torch.cat([x[:, :-width], signs], dim=1)


class Bowl(nn.Module):
    """F_i at (u, v) for the client whose example is given, plus noise · (u, v)."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._problem = problem
        size, own = problem.dimension, problem.apart / sqrt(problem.dimension)
        self.u = nn.Parameter(problem.beginning + own * torch.randn(size))
        self.v = nn.Parameter(torch.full((size,), problem.beginning))

    def forward(self, x: Tensor) -> Tensor:
        problem, size = self._problem, self._problem.dimension
        places = [1, size, size, size, size]
        h, a, b, shared_noise, personal_noise = torch.split(x, places, dim=-1)
        along, across = self.u - a, self.v - b
        value = problem.smooth_shared / 2 * along**2 + problem.smooth_personal / 2 * across**2
        value = value + problem.cross * along * across
        each: Tensor = h * value + shared_noise * self.u + personal_noise * self.v
        return each.sum(dim=-1)


def _identity_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The model's output is the loss already."""
    return outputs


# DFedPGP on a problem, with the step sizes of the corollary.


METHOD = DFedPGP(personal_epochs=1, shared_epochs=2)
"""Epochs per phase, K_v = 1 and K_u = 2; an epoch is one step here."""


def make_training(problem: Problem, length: float) -> Training:
    """η_u L_u K_u = η_v L_v K_v = length."""
    return Training(
        lr=length / (problem.smooth_shared * METHOD.shared_epochs),
        personal_lr=length / (problem.smooth_personal * METHOD.personal_epochs),
        batch_size=None,
    )


def make_corollary_training(problem: Problem, scale: float, rounds: int) -> Training:
    """η_u = c / (L_u K_u √T) and η_v = c / (L_v K_v √T); c is the scale."""
    return make_training(problem, scale / rounds**0.5)


def run_problem(
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


def bounded_error(problem: Problem, records: pd.DataFrame) -> Floats:
    """Δ_ū/L_u + Δ_v/L_v after each round: what the theorem bounds on average."""
    shared = records["gradient_shared"].to_numpy(dtype=np.float64)
    personal = records["gradient_personal"].to_numpy(dtype=np.float64)
    both: Floats = shared / problem.smooth_shared + personal / problem.smooth_personal
    return both
