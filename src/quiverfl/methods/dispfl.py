"""Masks for sparse training: Erdős–Rényi-kernel densities, pruning and regrowing.

Evci et al., "Rigging the Lottery", ICML 2020: a tensor's density is proportional to the sum of its
dimensions over their product; tensors that would exceed 1 are dense and the rest is solved again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.methods.blocks import model_params, train_whole
from quiverfl.methods.contract import Message, Method, Phase, SingleStep, Start, StepInfo
from quiverfl.methods.state import Personal, Shared
from quiverfl.options import Count, Fraction, UnitInterval
from quiverfl.task import Params, Task
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


def regrow_mask(
    layout: Layout, weights: Tensor, mask: Tensor, scores: Tensor, rate: float
) -> Tensor:
    """Per tensor: drop the smallest fraction `rate` of the kept weights, regrow as many.

    Places that were not kept before come first, those just dropped after them; among equals of
    either, the largest score, then the lowest index.
    """
    parts = [
        _regrow_tensor(weights[part], mask[part] > 0, scores[part], rate)
        for part in layout.slices.values()
    ]
    return torch.cat(parts).to(mask.dtype)


def _regrow_tensor(weights: Tensor, kept: Tensor, scores: Tensor, rate: float) -> Tensor:
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


# Dis-PFL: personal sparse masks, averaged coordinate by coordinate over those who keep it.
#
# Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated Learning via
# Decentralized Sparse Training", ICML 2022, Algorithms 1 and 2.
#
#     paper      here                            meaning
#     w_k        (state.u, state.v)              weights of client k, zero outside its mask
#     m_k        (mask_u, mask_v)                the mask the weights were trained under
#     m_k^{t+1}  (next_mask_u, next_mask_v)      the mask chosen after training, applied at merge
#     α_t        pruning_rate(t)                 (rate/2) (1 + cos(π t / T))
#     c_k        density                         fraction of weights kept
#
# Settled here: random regrowth by default, as the published scripts do, or by the gradient's
# magnitude; the message is (mask ⊙ w, mask) with the mask trained under, so a regrown weight
# starts at its neighbours' average, or 0 where none of them has it.


class DisPFLState(NamedTuple):
    u: Shared
    v: Personal
    mask_u: Shared
    mask_v: Personal
    next_mask_u: Shared
    next_mask_v: Personal


@dataclass(frozen=True)
class DisPFL(Method[DisPFLState]):
    epochs: Count = 5
    density: Fraction = 0.5
    prune_rate: UnitInterval = 0.5
    regrow: Literal["random", "gradient"] = "random"

    name = "dispfl"
    title = "Dis-PFL"
    topology = "random_regular"

    def init(self, task: Task, start: Start) -> DisPFLState:
        """Equal weights times the client's own random mask of Erdős–Rényi-kernel densities."""
        layout = _whole_layout(task)
        counts = erk_counts(layout.shapes, self.density)
        mask = random_mask(layout, counts, start.random).to(start.params.shared)
        mask_u, mask_v = _split_vector(mask, task)
        u, v = start.params.shared * mask_u, start.params.personal * mask_v
        return DisPFLState(u, v, mask_u, mask_v, mask_u, mask_v)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Masked gradients keep masked weights at zero: no other projection is needed."""
        train = train_whole(
            self.epochs,
            gradient=lambda gradient, _, state: Params(
                gradient.shared * state.mask_u, gradient.personal * state.mask_v
            ),
        )
        search: SingleStep[DisPFLState] = SingleStep(
            step=lambda state, info: self._search(task, state, info),
            needs_gradient=self.regrow == "gradient",
            needs_noise=self.regrow == "random",
        )
        return train, search

    def pruning_rate(self, round: int, rounds: int) -> float:
        return self.prune_rate / 2 * (1 + math.cos(math.pi * round / rounds))

    def _search(self, task: Task, state: DisPFLState, info: StepInfo) -> DisPFLState:
        """Mask search: prune the smallest, regrow as many, tensor by tensor."""
        if info.gradient is not None:
            scores = torch.cat(info.gradient).abs()
        else:
            assert info.noise is not None
            scores = info.noise
        rate = self.pruning_rate(info.round, info.rounds)
        mask = regrow_mask(
            _whole_layout(task),
            torch.cat([state.u, state.v]),
            torch.cat([state.mask_u, state.mask_v]),
            scores,
            rate,
        )
        next_u, next_v = _split_vector(mask, task)
        return state._replace(next_mask_u=next_u, next_mask_v=next_v)

    def message(self, state: DisPFLState) -> Message:
        """(mask ⊙ w, mask): the weights are zero outside the mask already."""
        return {"u": state.u, "v": state.v, "mask_u": state.mask_u, "mask_v": state.mask_v}

    def merge(self, state: DisPFLState, mixed: Message) -> DisPFLState:
        """Σ P ⊙ mask ⊙ w / Σ P ⊙ mask, then the own new mask."""
        next_u, next_v = state.next_mask_u, state.next_mask_v
        u = _masked_mean(mixed["u"], mixed["mask_u"]) * next_u
        v = _masked_mean(mixed["v"], mixed["mask_v"]) * next_v
        return DisPFLState(u, v, next_u, next_v, next_u, next_v)

    def personal(self, state: DisPFLState) -> Params:
        return model_params(state)

    def payload(self, message: Message) -> Tensor:
        """The kept weights, and one bit of mask per weight."""
        kept = message["mask_u"].sum() + message["mask_v"].sum()
        bits = message["mask_u"].numel() + message["mask_v"].numel()
        return (kept * message["u"].element_size()).to(torch.int64) + math.ceil(bits / 8)


def _whole_layout(task: Task) -> Layout:
    shared, personal = task.shared_layout, task.personal_layout
    return Layout(shared.names + personal.names, shared.shapes + personal.shapes)


def _split_vector(vector: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    cut = task.shared_layout.size
    return vector[:cut], vector[cut:]


def _masked_mean(total: Tensor, keepers: Tensor) -> Tensor:
    return torch.where(keepers > 0, total / keepers.where(keepers > 0, 1.0), 0.0)
