"""What the push-sum methods share: the state (u, v, μ) and de-biasing."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Start


class PushSumState(NamedTuple):
    """μ stays exactly 1 where the rows of P sum to 1."""

    u: Tensor  # shared parameters, as push-sum carries them (biased)
    v: Tensor  # personal parameters
    mu: Tensor  # push-sum weight, a scalar in float64


def started(start: Start) -> PushSumState:
    """μ⁰ = 1, so that z⁰ = u⁰."""
    one = torch.ones((), dtype=torch.float64, device=start.point.shared.device)
    return PushSumState(u=start.point.shared, v=start.point.personal, mu=one)


def debias(biased: Tensor, mu: Tensor) -> Tensor:
    """z = u / μ."""
    return biased / mu.to(biased.dtype)


def bias(debiased: Tensor, mu: Tensor) -> Tensor:
    """u = μ · z."""
    return debiased * mu.to(debiased.dtype)


def step_scale(mu: Tensor, floor: float | None) -> Tensor:
    """u moves by η, so z = u/μ moves by η/μ; a floor bounds that by η/floor."""
    return 1 / (mu if floor is None else mu.clamp(min=floor))


def check_floor(floor: float | None) -> None:
    if floor is not None and not floor > 0:
        raise QuiverError(f"method.step_floor = {floor}: it must be positive, or left out.")
