"""FedPer: body and personal head trained jointly, only the body is averaged.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2.

    paper      here           meaning
    W_B        state.u        base layers, averaged over the sampled clients
    W_P,j      state.v        personalization layers of client j, which stay and persist
    n_j        state.samples  weight in the average

Difference from the paper: here 10 of 100 clients take part in a round, there all of them.
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
class FedPer(Method[ServerState]):
    epochs: Count = 5
    weighting: Weighting = "samples"

    name = "fedper"
    title = "FedPer"
    topology = "star"

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.params, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        """Both parts in every step; the gradient is clipped over both together."""
        return (train_whole(self.epochs, use_personal_lr=True),)

    def message(self, state: ServerState) -> Message:
        return weight_message(state.samples, u=state.u)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        return state._replace(u=average_leaf(mixed, "u"))

    def personal(self, state: ServerState) -> Params:
        return model_params(state)
