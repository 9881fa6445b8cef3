"""FedRep: first the head on a frozen body, then the body under the frozen head.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1.

    paper      here             meaning
    φ          state.u          the representation, averaged over the sampled clients
    h_i        state.v          the head of client i, which never leaves it
    τ_h        personal_epochs  head epochs (10)
    n_i        state.samples    weight in the average

A frozen part is not differentiated, so neither weight decay nor momentum can move it.
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import (
    ServerState,
    Weighting,
    average_leaf,
    model_params,
    sample_weight,
    train_personal,
    train_shared,
    weight_message,
)
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.options import Count
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class FedRep(Method[ServerState]):
    personal_epochs: Count = 10
    shared_epochs: Count = 5
    weighting: Weighting = "samples"

    name = "fedrep"
    title = "FedRep"
    topology = "star"

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.params, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        return train_personal(self.personal_epochs), train_shared(self.shared_epochs)

    def message(self, state: ServerState) -> Message:
        return weight_message(state.samples, u=state.u)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        return state._replace(u=average_leaf(mixed, "u"))

    def personal(self, state: ServerState) -> Params:
        return model_params(state)
