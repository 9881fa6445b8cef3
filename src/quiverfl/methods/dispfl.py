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
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from quiverfl.errors import QuiverError, nearest
from quiverfl.methods.contract import Message, Moment, Once, Phase, Start, Train, check_epochs
from quiverfl.methods.masks import erk_counts, random_mask, regrown
from quiverfl.task import Point, Task
from quiverfl.trees import Layout


class DisPFLState(NamedTuple):
    u: Tensor
    v: Tensor
    mask_u: Tensor
    mask_v: Tensor
    next_mask_u: Tensor
    next_mask_v: Tensor


@dataclass(frozen=True)
class DisPFL:
    epochs: int = 5
    density: float = 0.5
    prune_rate: float = 0.5
    regrow: Literal["random", "gradient"] = "random"

    name: ClassVar[str] = "dispfl"
    title: ClassVar[str] = "Dis-PFL"
    carries_mass: ClassVar[bool] = False
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)
        if not 0 < self.density <= 1:
            raise QuiverError(f"method.density = {self.density}: it must be in (0, 1].")
        if not 0 <= self.prune_rate <= 1:
            raise QuiverError(f"method.prune_rate = {self.prune_rate}: it must be in [0, 1].")
        if self.regrow not in ("random", "gradient"):
            raise QuiverError(
                f"method.regrow = {self.regrow!r}: {nearest(self.regrow, ('random', 'gradient'))}"
            )

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
        train = Train(
            part="whole",
            epochs=self.epochs,
            point=self.personal,
            absorb=lambda state, point: state._replace(u=point.shared, v=point.personal),
            gradient=lambda gradient, _, state: Point(
                gradient.shared * state.mask_u, gradient.personal * state.mask_v
            ),
        )
        search = Once(
            step=lambda state, moment: self._search(task, state, moment),
            gradient=self.regrow == "gradient",
        )
        return train, search

    def pruning_rate(self, round: int, rounds: int) -> float:
        return self.prune_rate / 2 * (1 + math.cos(math.pi * round / rounds))

    def _search(self, task: Task, state: DisPFLState, moment: Moment) -> DisPFLState:
        """Mask search: prune the smallest, regrow as many, tensor by tensor."""
        scores = moment.noise
        if self.regrow == "gradient":
            assert moment.gradient is not None
            scores = torch.cat(moment.gradient).abs()
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
        # Copies: the masks are sent, and what is sent is given away.
        return DisPFLState(u, v, next_u.clone(), next_v.clone(), next_u, next_v)

    def personal(self, state: DisPFLState) -> Point:
        return Point(state.u, state.v)

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
