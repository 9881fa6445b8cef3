"""Gradients of DP-SGD: every sample's is clipped, every batch's sum is blurred."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import DPSGD
from quiverfl.trees import Tree, first_leaf, mapped

OfSamples = Callable[[Tree, Tree], Tensor]
"""(inputs [k, n, …], targets [k, n, …]) → the gradient of every sample, [k, n, parameters]."""


def private_gradient(
    private: DPSGD,
    of: OfSamples,
    together: int,
    x: Tree,
    y: Tree,
    weights: Tensor | None,
    noise: Noise,
) -> Tensor:
    """(Σ min(1, C/‖g_s‖) · g_s + σ C N(0, 1)) / batch, for stacked clients.

    So many places of the batch `together`, all clients of them at once. Padding has weight 0.
    """
    width = first_leaf(y).shape[1]
    total: Tensor | None = None
    for begin in range(0, width, together):
        places = slice(begin, begin + together)
        some_x, some_y = (mapped(lambda t, s=places: t[:, s], part) for part in (x, y))
        found = of(some_x, some_y)
        norms = torch.linalg.vector_norm(found, dim=2)
        factors = torch.clamp(private.clip / norms.clamp_min(1e-300), max=1.0)
        if weights is not None:
            factors = factors * weights[:, places]
        # One after the other, so that sums do not depend on how many there are.
        for one, factor in zip(found.unbind(1), factors.unsqueeze(2).unbind(1), strict=True):
            total = one * factor if total is None else total.addcmul_(one, factor)
    assert total is not None
    counts = width if weights is None else weights.sum(dim=1, keepdim=True)
    return (total + private.noise * private.clip * noise.like("gradient", total)) / counts
