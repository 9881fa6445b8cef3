"""K-GT: gradient tracking with local steps, by one correction that is kept during them.

Liu, Lin, Koloskova and Stich, "Decentralized Gradient Tracking with Local Steps", Optimization
Methods and Software 2024 (arXiv:2301.01313), Algorithm 1.

    paper      here                     meaning
    x_i        (state.u, state.v)       the model
    c_i        (correction_u, _v)       what local gradients are corrected by; its mean stays 0
    z_i        (progress_u, _v)         (x - y) / (K η_c): mean of the corrected gradients
    K          epochs                   local steps, here epochs
    η_c        Training.lr              of local steps
    η_s        mixing_lr                how much of the local progress is taken
    W          graph.weights            doubly stochastic on an undirected graph

Differences from the paper: c starts at 0, which needs no exchange of gradients before the first
round. With momentum, z is x - y over how far a constant gradient would have moved x, as in
SCAFFOLD's file. z contains clipping and decay. Where columns do not sum to 1, as on `random_pull`,
the mean of c does not stay 0 and the tracking is biased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quiverfl.methods.blocks import model_params
from quiverfl.methods.contract import Message, Method, Start, Train, Trained
from quiverfl.methods.state import Personal, Shared
from quiverfl.options import Count, Positive
from quiverfl.task import Params, Task


class KGTState(NamedTuple):
    u: Shared  # x
    v: Personal
    correction_u: Shared  # c
    correction_v: Personal
    progress_u: Shared  # z, which is sent and not kept
    progress_v: Personal


@dataclass(frozen=True)
class KGT(Method[KGTState]):
    epochs: Count = 5
    mixing_lr: Positive = 1.0

    name = "kgt"
    title = "K-GT"
    topology = "random_regular"

    def init(self, task: Task, start: Start) -> KGTState:
        zero = Params(*(torch.zeros_like(part) for part in start.params))
        return KGTState(*start.params, *zero, *zero)

    def phases(self, task: Task) -> tuple[Train[KGTState], ...]:
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                params=model_params,
                gradient=self._correct_gradient,
                update=self._measure_progress,
            ),
        )

    def _correct_gradient(self, gradient: Params, y: Params, state: KGTState) -> Params:
        """y ← y - η_c (∇F(y) + c)."""
        return Params(gradient.shared + state.correction_u, gradient.personal + state.correction_v)

    def _measure_progress(self, state: KGTState, y: Trained) -> KGTState:
        """z = (x - y) / (K η_c). What is sent of x is x - η_s K η_c z = x - η_s (x - y).

        c - z is kept already, so that the merge needs only what arrives.
        """
        way_u, way_v = state.u - y.shared, state.v - y.personal
        progress_u, progress_v = way_u / y.effective_lr_sum, way_v / y.effective_lr_sum
        return KGTState(
            u=state.u - self.mixing_lr * way_u,
            v=state.v - self.mixing_lr * way_v,
            correction_u=state.correction_u - progress_u,
            correction_v=state.correction_v - progress_v,
            progress_u=progress_u,
            progress_v=progress_v,
        )

    def message(self, state: KGTState) -> Message:
        return {
            "u": state.u,
            "v": state.v,
            "progress_u": state.progress_u,
            "progress_v": state.progress_v,
        }

    def merge(self, state: KGTState, mixed: Message) -> KGTState:
        """x ← Σ w (x - η_s K η_c z); c ← c - z + Σ w z. Who does not train next sends z = 0."""
        return KGTState(
            u=mixed["u"],
            v=mixed["v"],
            correction_u=state.correction_u + mixed["progress_u"],
            correction_v=state.correction_v + mixed["progress_v"],
            progress_u=torch.zeros_like(mixed["progress_u"]),
            progress_v=torch.zeros_like(mixed["progress_v"]),
        )

    def personal(self, state: KGTState) -> Params:
        return model_params(state)
