"""MOON: features close to the received model's and far from those of the client's last model.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1.

    paper      here                     meaning
    w^t        (state.u, state.v)       the model received, a teacher during training
    w_i^{t-1}  (previous_u, _v)         the client's model after its last local training
    z, z_glob, z_prev                   what the head is given, by the three models
    μ, τ       contrast, temperature

Difference from the paper: its projection head between body and classifier is the model's business;
the features here are whatever the personal head is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from quiverfl.methods.blocks import (
    Weighting,
    average_leaf,
    model_params,
    sample_weight,
    weight_message,
)
from quiverfl.methods.contract import Loss, Message, Method, Start, Train
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.options import Count, NotNegative, Positive
from quiverfl.task import ModelOutputs, Params, Task


class MoonState(NamedTuple):
    u: Shared
    v: Personal
    previous_u: Shared  # the model after the client's last local training
    previous_v: Personal
    samples: Scalar


@dataclass(frozen=True)
class MOON(Method[MoonState]):
    epochs: Count = 5
    contrast: NotNegative = 1.0
    temperature: Positive = 0.5
    weighting: Weighting = "samples"

    name = "moon"
    title = "MOON"
    topology = "star"

    def init(self, task: Task, start: Start) -> MoonState:
        samples = sample_weight(start, self.weighting)
        return MoonState(*start.params, *start.params, samples=samples)

    def phases(self, task: Task) -> tuple[Train[MoonState], ...]:
        def contrastive(
            seen: ModelOutputs,
            targets: Tensor,
            state: MoonState,
            teachers: tuple[ModelOutputs, ...],
        ) -> Tensor:
            """Line 17: ℓ = ℓ_sup + μ ℓ_con."""
            received, previous = teachers
            supervised: Tensor = task.loss(seen.outputs, targets)
            return supervised + self.contrast * self._contrast(
                seen.features, received.features, previous.features
            )

        return (
            Train(
                part="whole",
                epochs=self.epochs,
                params=model_params,
                update=lambda state, trained: state._replace(
                    u=trained.shared,
                    v=trained.personal,
                    previous_u=trained.shared,
                    previous_v=trained.personal,
                ),
                loss=Loss(contrastive, needs_features=True, teachers=self._teachers),
            ),
        )

    def _teachers(self, state: MoonState) -> tuple[Params, ...]:
        return model_params(state), Params(state.previous_u, state.previous_v)

    def _contrast(self, own: Tensor, received: Tensor, previous: Tensor) -> Tensor:
        """Equation 3: -log of the softmax of the received model's similarity."""
        own, received, previous = (features.flatten(1) for features in (own, received, previous))
        near = cosine_similarity(own, received, dim=1) / self.temperature
        far = cosine_similarity(own, previous, dim=1) / self.temperature
        return torch.logaddexp(near, far) - near

    def message(self, state: MoonState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: MoonState, mixed: Message) -> MoonState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: MoonState) -> Params:
        return model_params(state)
