"""FedProto: clients exchange the mean features of every class, and no parameters at all.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022,
Algorithm 1.

    paper      here                 meaning
    C_i^(j)    sums / counts        prototype of class j at client i: the mean of the features
    |D_i,j|    counts               samples of class j at client i
    C̄^(j)      prototypes           the mean over clients; known where somebody has the class
    λ          proximal             strength of the pull towards C̄

Difference from the paper: evaluated by the model's own classifier, not by the nearest prototype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from quiverfl.errors import QuiverError
from quiverfl.methods.blocks import check_class_labels, model_params, train_whole
from quiverfl.methods.contract import Loss, Message, Method, Phase, SingleStep, Start, StepInfo
from quiverfl.methods.state import Personal, Replicated, Shared
from quiverfl.options import Count, NotNegative
from quiverfl.task import ModelOutputs, Params, Task


class ProtoState(NamedTuple):
    u: Shared
    v: Personal
    sums: Tensor  # per class, of what the head is given: [classes, features]
    counts: Tensor  # samples of every class: [classes]
    prototypes: Replicated[Tensor]  # of all clients, as received: [classes, features]
    known: Replicated[Tensor]  # 1 for the classes that have one: [classes]


@dataclass(frozen=True)
class FedProto(Method[ProtoState]):
    epochs: Count = 5
    proximal: NotNegative = 1.0

    name = "fedproto"
    title = "FedProto"
    topology = "star"

    def init(self, task: Task, start: Start) -> ProtoState:
        if len(start.features) != 1 or len(start.outputs) != 1:
            raise QuiverError(
                "fedproto needs one head that is given a vector and returns a number per class: "
                f"here it is given {start.features or 'nothing known'} and returns {start.outputs}."
            )
        zero = start.params.shared.new_zeros(start.outputs[0], start.features[0])
        return ProtoState(*start.params, zero, zero[:, 0], zero, zero[:, 0])

    def phases(self, task: Task) -> tuple[Phase[ProtoState], ...]:
        def prototype_loss(
            seen: ModelOutputs,
            targets: Tensor,
            state: ProtoState,
            teachers: tuple[ModelOutputs, ...],
        ) -> Tensor:
            """Equation 8: ℓ_S + λ · the distance to the class's prototype."""
            check_class_labels(self.name, targets)
            away = (seen.features - state.prototypes[targets]).square().mean(dim=1)
            supervised: Tensor = task.loss(seen.outputs, targets)
            return supervised + self.proximal * state.known[targets] * away

        return train_whole(self.epochs, loss=Loss(prototype_loss, needs_features=True)), SingleStep(
            self._collect, statistics=self._per_class
        )

    def _per_class(
        self, seen: ModelOutputs, targets: Tensor, weights: Tensor, state: ProtoState
    ) -> Message:
        """Equation 3, before the division."""
        member = one_hot(targets, len(state.counts)).to(seen.features.dtype) * weights[:, None]
        return {"sums": member.T @ seen.features, "counts": member.sum(dim=0)}

    def _collect(self, state: ProtoState, info: StepInfo) -> ProtoState:
        assert info.statistics is not None
        return state._replace(**info.statistics)

    def message(self, state: ProtoState) -> Message:
        """Copies, since a client that does not train next sends the same again."""
        return {"sums": state.sums.clone(), "counts": state.counts.clone()}

    def merge(self, state: ProtoState, mixed: Message) -> ProtoState:
        """Equation 6: the mean over clients, weighted by their samples of the class."""
        held = mixed["counts"] > 0
        mean = mixed["sums"] / mixed["counts"].where(held, 1.0)[:, None]
        return state._replace(
            prototypes=torch.where(held[:, None], mean, state.prototypes),
            known=torch.where(held, 1.0, state.known),
        )

    def personal(self, state: ProtoState) -> Params:
        return model_params(state)
