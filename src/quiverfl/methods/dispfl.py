"""Dis-PFL: personal sparse masks, averaged coordinate by coordinate over those who keep it.

Dai et al., "DisPFL: Towards Communication-Efficient Personalized Federated Learning via
Decentralized Sparse Training", ICML 2022, Algorithms 1 and 2.

    paper      here                            meaning
    w_k        (state.u, state.v)              weights of client k, zero outside its mask
    m_k        (mask_u, mask_v)                the mask the weights were trained under
    m_k^{t+1}  (next_mask_u, next_mask_v)      the mask chosen after training, applied at the merge
    α_t        pruning_rate(t)                 (rate/2) (1 + cos(π t / T))
    c_k        density                         share of weights kept

Settled here: random regrowth by default, as the published scripts do, or by the gradient's
magnitude; the message is (mask ⊙ w, mask) with the mask trained under, so a regrown weight starts
at its neighbours' average, or 0 where none of them has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quiverfl.methods.contract import Message, Method, Moment, Once, Phase, Start
from quiverfl.methods.masks import erk_counts, random_mask, regrown
from quiverfl.methods.options import Count, Fraction, UnitInterval
from quiverfl.methods.parts import model, train_whole
from quiverfl.methods.state import Personal, Shared
from quiverfl.task import Point, Task
from quiverfl.trees import Layout


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
        layout = _whole(task)
        counts = erk_counts(layout.shapes, self.density)
        mask = random_mask(layout, counts, start.random).to(start.point.shared)
        mask_u, mask_v = _halves(mask, task)
        u, v = start.point.shared * mask_u, start.point.personal * mask_v
        return DisPFLState(u, v, mask_u, mask_v, mask_u, mask_v)

    def phases(self, task: Task) -> tuple[Phase, ...]:
        """Masked gradients keep masked weights at zero: no other projection is needed."""
        train = train_whole(
            self.epochs,
            gradient=lambda gradient, _, state: Point(
                gradient.shared * state.mask_u, gradient.personal * state.mask_v
            ),
        )
        search: Once[DisPFLState] = Once(
            step=lambda state, moment: self._search(task, state, moment),
            gradient=self.regrow == "gradient",
            noise=self.regrow == "random",
        )
        return train, search

    def pruning_rate(self, round: int, rounds: int) -> float:
        return self.prune_rate / 2 * (1 + math.cos(math.pi * round / rounds))

    def _search(self, task: Task, state: DisPFLState, moment: Moment) -> DisPFLState:
        """Mask search: prune the smallest, regrow as many, tensor by tensor."""
        if moment.gradient is not None:
            scores = torch.cat(moment.gradient).abs()
        else:
            assert moment.noise is not None
            scores = moment.noise
        rate = self.pruning_rate(moment.round, moment.rounds)
        mask = regrown(
            _whole(task),
            torch.cat([state.u, state.v]),
            torch.cat([state.mask_u, state.mask_v]),
            scores,
            rate,
        )
        next_u, next_v = _halves(mask, task)
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

    def personal(self, state: DisPFLState) -> Point:
        return model(state)

    def payload(self, message: Message) -> Tensor:
        """The kept weights, and one bit of mask per weight."""
        kept = message["mask_u"].sum() + message["mask_v"].sum()
        bits = message["mask_u"].numel() + message["mask_v"].numel()
        return (kept * message["u"].element_size()).to(torch.int64) + math.ceil(bits / 8)


def _whole(task: Task) -> Layout:
    shared, personal = task.shared_layout, task.personal_layout
    return Layout(shared.names + personal.names, shared.shapes + personal.shapes)


def _halves(vector: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    cut = task.shared_layout.size
    return vector[:cut], vector[cut:]


def _masked_mean(total: Tensor, keepers: Tensor) -> Tensor:
    return torch.where(keepers > 0, total / keepers.where(keepers > 0, 1.0), 0.0)
