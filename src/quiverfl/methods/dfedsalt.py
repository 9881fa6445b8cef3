"""DFedSalt: DFedAlt with sharpness-aware steps on the shared part.

Shi et al., "Towards More Suitable Personalization in Federated Learning via Decentralized Partial
Model Training", 2023 (arXiv:2305.15157). Its Algorithm 1, DFedAlt, is `dfedavgmp`: v, then u, then
u is averaged with the neighbours. Algorithm 2, DFedSalt, takes the gradient of u uphill.

    paper      here             meaning
    u_i        state.u          shared parameters, mixed on an undirected graph
    v_i        state.v          personal parameters, which stay
    K_v, K_u   personal_epochs, shared_epochs
    ρ          rho              radius: ∇_u F(u + ρ g/‖g‖, v) with g = ∇_u F(u, v) of the same batch

Difference from the paper: K counts epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import model_params, sam_lookahead, train_personal, train_shared
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.methods.state import Model
from quiverfl.options import Count, NotNegative
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class DFedSalt(Method[Model]):
    personal_epochs: Count = 1
    shared_epochs: Count = 5
    rho: NotNegative = 0.05

    name = "dfedsalt"
    title = "DFedSalt"
    topology = "random_regular"

    def init(self, task: Task, start: Start) -> Model:
        return Model(*start.params)

    def phases(self, task: Task) -> tuple[Train, ...]:
        """K_v steps of v at fixed u, then K_u perturbed steps of u at the new v."""
        uphill = sam_lookahead(self.rho)
        return train_personal(self.personal_epochs), train_shared(
            self.shared_epochs, lookahead=uphill
        )

    def message(self, state: Model) -> Message:
        return {"u": state.u}

    def merge(self, state: Model, mixed: Message) -> Model:
        return Model(u=mixed["u"], v=state.v)

    def personal(self, state: Model) -> Params:
        return model_params(state)
