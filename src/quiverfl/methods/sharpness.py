"""Sharpness-aware minimisation: the gradient is taken where the loss is worst nearby.

Foret et al., "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021,
equation 2: ε = ρ ∇L(w) / ‖∇L(w)‖.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quiverfl.methods.contract import Lookahead
from quiverfl.task import Point


def ascend(rho: float) -> Lookahead:
    """To p + ρ g/‖g‖, the norm over what is trained; p where g is 0."""

    def to(gradient: Point, point: Point, state: object) -> Point:
        norm = torch.linalg.vector_norm(torch.cat(gradient))
        factor = torch.where(norm > 0, rho / norm, 0.0)
        return Point(
            _moved(point.shared, gradient.shared, factor),
            _moved(point.personal, gradient.personal, factor),
        )

    return Lookahead(to)


def _moved(values: Tensor, gradient: Tensor, factor: Tensor) -> Tensor:
    """A part that is not trained has an empty gradient and stays."""
    return values + factor * gradient if len(gradient) else values
