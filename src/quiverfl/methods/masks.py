"""Masks for sparse training: Erdős–Rényi-kernel densities, pruning and regrowing.

Evci et al., "Rigging the Lottery", ICML 2020: a tensor's density is proportional to the sum of its
dimensions over their product; tensors that would exceed 1 are dense and the rest is solved again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.trees import Layout


def erk_counts(shapes: Sequence[tuple[int, ...]], density: float) -> list[int]:
    """How many weights of each tensor are kept; vectors and scalars are dense and count."""
    sizes = [math.prod(shape) for shape in shapes]
    dense = {i for i, shape in enumerate(shapes) if len(shape) <= 1}
    budget = density * sum(sizes)
    while True:
        left = budget - sum(sizes[i] for i in dense)
        if left < 0 and density < 1:
            raise QuiverError(
                f"method.density = {density}: the tensors that must be dense (biases and norms "
                f"among them) already hold {sum(sizes[i] for i in dense)} of {sum(sizes)} "
                "weights; choose a larger density."
            )
        sparse = [i for i in range(len(sizes)) if i not in dense]
        raw = {i: sum(shapes[i]) / sizes[i] for i in sparse}
        total = sum(raw[i] * sizes[i] for i in sparse)
        scale = left / total if sparse else 0.0
        exceeding = {i for i in sparse if scale * raw[i] > 1}
        if not exceeding:
            break
        dense |= exceeding
    return [sizes[i] if i in dense else round(scale * raw[i] * sizes[i]) for i in range(len(sizes))]


def random_mask(layout: Layout, counts: Sequence[int], random: np.random.Generator) -> Tensor:
    """Ones at `counts` random places of each tensor."""
    mask = torch.zeros(layout.size)
    for (_, part), size, count in zip(layout.slices.items(), layout.sizes, counts, strict=True):
        mask[part][torch.from_numpy(random.permutation(size)[:count])] = 1
    return mask


def regrown(layout: Layout, weights: Tensor, mask: Tensor, scores: Tensor, rate: float) -> Tensor:
    """Per tensor: drop the smallest share `rate` of the kept weights, regrow as many.

    Places that were not kept before come first, those just dropped after them; among equals of
    either, the largest score, then the lowest index.
    """
    parts = [
        _regrown_tensor(weights[part], mask[part] > 0, scores[part], rate)
        for part in layout.slices.values()
    ]
    return torch.cat(parts).to(mask.dtype)


def _regrown_tensor(weights: Tensor, kept: Tensor, scores: Tensor, rate: float) -> Tensor:
    """By ranks and not by lists of places, so that all clients can be computed together."""
    count = torch.ceil(rate * kept.sum(dtype=torch.float64) - 1e-9)
    dropped = kept & (_rank(torch.where(kept, weights.abs(), math.inf)) < count)
    by_score = torch.argsort(scores, descending=True, stable=True)
    turn = torch.where(kept, torch.where(dropped, 1, 2), 0)  # not kept before, just dropped, kept
    order = by_score[torch.argsort(turn[by_score], stable=True)]
    grown = torch.argsort(order) < count
    return (kept & ~dropped) | grown


def _rank(values: Tensor) -> Tensor:
    """The place of every value in ascending order; among equals the lower index is first."""
    return torch.argsort(torch.argsort(values, stable=True))
