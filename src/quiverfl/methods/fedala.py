"""FedALA: the received head is weighed into the own one, element by element, before training.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023
(arXiv:2212.01197), Algorithm 1.

    paper      here               meaning
    Θ          (state.u, state.v) the global model as received, then trained and sent
    Θ_i        state.own_v        the head after the client's own last training
    W_i        state.share        how much of the received head is taken, in [0, 1]; 1 at the start
    Θ̂_i        personal(state)    the received body, and own + (received - own) ⊙ W (equation 4)
    p          the personal part  the layers that are weighed; the paper's choice is the last one
    η          weight_lr          rate of W

Differences from the paper: W is learned in `weight_epochs` passes in every round. The paper trains
it until its loss settles in the client's first round and for one pass later: phases have no length
that depends on a loss. All samples are used for it, not s % of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quiverfl.methods.blocks import (
    Weighting,
    average_leaf,
    plain_steps,
    sample_weight,
    weight_message,
)
from quiverfl.methods.contract import (
    Interleaved,
    Message,
    Method,
    Phase,
    SingleStep,
    Start,
    Train,
    Trained,
)
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.options import Count, Positive
from quiverfl.task import Params, Task


class ALAState(NamedTuple):
    u: Shared  # the model as received, then trained and sent
    v: Personal
    own_v: Personal  # the head after the client's last training
    share: Personal  # W
    samples: Scalar


@dataclass(frozen=True)
class FedALA(Method[ALAState]):
    epochs: Count = 5
    weight_epochs: Count = 1
    weight_lr: Positive = 1.0
    weighting: Weighting = "samples"

    name = "fedala"
    title = "FedALA"
    topology = "star"

    def init(self, task: Task, start: Start) -> ALAState:
        head = start.params.personal
        samples = sample_weight(start, self.weighting)
        return ALAState(*start.params, head, torch.ones_like(head), samples)

    def phases(self, task: Task) -> tuple[Phase[ALAState], ...]:
        """Local initialization (lines 6-13), then training from Θ̂ (lines 14-15)."""
        learn: Train[ALAState] = Train(
            part="personal",
            params=lambda state: Params(state.u, state.share),
            gradient_at=lambda weights, state: _aggregate(state, weights.personal),
            gradient=self._slope,
            update=lambda state, weights: state._replace(share=weights.personal),
            settings=lambda training: plain_steps(training, self.weight_lr),
        )
        cut: SingleStep[ALAState] = SingleStep(
            lambda state, _: state._replace(share=state.share.clamp(0, 1))
        )
        train = Train(
            part="whole", epochs=self.epochs, params=self.personal, update=self._keep_head
        )
        weigh = Interleaved((learn, cut), epochs=self.weight_epochs, trains_message=False)
        return weigh, train

    def _slope(self, gradient: Params, weights: Params, state: ALAState) -> Params:
        """Equation 5: ∇_W L = (Θ - Θ_i) ⊙ ∇_Θ̂ L."""
        return gradient._replace(personal=gradient.personal * (state.v - state.own_v))

    def _keep_head(self, state: ALAState, trained: Trained) -> ALAState:
        return state._replace(u=trained.shared, v=trained.personal, own_v=trained.personal)

    def message(self, state: ALAState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: ALAState, mixed: Message) -> ALAState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: ALAState) -> Params:
        """After training both heads are the same one, and W has no effect."""
        return _aggregate(state, state.share)


def _aggregate(state: ALAState, share: torch.Tensor) -> Params:
    return Params(state.u, state.own_v + (state.v - state.own_v) * share)
