"""pFedMe: the personal model solves a proximal problem around w; w moves towards its solutions.

T Dinh, Tran and Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
Algorithm 1.

    paper      here                     meaning
    w_i        (state.u, state.v)       the client's version of the global model, averaged
    θ̃_i        (theta_u, theta_v)       the personal model: what is evaluated
    R          steps                    local rounds, one batch each
    K          inner_steps              steps on that batch towards θ̃
    λ          proximal
    η          Training.lr              of w; θ is stepped with Training.personal_lr

Differences from the paper: β = 1; θ starts every round at the model received, as published code
does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quiverfl.methods.blocks import Weighting, average_leaf, sample_weight, weight_message
from quiverfl.methods.contract import (
    Interleaved,
    Message,
    Method,
    Phase,
    SingleStep,
    Start,
    StepInfo,
    Train,
)
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.options import NotNegative, Number
from quiverfl.task import Params, Task


class PFedMeState(NamedTuple):
    u: Shared  # w
    v: Personal
    theta_u: Shared  # the personal model
    theta_v: Personal
    samples: Scalar


@dataclass(frozen=True)
class PFedMe(Method[PFedMeState]):
    steps: Number = 20
    inner_steps: Number = 5
    proximal: NotNegative = 15.0
    weighting: Weighting = "samples"

    name = "pfedme"
    title = "pFedMe"
    topology = "star"

    def init(self, task: Task, start: Start) -> PFedMeState:
        samples = sample_weight(start, self.weighting)
        return PFedMeState(*start.params, *start.params, samples=samples)

    def phases(self, task: Task) -> tuple[Phase[PFedMeState], ...]:
        begin: SingleStep[PFedMeState] = SingleStep(
            lambda state, _: state._replace(theta_u=state.u, theta_v=state.v)
        )
        solve = Train(
            part="whole",
            params=self.personal,
            update=lambda state, theta: state._replace(
                theta_u=theta.shared, theta_v=theta.personal
            ),
            gradient=self._regularize,
            settings=lambda training: training.with_personal_lr(),
            repeats=self.inner_steps,
        )
        return begin, Interleaved((solve, SingleStep(self._pull)), steps=self.steps)

    def _regularize(self, gradient: Params, theta: Params, state: PFedMeState) -> Params:
        """∇ of h(θ; w) = f(θ) + λ/2 ‖θ - w‖² (equation 5)."""
        return Params(
            gradient.shared + self.proximal * (theta.shared - state.u),
            gradient.personal + self.proximal * (theta.personal - state.v),
        )

    def _pull(self, state: PFedMeState, info: StepInfo) -> PFedMeState:
        """Line 8: w ← w - η λ (w - θ̃)."""
        way = info.lr * self.proximal
        return state._replace(
            u=state.u - way * (state.u - state.theta_u),
            v=state.v - way * (state.v - state.theta_v),
        )

    def message(self, state: PFedMeState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: PFedMeState, mixed: Message) -> PFedMeState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: PFedMeState) -> Params:
        return Params(state.theta_u, state.theta_v)
