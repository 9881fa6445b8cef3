"""Differential privacy: clipping, noise, and what they guarantee.

The guarantee is (ε, δ)-differential privacy by Rényi accounting of the Gaussian mechanism, with the
accountant of Opacus. No amplification by sampling is claimed: which clients talk is public, and
batches are shuffled epochs, not Poisson samples. docs/how-to/privacy.md says against whom it holds.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.options import Positive, check_options
from quiverfl.support.environment import require_package
from quiverfl.transforms.noise import Noise, expand_rows, message_norms
from quiverfl.types import Floats, Integers

Message = dict[str, Tensor]
ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(12, 64), 128, 256, 512, 1024)
"""Orders of the Rényi divergence: Opacus' own, and a few more for little noise."""


@dataclass(frozen=True)
class _Gaussian:
    """Clips to `clip` and adds Gaussian noise of standard deviation `noise` · `clip`."""

    clip: Positive = 1.0
    noise: Positive = 1.0
    delta: Positive = 1e-5
    epsilon_budget: Positive | None = None

    def __post_init__(self) -> None:
        check_options(self, "privacy")
        if self.delta >= 1:
            raise QuiverError(f"privacy.delta = {self.delta!r}: it must be below 1.")


@dataclass(frozen=True)
class UpdatePrivacy(_Gaussian):
    """Every update that leaves a client is clipped to `clip`; noise of `noise` times that is added.

    before + min(1, clip/‖sent - before‖) · (sent - before) + noise · clip · N(0, 1), over all the
    parameters that it sends together. A client's whole part in a round is protected.
    """

    name = "update"

    def privatize(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        """Private messages in place of `sent`; rows are independent."""
        update = {name: sent[name] - before[name] for name in before}
        factors = torch.clamp(self.clip / message_norms(update).clamp_min(1e-300), max=1.0)
        private = dict(sent)
        for name, leaf in update.items():
            added = self.noise * self.clip * noise.draw_like(name, leaf)
            private[name] = before[name] + expand_rows(factors, leaf) * leaf + added
        return private


@dataclass(frozen=True)
class DPSGD(_Gaussian):
    """Every sample's gradient is clipped to `clip`; noise of `noise` times that joins each batch.

    (Σ min(1, clip/‖g_s‖) · g_s + noise · clip · N(0, 1)) / batch, in every phase of training, the
    personal ones too: what is sent depends on all of them. A single sample is protected. Batches of
    an epoch are disjoint, so that an epoch is one release of every sample; no amplification by
    sampling is claimed, as they are no Poisson samples.
    """

    name = "dp_sgd"


class BudgetSpent(QuiverError):
    """The next release would cost more than the budget. Nothing of it was sent."""

    def __init__(self, round: int, client: int, epsilon: float, budget: float) -> None:
        super().__init__(
            f"round {round}, client {client}: what it would send next costs ε = {epsilon:.3g}, and "
            f"privacy.epsilon_budget = {budget:g}. Nothing of this round was sent; what was "
            "recorded before it is kept. Raise privacy.noise, or plan fewer rounds."
        )
        self.round, self.client = round, client


@cache
def epsilon(releases: int, noise: float, delta: float) -> float:
    """ε at δ after this many releases of the Gaussian mechanism, by Opacus' RDP accountant."""
    if releases == 0:
        return 0.0
    require_package("privacy", "differential privacy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an order at the end of the list still gives a bound
        from opacus.accountants.analysis import rdp

        spent = rdp.compute_rdp(q=1.0, noise_multiplier=noise, steps=releases, orders=ORDERS)
        value, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=delta)
    return float(value)


def enforce_budget(
    releases: Integers, privacy: UpdatePrivacy | DPSGD, round: int, clients: Integers
) -> None:
    """Refuse releases that would cost any of these clients more than the budget."""
    budget, largest = privacy.epsilon_budget, int(releases.max(initial=0))
    if budget is None or largest <= affordable(budget, privacy.noise, privacy.delta):
        return
    most, cost = int(releases.argmax()), epsilon(largest, privacy.noise, privacy.delta)
    raise BudgetSpent(round, int(clients[most]), cost, budget)


def affordable(budget: float, noise: float, delta: float) -> int:
    """Number of releases that a budget pays for."""
    if epsilon(1, noise, delta) > budget:
        return 0
    low, high = 1, 2
    while epsilon(high, noise, delta) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if epsilon(middle, noise, delta) <= budget else (low, middle)
    return low


def spent_epsilon(releases: Integers, privacy: UpdatePrivacy | DPSGD) -> Floats:
    """ε of every client after its releases."""
    counts, own = np.unique(releases, return_inverse=True)
    values = [epsilon(int(count), privacy.noise, privacy.delta) for count in counts]
    return np.asarray(values, dtype=np.float64)[own]
