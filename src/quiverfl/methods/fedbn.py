"""FedBN: BatchNorm stays at the client, all other layers are averaged.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1.

    paper           here      meaning
    w^(l), l ≠ BN   state.u   layers that are averaged
    w^(l), l = BN   state.v   weights and biases of the BatchNorm layers of a client, which stay

Running statistics are a client's own, unless the task mixes them. Every client counts alike, as in
the paper's 1/K, unless `weighting` says otherwise. Differences from the paper: a server may sample
clients, and a round has 5 epochs unless `epochs` says otherwise.
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
class FedBN(Method[ServerState]):
    epochs: Count = 5
    weighting: Weighting = "uniform"

    name = "fedbn"
    title = "FedBN"
    topology = "star"

    def personal_part(self, task: Task) -> tuple[str, ...]:
        """The BatchNorm layers, whatever else the task calls personal."""
        return task.batch_norms

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.params, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        """All layers in every step, with one rate."""
        return (train_whole(self.epochs),)

    def message(self, state: ServerState) -> Message:
        return weight_message(state.samples, u=state.u)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        """w^(l) ← 1/K Σ_k w_k^(l) for every layer l that is no BatchNorm."""
        return state._replace(u=average_leaf(mixed, "u"))

    def personal(self, state: ServerState) -> Params:
        return model_params(state)
