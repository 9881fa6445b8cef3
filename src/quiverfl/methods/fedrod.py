"""Fed-RoD: a generic head that is trained for all classes, and a personal one on top of it.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification",
ICLR 2022 (arXiv:2107.00778), Algorithm 1, with linear personal heads.

    paper      here                meaning
    θ, ψ       state.u, state.v    feature extractor and generic head, averaged
    φ_m        state.personal_v    the personal head, which stays
    N_c        state.counts        samples of every class; the balanced loss is equation 6's

The generic model is trained by the balanced softmax loss, log n_c being added to its logits. The
personal head is trained by the plain loss of the sum of both logits, which the generic model gets
no gradient of. A sum of two linear heads is one head of summed weights: that is what is evaluated.
Differences from the paper: the personal head starts at the generic one, as in published code. Each
batch steps the personal head first, which therefore sees the generic model of before the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from quiverfl.errors import QuiverError
from quiverfl.methods.blocks import (
    Weighting,
    average_leaf,
    check_class_labels,
    model_params,
    sample_weight,
    weight_message,
)
from quiverfl.methods.contract import (
    Interleaved,
    Loss,
    Message,
    Method,
    Phase,
    SingleStep,
    Start,
    StepInfo,
    Train,
)
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.objectives import cross_entropy, logits
from quiverfl.options import Count
from quiverfl.task import ModelOutputs, Params, Task


class RoDState(NamedTuple):
    u: Shared
    v: Personal  # the generic head
    personal_v: Personal  # the personal one
    counts: Tensor  # samples of every class: [classes]
    samples: Scalar


@dataclass(frozen=True)
class FedRoD(Method[RoDState]):
    epochs: Count = 5
    weighting: Weighting = "samples"

    name = "fedrod"
    title = "Fed-RoD"
    topology = "star"

    def init(self, task: Task, start: Start) -> RoDState:
        shapes = set(task.personal_layout.shapes)
        if len(start.outputs) != 1 or shapes - {start.outputs} != {start.outputs + start.features}:
            raise QuiverError(
                "fedrod adds the logits of two heads, so the personal part must be one linear "
                f"layer that returns a number per class: here it has the shapes {sorted(shapes)}, "
                f"is given {start.features or 'nothing known'} and returns {start.outputs}."
            )
        if task.loss is not cross_entropy:
            raise QuiverError(
                "fedrod trains its generic head by the balanced softmax loss, so another loss than "
                '"cross_entropy" would be that of the personal head alone: leave task.loss out.'
            )
        head = start.params.personal
        counts = head.new_zeros(start.outputs[0])
        return RoDState(*start.params, head, counts, sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Phase[RoDState], ...]:
        train_personal: Train[RoDState] = Train(
            part="personal",
            params=lambda state: Params(state.u, state.personal_v),
            gradient_at=lambda own, state: Params(state.u, state.v + own.personal),
            update=lambda state, own: state._replace(personal_v=own.personal),
            use_personal_lr=True,
        )
        train_generic: Train[RoDState] = Train(
            part="whole",
            params=model_params,
            update=lambda state, trained: state._replace(u=trained.shared, v=trained.personal),
            loss=Loss(self._balanced_loss),
        )
        count = SingleStep(self._keep_counts, statistics=self._count_classes, params=model_params)
        return count, Interleaved((train_personal, train_generic), epochs=self.epochs)

    def _count_classes(
        self, seen: ModelOutputs, targets: Tensor, weights: Tensor, state: RoDState
    ) -> Message:
        check_class_labels(self.name, targets)
        member = one_hot(targets, len(state.counts)).to(state.counts.dtype)
        return {"counts": (member * weights[:, None]).sum(dim=0)}

    def _keep_counts(self, state: RoDState, info: StepInfo) -> RoDState:
        assert info.statistics is not None
        return state._replace(**info.statistics)

    def _balanced_loss(
        self,
        seen: ModelOutputs,
        targets: Tensor,
        state: RoDState,
        teachers: tuple[ModelOutputs, ...],
    ) -> Tensor:
        """-log of n_y e^z_y / Σ_c n_c e^z_c: a class that the client has not counts for nothing."""
        return cross_entropy(logits(seen.outputs) + torch.log(state.counts), targets)

    def message(self, state: RoDState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: RoDState, mixed: Message) -> RoDState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: RoDState) -> Params:
        return Params(state.u, state.v + state.personal_v)
