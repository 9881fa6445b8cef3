"""DePRL: the head takes τ steps, the representation one, and representations are averaged.

Xiong et al., "DePRL: Achieving Linear Convergence Speedup in Personalized Decentralized Learning
with Shared Representations", AAAI 2024 (arXiv:2312.10815), Algorithm 1.

    paper      here                   meaning
    φ_i        state.u                the representation, mixed with the neighbours
    θ_i        state.v                the local head, which stays
    τ          personal_steps         steps of θ at fixed φ
    α, β       Training.lr, Training.personal_lr
    P          graph.weights          doubly stochastic on an undirected graph

The paper takes one step of φ a round. `shared_steps` takes more of them, so that a round need not
be that short. Steps are counted, not epochs: `dfedavgmp` is the same in epochs.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import model_params, train_personal, train_shared
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.methods.state import Model
from quiverfl.options import Number
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class DePRL(Method[Model]):
    personal_steps: Number = 5
    shared_steps: Number = 1

    name = "deprl"
    title = "DePRL"
    topology = "random_regular"

    def init(self, task: Task, start: Start) -> Model:
        return Model(*start.params)

    def phases(self, task: Task) -> tuple[Train, ...]:
        """θ(k+1) by τ steps at φ(k); φ(k+½) by a step whose gradient is taken at θ(k+1)."""
        return train_personal(None, steps=self.personal_steps), train_shared(
            None, steps=self.shared_steps
        )

    def message(self, state: Model) -> Message:
        return {"u": state.u}

    def merge(self, state: Model, mixed: Message) -> Model:
        """φ_i(k+1) ← Σ_j P_ij φ_j(k+½)."""
        return Model(u=mixed["u"], v=state.v)

    def personal(self, state: Model) -> Params:
        return model_params(state)
