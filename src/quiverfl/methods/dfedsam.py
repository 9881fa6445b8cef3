"""DFedSAM: decentralized federated averaging with sharpness-aware local steps.

Shi et al., "Improving the Model Consistency of Decentralized Federated Learning", ICML 2023,
Algorithm 1 with one gossip step a round (not MGS).

    paper      here                 meaning
    x(i)       (state.u, state.v)   the whole model of client i
    ρ          rho                  radius of the perturbation
    W          graph.weights        symmetric and doubly stochastic on an undirected graph
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import model_params, sam_lookahead, train_whole
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.methods.state import Model
from quiverfl.options import Count, NotNegative
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class DFedSAM(Method[Model]):
    epochs: Count = 5
    rho: NotNegative = 0.05

    name = "dfedsam"
    title = "DFedSAM"
    topology = "random_regular"

    def init(self, task: Task, start: Start) -> Model:
        return Model(*start.params)

    def phases(self, task: Task) -> tuple[Train, ...]:
        """Lines 5-9: the gradient at y + ρ g/‖g‖, the step from y."""
        return (train_whole(self.epochs, lookahead=sam_lookahead(self.rho)),)

    def message(self, state: Model) -> Message:
        return {"u": state.u, "v": state.v}

    def merge(self, state: Model, mixed: Message) -> Model:
        return Model(u=mixed["u"], v=mixed["v"])

    def personal(self, state: Model) -> Params:
        return model_params(state)
