"""DFedSGPSM: push-sum on the whole model, with sharpness-aware local steps and momentum.

Li et al., "Asymmetrically Decentralized Federated Learning", IEEE Transactions on Computers 2025
(arXiv:2310.05093), Algorithm 1.

    paper      here                 meaning
    x_i        (state.u, state.v)   the whole model, as push-sum carries it (biased)
    w_i        state.mu             push-sum weight
    z_i        debias(x, mu)        x_i / w_i: what is used, and where the ascent begins
    ρ          rho                  the gradient at z + ρ g/‖g‖, g = ∇F(z) of the same batch
    α          Training.momentum    local momentum, zero at the start of each round
    K          epochs               local steps, here epochs

It is OSGP without a delay whose gradient is taken uphill. ρ is a distance from z, whatever `step`
says of how far z then moves (push_sum.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import sam_lookahead
from quiverfl.methods.contract import Message, Start, Train
from quiverfl.methods.push_sum import PushSumMethod, PushSumState, Step, bias, debias, unit_mass
from quiverfl.options import Count, NotNegative, Positive
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class DFedSGPSM(PushSumMethod):
    epochs: Count = 5
    rho: NotNegative = 0.05
    step_floor: Positive | None = None
    step: Step = "paper"

    name = "dfedsgpsm"
    title = "DFedSGPSM"
    topology = "random_push"
    mass = "mu"

    def init(self, task: Task, start: Start) -> PushSumState:
        return PushSumState(*start.params, mu=unit_mass(start))

    def phases(self, task: Task) -> tuple[Train[PushSumState], ...]:
        """v ← α v + ∇F(z + ρ g/‖g‖), x ← x - η v, z = x / w after every step."""
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                params=self.personal,
                update=lambda state, z: state._replace(
                    u=bias(z.shared, state.mu), v=bias(z.personal, state.mu)
                ),
                lr_scale=self.step_scale,
                lookahead=sam_lookahead(self.rho),
            ),
        )

    def message(self, state: PushSumState) -> Message:
        return {"u": state.u, "v": state.v, "mu": state.mu}

    def merge(self, state: PushSumState, mixed: Message) -> PushSumState:
        return PushSumState(u=mixed["u"], v=mixed["v"], mu=mixed["mu"])

    def personal(self, state: PushSumState) -> Params:
        return Params(debias(state.u, state.mu), debias(state.v, state.mu))
