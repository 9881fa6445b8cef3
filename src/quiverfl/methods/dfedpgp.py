"""DFedPGP: decentralized federated partial gradient push.

Liu et al., "Decentralized Directed Collaboration for Personalized Federated Learning", CVPR 2024.
Line numbers are those of its Algorithm 1 as printed, where `end` lines count.

    paper      here             meaning
    u_i        state.u          shared parameters, as push-sum carries them (biased)
    v_i        state.v          personal parameters: the classifier
    μ_i        state.mu         push-sum weight, 1 at the start
    z_i        debias(u, mu)    u_i / μ_i
    K_v, K_u   personal_epochs, shared_epochs
    η_v, η_u   Training.personal_lr, Training.lr
    p_{j,i}    graph.weights    chosen by the topology, not here

Differences from the paper: K counts epochs, as in its experiments, not single steps. The gradient
at z is applied to u with η, as line 10 says, so z moves by η/μ; `step` and `step_floor` choose
otherwise (push_sum.py). On `random_pull`, which the appendix says the experiments used, rows sum to
1, μ stays 1 and de-biasing does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.contract import Message, Start, Train
from quiverfl.methods.push_sum import PushSumMethod, PushSumState, Step, bias, debias, unit_mass
from quiverfl.options import Count, Positive
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class DFedPGP(PushSumMethod):
    personal_epochs: Count = 1
    shared_epochs: Count = 5
    step_floor: Positive | None = None
    step: Step = "paper"

    name = "dfedpgp"
    title = "DFedPGP"
    topology = "random_push"
    mass = "mu"

    def init(self, task: Task, start: Start) -> PushSumState:
        """Line 1: z⁰ = u⁰, μ⁰ = 1."""
        return PushSumState(*start.params, mu=unit_mass(start))

    def phases(self, task: Task) -> tuple[Train[PushSumState], ...]:
        """Lines 5-8: v at fixed z. Lines 9-12: u at fixed v, its gradient taken at z.

        Stepping u by η is stepping z = u/μ by η/μ (lines 10 and 11): the engine steps z.
        """
        train_personal = Train(
            part="personal",
            epochs=self.personal_epochs,
            params=self.personal,
            update=lambda state, trained: state._replace(v=trained.personal),
            use_personal_lr=True,
            trains_message=False,
        )
        train_shared = Train(
            part="shared",
            epochs=self.shared_epochs,
            params=self.personal,
            update=lambda state, trained: state._replace(u=bias(trained.shared, state.mu)),
            lr_scale=self.step_scale,
        )
        return train_personal, train_shared

    def message(self, state: PushSumState) -> Message:
        """Line 14: what is pushed, before the exchange weighs it with p."""
        return {"u": state.u, "mu": state.mu}

    def merge(self, state: PushSumState, mixed: Message) -> PushSumState:
        """Lines 15-16: the sums of what arrived, with its own share."""
        return state._replace(u=mixed["u"], mu=mixed["mu"])

    def personal(self, state: PushSumState) -> Params:
        """Line 17 and the output: (z, v)."""
        return Params(debias(state.u, state.mu), state.v)
