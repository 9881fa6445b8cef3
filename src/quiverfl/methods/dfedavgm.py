"""DFedAvgM: decentralized federated averaging with momentum.

Sun, Li and Wang, "Decentralized Federated Averaging", TPAMI 2022, Algorithm 1 (not quantised).

    paper      here                 meaning
    x(i)       (state.u, state.v)   the whole model of client i
    K          epochs               local steps, here epochs
    θ          Training.momentum    heavy ball, zero at the start of each round
    W          graph.weights        symmetric and doubly stochastic on an undirected graph
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import model_params, train_whole
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.methods.state import Model
from quiverfl.options import Count
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class DFedAvgM(Method[Model]):
    epochs: Count = 5

    name = "dfedavgm"
    title = "DFedAvgM"
    topology = "random_regular"

    def init(self, task: Task, start: Start) -> Model:
        return Model(*start.params)

    def phases(self, task: Task) -> tuple[Train, ...]:
        return (train_whole(self.epochs),)

    def message(self, state: Model) -> Message:
        return {"u": state.u, "v": state.v}

    def merge(self, state: Model, mixed: Message) -> Model:
        """x(i) ← Σ_l w_{i,l} z(l)."""
        return Model(u=mixed["u"], v=mixed["v"])

    def personal(self, state: Model) -> Params:
        return model_params(state)
