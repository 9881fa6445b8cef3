"""FedAvg: federated averaging of the whole model over a star.

McMahan et al., AISTATS 2017, Algorithm 1.

    paper      here           meaning
    w          (state.u, .v)  the global model as this client has received it
    n_k        state.samples  samples of client k, its weight in the average
    E          epochs         local epochs
    S_t        graph.active   the sampled clients, who alone train

The server is a graph: every row of the star's matrix averages the sampled clients, so every client
receives the new model. Stage `local` is the last model a client trained itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import (
    ServerState,
    Weighting,
    average_leaf,
    model_params,
    sample_weight,
    train_whole,
    weight_message,
)
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.options import Count
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class FedAvg(Method[ServerState]):
    epochs: Count = 5
    weighting: Weighting = "samples"

    name = "fedavg"
    title = "FedAvg"
    topology = "star"

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.params, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        """ClientUpdate(k, w): E epochs of SGD on the whole model."""
        return (train_whole(self.epochs),)

    def message(self, state: ServerState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        """w ← Σ_k (n_k / n) · w_k over the sampled clients."""
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: ServerState) -> Params:
        return model_params(state)
