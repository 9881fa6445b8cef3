"""Push-DIGing: gradient tracking with push-sum, on the whole model.

Nedić, Olshevsky and Shi, "Achieving Geometric Convergence for Distributed Optimization over
Time-Varying Graphs", SIAM Journal on Optimization 2017, Algorithm 2.

    paper      here                  meaning
    u_i        (state.u, state.v)    the model, as push-sum carries it (biased)
    v_i        state.mu              push-sum weight
    x_i        personal(state)       u / v: where the gradient is taken and what is used
    y_i        (track_u, track_v)    tracks the mean gradient of all clients
    ∇f_i       (last_u, last_v)      the client's own gradient of the round before
    α          Training.lr           one gradient a round; momentum has no use here

The paper's update of y after communication is done at the start of the next round: the same thing,
as y⁰ = ∇f(x⁰). Gradients are of one batch; with `batch_size = "all"` they are the paper's. The step
on x = u/v cannot be chosen (push_sum.py): y is pushed with u and grows and shrinks with v as u
does, so x moves by α y/v, about α times the mean gradient; a step of v α y would be too short by v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quiverfl.methods.contract import Message, Method, SingleStep, Start, StepInfo
from quiverfl.methods.push_sum import debias, unit_mass
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.task import Params, Task
from quiverfl.training import Training


class TrackingState(NamedTuple):
    u: Shared  # the model, as push-sum carries it (biased)
    v: Personal
    mu: Scalar
    track_u: Shared  # y, the tracked gradient
    track_v: Personal
    last_u: Shared  # the gradient this client had last
    last_v: Personal


@dataclass(frozen=True)
class PushDIGing(Method[TrackingState]):
    name = "pushdiging"
    title = "Push-DIGing"
    topology = "random_push"
    mass = "mu"
    unused = ("momentum", "nesterov", "optimizer")

    def init(self, task: Task, start: Start) -> TrackingState:
        zero = Params(*(torch.zeros_like(part) for part in start.params))
        return TrackingState(*start.params, unit_mass(start), *zero, *zero)

    def phases(self, task: Task) -> tuple[SingleStep[TrackingState], ...]:
        return (SingleStep(self._track, needs_gradient=True),)

    def _track(self, state: TrackingState, info: StepInfo) -> TrackingState:
        """y ← y + g - g_last; u ← u - α y."""
        assert info.gradient is not None
        g = _whole_gradient(info.gradient, self.personal(state), info.training)
        track_u = state.track_u + g.shared - state.last_u
        track_v = state.track_v + g.personal - state.last_v
        return state._replace(
            u=state.u - info.lr * track_u,
            v=state.v - info.lr * track_v,
            track_u=track_u,
            track_v=track_v,
            last_u=g.shared,
            last_v=g.personal,
        )

    def message(self, state: TrackingState) -> Message:
        return {
            "u": state.u,
            "v": state.v,
            "mu": state.mu,
            "track_u": state.track_u,
            "track_v": state.track_v,
        }

    def merge(self, state: TrackingState, mixed: Message) -> TrackingState:
        return state._replace(**mixed)

    def personal(self, state: TrackingState) -> Params:
        return Params(debias(state.u, state.mu), debias(state.v, state.mu))


def _whole_gradient(gradient: Params, at: Params, training: Training) -> Params:
    """Clipped and decayed as a step would be (docs/reference/methods.md)."""
    factor: Tensor | float = 1.0
    if training.clip_norm is not None:
        norm = torch.linalg.vector_norm(torch.cat(gradient))
        factor = (training.clip_norm / norm).clamp(max=1)
    return Params(
        gradient.shared * factor + training.weight_decay * at.shared,
        gradient.personal * factor + training.weight_decay * at.personal,
    )
