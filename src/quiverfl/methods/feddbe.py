"""FedDBE: FedAvg with a personal bias of the features, and a pull of their mean to the global one.

Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023
(arXiv:2311.14975): the Domain Bias Eliminator on FedAvg.

    paper      here               meaning
    θ          (state.u, state.v) extractor and head, both averaged
    z̄_i^p      state.bias         what is added to the features: the client's, trained, never sent
    z̄^g        state.mean         mean of all clients' features, fixed once it is known
    κ          mean_weight        strength of the pull of a batch's mean feature to z̄^g

A head on features + bias is the same linear head with W · bias added to its own bias: that is what
is trained and evaluated. Both steps of a batch are of one gradient.

Differences from the paper: the mean of a batch is the batch's own, which is its momentum 1. z̄^g is
that of the clients who train in the first round, by their samples; there all clients train in a
round before the first. Until a client knows it, its bias stays 0 and nothing is pulled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.methods.blocks import (
    Weighting,
    average_leaf,
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
from quiverfl.methods.state import Personal, Replicated, Scalar, Shared
from quiverfl.options import Count, NotNegative
from quiverfl.task import ModelOutputs, Params, Task


class DBEState(NamedTuple):
    u: Shared
    v: Personal
    bias: Tensor  # [features]
    before: Tensor  # the bias of before the batch, which the model's step still uses
    sums: Tensor  # of the client's features after its training: [features]
    number: Scalar  # of how many samples
    mean: Replicated[Tensor]  # z̄^g: [features]
    known: Replicated[Scalar]  # whether there is one
    samples: Scalar


@dataclass(frozen=True)
class FedDBE(Method[DBEState]):
    epochs: Count = 5
    mean_weight: NotNegative = 50.0
    weighting: Weighting = "samples"

    name = "feddbe"
    title = "FedDBE"
    topology = "star"

    def init(self, task: Task, start: Start) -> DBEState:
        linear = (start.outputs + start.features, start.outputs)
        if len(start.outputs) != 1 or tuple(task.personal_layout.shapes) != linear:
            raise QuiverError(
                "feddbe adds a bias to what the head is given, so the personal part must be one "
                "linear layer with a bias: here it has the shapes "
                f"{list(task.personal_layout.shapes)}, is given "
                f"{start.features or 'nothing known'} and returns {start.outputs}."
            )
        zero = start.params.shared.new_zeros(start.features[0])
        none = zero.new_zeros(())
        samples = sample_weight(start, self.weighting)
        return DBEState(*start.params, zero, zero, zero, none, zero, none, samples)

    def phases(self, task: Task) -> tuple[Phase[DBEState], ...]:
        train_bias: Train[DBEState] = Train(
            part="personal",
            params=lambda state: Params(state.u, _pad(state.bias, state.v)),
            gradient_at=lambda own, state: Params(
                state.u, _shift_head(state, _cut(own.personal, state))
            ),
            gradient=self._bias_gradient,
            update=lambda state, own: state._replace(
                bias=_cut(own.personal, state), before=state.bias
            ),
            use_personal_lr=True,
        )
        train_model: Train[DBEState] = Train(
            part="whole",
            params=model_params,
            gradient_at=lambda w, state: Params(
                w.shared, _shift_head(state._replace(v=w.personal), state.before)
            ),
            gradient=self._model_gradient,
            update=lambda state, trained: state._replace(u=trained.shared, v=trained.personal),
            loss=self._loss(task),
        )
        collect = SingleStep(self._keep_sums, statistics=self._sum_features, params=model_params)
        return Interleaved((train_bias, train_model), epochs=self.epochs), collect

    def _loss(self, task: Task) -> Loss[DBEState]:
        def regularized_loss(
            seen: ModelOutputs,
            targets: Tensor,
            state: DBEState,
            teachers: tuple[ModelOutputs, ...],
            weights: Tensor,
        ) -> Tensor:
            """ℓ + κ · ½ · the mean over dimensions of (z̄ - z̄^g)², z̄ being the batch's mean."""
            mean = weights @ seen.features / weights.sum()
            pull = (mean - state.mean).square().mean() / 2
            supervised: Tensor = task.loss(seen.outputs, targets)
            return supervised + self.mean_weight * state.known * pull

        return Loss(regularized_loss, needs_features=True, needs_weights=True)

    def _bias_gradient(self, gradient: Params, own: Params, state: DBEState) -> Params:
        """By the chain rule through b + W z: Wᵀ times the gradient of b."""
        weight, _ = _split_head(state.v, state)
        _, slope = _split_head(gradient.personal, state)
        return gradient._replace(personal=_pad(state.known * (weight.T @ slope), state.v))

    def _model_gradient(self, gradient: Params, w: Params, state: DBEState) -> Params:
        """The gradient of W has that of b times z in it."""
        weight, slope = _split_head(gradient.personal, state)
        weight = weight + slope[:, None] * state.before
        return gradient._replace(personal=torch.cat([weight.flatten(), slope]))

    def _sum_features(
        self, seen: ModelOutputs, targets: Tensor, weights: Tensor, state: DBEState
    ) -> Message:
        return {"sums": weights @ seen.features, "number": weights.sum()}

    def _keep_sums(self, state: DBEState, info: StepInfo) -> DBEState:
        assert info.statistics is not None
        return state._replace(**info.statistics)

    def message(self, state: DBEState) -> Message:
        """The sums are copies, since a client that does not train next sends the same again."""
        model = weight_message(state.samples, u=state.u, v=state.v)
        return {**model, "sums": state.sums.clone(), "number": state.number.clone()}

    def merge(self, state: DBEState, mixed: Message) -> DBEState:
        """FedAvg's mean; z̄^g by the first one that tells of any feature."""
        heard = mixed["number"] > 0
        mean = mixed["sums"] / mixed["number"].where(heard, 1.0)
        new = heard & (state.known == 0)
        return state._replace(
            u=average_leaf(mixed, "u"),
            v=average_leaf(mixed, "v"),
            mean=torch.where(new, mean, state.mean),
            known=torch.where(heard, 1.0, state.known),
        )

    def personal(self, state: DBEState) -> Params:
        return Params(state.u, _shift_head(state, state.bias))


def _split_head(head: Tensor, state: DBEState) -> tuple[Tensor, Tensor]:
    """W [classes, features] and b [classes] of a linear layer."""
    features = len(state.bias)
    classes = len(head) // (features + 1)
    return head[: classes * features].view(classes, features), head[classes * features :]


def _shift_head(state: DBEState, bias: Tensor) -> Tensor:
    """The head on features + bias: b + W · bias in place of b."""
    weight, own = _split_head(state.v, state)
    return torch.cat([weight.flatten(), own + weight @ bias])


def _pad(bias: Tensor, head: Tensor) -> Tensor:
    """Pad the bias to the head's length, whose place it takes in its phase; the pad stays 0."""
    return torch.cat([bias, torch.zeros_like(head[len(bias) :])])


def _cut(own: Tensor, state: DBEState) -> Tensor:
    return own[: len(state.bias)]
