"""What the push-sum methods share: the state (u, v, μ) and de-biasing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quiverfl.methods.contract import Start
from quiverfl.methods.state import Personal, Scalar, Shared


class PushSumState(NamedTuple):
    """μ stays exactly 1 where the rows of P sum to 1."""

    u: Shared  # shared parameters, as push-sum carries them (biased)
    v: Personal  # personal parameters
    mu: Scalar  # push-sum weight, in float64


def unit_mass(start: Start) -> Tensor:
    """μ⁰ = 1, so that z⁰ = u⁰."""
    return torch.ones((), dtype=torch.float64, device=start.point.shared.device)


def debias(biased: Tensor, mu: Tensor) -> Tensor:
    """z = u / μ."""
    return biased / mu.to(biased.dtype)


def bias(debiased: Tensor, mu: Tensor) -> Tensor:
    """u = μ · z."""
    return debiased * mu.to(debiased.dtype)


def step_scale(mu: Tensor, floor: float | None) -> Tensor:
    """u moves by η, so z = u/μ moves by η/μ; a floor bounds that by η/floor."""
    return 1 / (mu if floor is None else mu.clamp(min=floor))
