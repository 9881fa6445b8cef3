"""SCAFFOLD: local steps corrected by control variates, so that clients do not drift apart.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1 with option II. Line numbers are its own.

    paper      here                     meaning
    x          (state.u, state.v)       the model, before training
    y_i        (state.u, state.v)       the model, after training
    c_i        (control_u, _v)          the client's control variate
    c          (server_u, _v)           the server's; every client has a copy
    K η_l      Trained.effective_lr_sum local steps times their rate, for plain SGD
    |S|/N      Trained.active_fraction  of the clients, those who train in this round

Differences from the paper: the global step size is 1. Its option II is made for plain SGD, where
(x - y_i) / (K η_l) is the mean of the steps' gradients. With momentum a gradient keeps moving the
model, up to ten times as far, and the mean is x - y_i over how far a constant gradient would have.
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


class ScaffoldState(NamedTuple):
    u: Shared  # the model
    v: Personal
    control_u: Shared  # c_i, of this client
    control_v: Personal
    server_u: Replicated[Shared]  # c, as this client has it from the server
    server_v: Replicated[Personal]
    change_u: Shared  # what this client adds to c in this round
    change_v: Personal


@dataclass(frozen=True)
class SCAFFOLD(Method[ScaffoldState]):
    epochs: Count = 5

    name = "scaffold"
    title = "SCAFFOLD"
    topology = "star"

    def init(self, task: Task, start: Start) -> ScaffoldState:
        zero = Params(*(torch.zeros_like(part) for part in start.params))
        return ScaffoldState(*start.params, *zero, *zero, *zero)

    def phases(self, task: Task) -> tuple[Train[ScaffoldState], ...]:
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                params=model_params,
                gradient=self._correct_gradient,
                update=self._update_control,
            ),
        )

    def _correct_gradient(self, gradient: Params, y: Params, state: ScaffoldState) -> Params:
        """Line 10: g_i(y_i) - c_i + c."""
        return Params(
            gradient.shared - state.control_u + state.server_u,
            gradient.personal - state.control_v + state.server_v,
        )

    def _update_control(self, state: ScaffoldState, y: Trained) -> ScaffoldState:
        """Line 12, option II: c_i⁺ = c_i - c + (x - y_i) / (K η_l). Line 13: y and c_i⁺ - c_i."""
        change_u = (state.u - y.shared) / y.effective_lr_sum - state.server_u
        change_v = (state.v - y.personal) / y.effective_lr_sum - state.server_v
        return state._replace(
            u=y.shared,
            v=y.personal,
            control_u=state.control_u + change_u,
            control_v=state.control_v + change_v,
            change_u=change_u * y.active_fraction,
            change_v=change_v * y.active_fraction,
        )

    def message(self, state: ScaffoldState) -> Message:
        return {
            "u": state.u,
            "v": state.v,
            "change_u": state.change_u,
            "change_v": state.change_v,
        }

    def merge(self, state: ScaffoldState, mixed: Message) -> ScaffoldState:
        """Lines 16-17: x ← the mean of the y_i; c ← c + (|S|/N) · the mean of the c_i⁺ - c_i."""
        return state._replace(
            u=mixed["u"],
            v=mixed["v"],
            server_u=state.server_u + mixed["change_u"],
            server_v=state.server_v + mixed["change_v"],
            change_u=torch.zeros_like(mixed["change_u"]),
            change_v=torch.zeros_like(mixed["change_v"]),
        )

    def personal(self, state: ScaffoldState) -> Params:
        return model_params(state)
