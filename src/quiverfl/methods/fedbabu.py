"""FedBABU: only the body is trained and averaged, under one random head that never changes.

Oh, Kim and Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, Algorithm 1.

    paper      here           meaning
    θ_ext      state.u        the extractor (body), trained and averaged
    θ_cls      state.v        the head: one random draw for all, bit-identical to the end
    τ          epochs         local epochs
    n_k        state.samples  weight in the average

What is evaluated is a copy, fine-tuned as a whole for a few epochs on the client's own data, at
both stages, with a learning rate that does not decay and batches that do not depend on the round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quiverfl.methods.blocks import (
    ServerState,
    Weighting,
    average_leaf,
    model_params,
    sample_weight,
    train_shared,
    weight_message,
)
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.options import Count, Positive
from quiverfl.task import Params, Task
from quiverfl.training import Training


@dataclass(frozen=True)
class FedBABU(Method[ServerState]):
    epochs: Count = 5
    finetune_epochs: Count = 5
    finetune_lr: Positive = 1e-3
    weighting: Weighting = "samples"

    name = "fedbabu"
    title = "FedBABU"
    topology = "star"

    def init(self, task: Task, start: Start) -> ServerState:
        samples = sample_weight(start, self.weighting)
        return ServerState(u=start.params.shared, v=start.common_params.personal, samples=samples)

    def phases(self, task: Task) -> tuple[Train, ...]:
        return (train_shared(self.epochs),)

    def message(self, state: ServerState) -> Message:
        return weight_message(state.samples, u=state.u)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        return state._replace(u=average_leaf(mixed, "u"))

    def personal(self, state: ServerState) -> Params:
        return model_params(state)

    def adapt(self, task: Task) -> Train[Params]:
        """Fine-tuning of the copy that is evaluated: the state here is that copy."""
        return Train(
            part="whole",
            epochs=self.finetune_epochs,
            params=lambda copy: copy,
            update=lambda _, tuned: Params(tuned.shared, tuned.personal),
            settings=self._finetuning,
        )

    def _finetuning(self, training: Training) -> Training:
        return replace(
            training,
            lr=self.finetune_lr,
            lr_decay=1.0,
            momentum=0.9,
            weight_decay=0.0,
            clip_norm=None,
            optimizer="sgd",
            nesterov=False,
        )
