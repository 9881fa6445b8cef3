"""Gradients of DP-SGD: every sample's is clipped, every batch's sum is blurred."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import DPSGD
from quiverfl.trees import Tree, first_leaf, mapped

OneSample = Callable[[Tree, Tree], Tensor]
"""(inputs [k, 1, …], targets [k, 1, …]) → every client's gradient, [k, parameters]."""


def private_gradient(
    private: DPSGD, of: OneSample, x: Tree, y: Tree, weights: Tensor | None, noise: Noise
) -> Tensor:
    """(Σ min(1, C/‖g_s‖) · g_s + σ C N(0, 1)) / batch, for stacked clients.

    One place of the batch after the other, all clients of it at once: no more memory is taken than
    for a batch, whatever the model. Padding has weight 0.
    """
    width = first_leaf(y).shape[1]
    total: Tensor | None = None
    for place in range(width):
        one_x, one_y = (mapped(lambda t, s=place: t[:, s : s + 1], part) for part in (x, y))
        found = of(one_x, one_y)
        norms = torch.linalg.vector_norm(found, dim=1, keepdim=True)
        factors = torch.clamp(private.clip / norms.clamp_min(1e-300), max=1.0)
        if weights is not None:
            factors = factors * weights[:, place : place + 1]
        total = found * factors if total is None else total.addcmul_(found, factors)
    assert total is not None
    counts = width if weights is None else weights.sum(dim=1, keepdim=True)
    return (total + private.noise * private.clip * noise.like("gradient", total)) / counts
