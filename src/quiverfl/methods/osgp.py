"""OSGP: (overlap) stochastic gradient push on the whole model.

Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, Algorithms 1
and 2.

    paper      here                 meaning
    x_i        (state.u, state.v)   the whole model, as push-sum carries it (biased)
    w_i        state.mu             push-sum weight
    z_i        debias(x, mu)        x_i / w_i: where the gradient is taken and what is used
    τ          delay                rounds a message from another client takes

`delay=0` is SGP, which the DFedPGP paper's row "OSGP" is: the directed version of DFedAvg, with
local epochs. With a delay, μ < 1 between sending and absorbing, and messages in flight are part of
the conserved mass. Differences from Assran et al.: local epochs in place of single steps; a message
is absorbed exactly `delay` rounds later, nothing is drained at the end. `step = "debiased"` moves z
by η in place of η/w, and x by wη (push_sum.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.contract import Message, Start, Train
from quiverfl.methods.push_sum import PushSumMethod, PushSumState, Step, bias, debias, unit_mass
from quiverfl.options import Count, Positive
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class OSGP(PushSumMethod):
    epochs: Count = 5
    delay: Count = 0
    step_floor: Positive | None = None
    step: Step = "paper"

    name = "osgp"
    title = "OSGP"
    topology = "random_push"
    mass = "mu"

    def init(self, task: Task, start: Start) -> PushSumState:
        return PushSumState(*start.params, mu=unit_mass(start))

    def phases(self, task: Task) -> tuple[Train[PushSumState], ...]:
        """x ← x - η ∇F(z), z = x / w recomputed after every step; or x ← x - wη ∇F(z)."""
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                params=self.personal,
                update=lambda state, z: state._replace(
                    u=bias(z.shared, state.mu), v=bias(z.personal, state.mu)
                ),
                lr_scale=self.step_scale,
            ),
        )

    def message(self, state: PushSumState) -> Message:
        return {"u": state.u, "v": state.v, "mu": state.mu}

    def merge(self, state: PushSumState, mixed: Message) -> PushSumState:
        return PushSumState(u=mixed["u"], v=mixed["v"], mu=mixed["mu"])

    def personal(self, state: PushSumState) -> Params:
        return Params(debias(state.u, state.mu), debias(state.v, state.mu))
