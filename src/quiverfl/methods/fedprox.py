"""FedProx: FedAvg whose clients are held close to the model they received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2.

    paper      here           meaning
    w^t        (state.u, .v)  the model at the start of the round, as received
    μ          proximal       strength of the pull towards it
    n_k        state.samples  weight in the average

Differences from the paper: epochs of SGD in place of a γ-inexact solution, as in its experiments;
weighted by samples unless told otherwise.
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
from quiverfl.options import Count, NotNegative
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class FedProx(Method[ServerState]):
    epochs: Count = 5
    proximal: NotNegative = 0.01
    weighting: Weighting = "samples"

    name = "fedprox"
    title = "FedProx"
    topology = "star"

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.params, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        return (train_whole(self.epochs, gradient=self._add_proximal),)

    def _add_proximal(self, gradient: Params, w: Params, state: ServerState) -> Params:
        """∇F_k(w) + μ (w - w^t); the state still is that of the start of the round."""
        return Params(
            gradient.shared + self.proximal * (w.shared - state.u),
            gradient.personal + self.proximal * (w.personal - state.v),
        )

    def message(self, state: ServerState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: ServerState) -> Params:
        return model_params(state)
