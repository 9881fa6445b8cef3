"""Scaffold-P: SCAFFOLD's control variates for the shared part, beside a personal part that stays.

Chen, Cao, Yuan and Wen, "Sharper Convergence Guarantees for Federated Learning with Partial Model
Personalization", 2023.

    paper      here             meaning
    x          state.u          shared parameters, averaged over the sampled clients
    y_i        state.v          personal parameters, which stay and persist
    c_i, c     control, server  control variates of the client, and of the server as it knows them

u and v take joint steps, v's plain and u's with the gradient g - c_i + c. c_i is then SCAFFOLD's
option II over u: c_i - c + how far u moved, per unit of what a constant gradient would have moved
it. Differences from the paper: the global step size is 1, and with momentum that unit is not K η
(see SCAFFOLD's file).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quiverfl.methods.blocks import model_params
from quiverfl.methods.contract import Message, Method, Start, Train, Trained
from quiverfl.methods.state import Personal, Replicated, Shared
from quiverfl.options import Count
from quiverfl.task import Params, Task


class ScaffoldPState(NamedTuple):
    u: Shared
    v: Personal
    control: Shared  # c_i, of this client
    server: Replicated[Shared]  # c, as this client has it from the server
    change: Shared  # what this client adds to c in this round


@dataclass(frozen=True)
class ScaffoldP(Method[ScaffoldPState]):
    epochs: Count = 5

    name = "scaffoldp"
    title = "Scaffold-P"
    topology = "star"

    def init(self, task: Task, start: Start) -> ScaffoldPState:
        zero = torch.zeros_like(start.params.shared)
        return ScaffoldPState(*start.params, zero, zero, zero)

    def phases(self, task: Task) -> tuple[Train[ScaffoldPState], ...]:
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                params=model_params,
                gradient=self._correct_gradient,
                update=self._update_control,
                use_personal_lr=True,
            ),
        )

    def _correct_gradient(self, gradient: Params, at: Params, state: ScaffoldPState) -> Params:
        return gradient._replace(shared=gradient.shared - state.control + state.server)

    def _update_control(self, state: ScaffoldPState, trained: Trained) -> ScaffoldPState:
        change = (state.u - trained.shared) / trained.effective_lr_sum - state.server
        return state._replace(
            u=trained.shared,
            v=trained.personal,
            control=state.control + change,
            change=change * trained.active_fraction,
        )

    def message(self, state: ScaffoldPState) -> Message:
        return {"u": state.u, "change": state.change}

    def merge(self, state: ScaffoldPState, mixed: Message) -> ScaffoldPState:
        """u ← the mean of the trained u; c ← c + (|S|/N) · the mean of the c_i⁺ - c_i."""
        return state._replace(
            u=mixed["u"],
            server=state.server + mixed["change"],
            change=torch.zeros_like(mixed["change"]),
        )

    def personal(self, state: ScaffoldPState) -> Params:
        return model_params(state)
