"""FedAS: the received body is aligned with the client's own features, and weighed by what it knows.

Yang, Huang and Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024,
Algorithm 1.

    paper      here                meaning
    θ          state.u             shared parameters: received, aligned, trained, sent
    φ_i        state.v             personal parameters, which stay
    θ_i^{t-1}  state.last_u        the body after the client's last training
    P_i        state.prototypes    mean features of every class by that body
    S_i        state.fisher        trace of the Fisher information: its weight in the average

Parameter alignment: before training, steps of θ on the mean squared distance of a sample's features
from the prototype of its class. Client synchronization: θ ← Σ S_i θ_i / Σ S_i, so that a client
counts by what its gradients say of its training, not by its samples.

The trace is the sum over the batches of an epoch of ‖∇L‖² at the trained model, as in published
code. A phase accumulates it: its step from p = 0 with rate 1 along -g² leaves Σ g². Differences
from the paper: a client that has not trained yet weighs 1, and no trace is below 1e-20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from quiverfl.errors import QuiverError
from quiverfl.methods.blocks import (
    average_leaf,
    check_class_labels,
    model_params,
    plain_steps,
    weight_message,
)
from quiverfl.methods.contract import (
    Loss,
    Message,
    Method,
    Phase,
    SingleStep,
    Start,
    StepInfo,
    Train,
    Trained,
)
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.options import Count, Positive
from quiverfl.task import ModelOutputs, Params, Task


class ASState(NamedTuple):
    u: Shared
    v: Personal
    last_u: Shared  # the body after the client's last training
    prototypes: Tensor  # mean features by it: [classes, features]
    fisher: Scalar  # in float64


@dataclass(frozen=True)
class FedAS(Method[ASState]):
    epochs: Count = 5
    align_epochs: Count = 1
    align_lr: Positive = 0.01

    name = "fedas"
    title = "FedAS"
    topology = "star"

    def init(self, task: Task, start: Start) -> ASState:
        if len(start.features) != 1 or len(start.outputs) != 1:
            raise QuiverError(
                "fedas needs one head that is given a vector and returns a number per class: here "
                f"it is given {start.features or 'nothing known'} and returns {start.outputs}."
            )
        zero = start.params.shared.new_zeros(start.outputs[0], start.features[0])
        one = torch.ones((), dtype=torch.float64, device=zero.device)
        return ASState(*start.params, start.params.shared, zero, one)

    def phases(self, task: Task) -> tuple[Phase[ASState], ...]:
        collect: SingleStep[ASState] = SingleStep(
            self._keep_prototypes,
            statistics=self._sum_features,
            params=lambda state: Params(state.last_u, state.v),
        )
        align: Train[ASState] = Train(
            part="shared",
            epochs=self.align_epochs,
            params=model_params,
            update=lambda state, aligned: state._replace(u=aligned.shared),
            loss=Loss(self._distance, needs_features=True),
            settings=lambda training: plain_steps(training, self.align_lr),
            trains_message=False,
        )
        train: Train[ASState] = Train(
            part="whole",
            epochs=self.epochs,
            params=model_params,
            update=lambda state, trained: state._replace(
                u=trained.shared, v=trained.personal, last_u=trained.shared
            ),
            use_personal_lr=True,
        )
        measure: Train[ASState] = Train(
            part="whole",
            epochs=1,
            params=lambda state: Params(torch.zeros_like(state.u), torch.zeros_like(state.v)),
            gradient_at=lambda _, state: model_params(state),
            gradient=lambda g, *_: Params(-g.shared.square(), -g.personal.square()),
            update=self._keep_trace,
            settings=lambda training: plain_steps(training, 1.0),
            trains_message=False,
        )
        return collect, align, train, measure

    def _sum_features(
        self, seen: ModelOutputs, targets: Tensor, weights: Tensor, state: ASState
    ) -> Message:
        check_class_labels(self.name, targets)
        member = one_hot(targets, len(state.prototypes)).to(seen.features.dtype) * weights[:, None]
        return {"sums": member.T @ seen.features, "counts": member.sum(dim=0)}

    def _keep_prototypes(self, state: ASState, info: StepInfo) -> ASState:
        assert info.statistics is not None
        counts = info.statistics["counts"].clamp(min=1)
        return state._replace(prototypes=info.statistics["sums"] / counts[:, None])

    def _distance(
        self,
        seen: ModelOutputs,
        targets: Tensor,
        state: ASState,
        teachers: tuple[ModelOutputs, ...],
    ) -> Tensor:
        return (seen.features - state.prototypes[targets]).square().mean(dim=1)

    def _keep_trace(self, state: ASState, squares: Trained) -> ASState:
        trace = squares.shared.sum() + squares.personal.sum()
        return state._replace(fisher=trace.to(state.fisher.dtype).clamp(min=1e-20))

    def message(self, state: ASState) -> Message:
        return weight_message(state.fisher, u=state.u)

    def merge(self, state: ASState, mixed: Message) -> ASState:
        return state._replace(u=average_leaf(mixed, "u"))

    def personal(self, state: ASState) -> Params:
        return model_params(state)
