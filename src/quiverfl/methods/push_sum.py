"""Push-sum: the state (u, v, μ), de-biasing, and the step on z.

    step          z = u/μ moves by      u moves by
    "paper"       η/μ · g               η · g       as DFedPGP's line 10 and SGP have it
    "debiased"    η · g                 μη · g

g is the direction of a step: clipped gradient, decay and momentum. The two steps are equal where
μ = 1. Under "debiased" a client trains z as it would without push-sum: one step decays z by
η · weight_decay (η/μ · weight_decay under "paper"), momentum adds up gradients at z with weight 1,
and SAM's radius ρ is a distance from z under both. How far z moves then depends on η and on the
data, never on how much mass a client happens to hold; in the sum Σu a client counts by its mass.
The paper's step is the default, except for peers that wait for nobody (peer/step_choice.py).
`step_floor` bounds μ in the paper's quotient, η/max(μ, floor): with 1, z moves by at most η.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method, Start
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.options import Positive, resolve_annotations

Step: TypeAlias = Literal["paper", "debiased"]
"""What a step of size η does to z = u/μ."""


class PushSumState(NamedTuple):
    """μ stays exactly 1 where the rows of P sum to 1."""

    u: Shared  # shared parameters, as push-sum carries them (biased)
    v: Personal  # personal parameters
    mu: Scalar  # push-sum weight, in float64


def unit_mass(start: Start) -> Tensor:
    """μ⁰ = 1, so that z⁰ = u⁰."""
    return torch.ones((), dtype=torch.float64, device=start.params.shared.device)


def debias(biased: Tensor, mu: Tensor) -> Tensor:
    """z = u / μ."""
    return biased / mu.to(biased.dtype)


def bias(debiased: Tensor, mu: Tensor) -> Tensor:
    """u = μ · z."""
    return debiased * mu.to(debiased.dtype)


class PushSumMethod(Method[PushSumState]):
    """A method that trains z, and has the options `step` and `step_floor`."""

    step: Step
    step_floor: Positive | None

    def __post_init__(self) -> None:
        """Refuse a floor under a quotient that is not formed."""
        super().__post_init__()
        if self.step == "debiased" and self.step_floor is not None:
            raise QuiverError(
                f"method.step_floor = {self.step_floor}: it bounds μ in the paper's step η/μ; with "
                'step = "debiased" nothing is divided by μ. Leave one of them out.'
            )

    def step_scale(self, state: PushSumState) -> Tensor:
        """How many η a step moves z: 1/μ, bounded by 1/floor if there is one; or 1."""
        mu, floor = state.mu, self.step_floor
        if self.step == "debiased":
            return torch.ones_like(mu)
        return 1 / (mu if floor is None else mu.clamp(min=floor))


def offers_step(kind: Any) -> bool:
    """Whether a method's class has the option `step: Step`."""
    return isinstance(kind, type) and resolve_annotations(kind).get("step") == Step
