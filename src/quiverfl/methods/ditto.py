"""Ditto: a global model as in FedAvg, and a personal one that is held close to it.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1.

    paper      here                     meaning
    w^t        (state.u, state.v)       the global model as received, then trained and sent
    v_k        (theta_u, theta_v)       the personal model of client k, never sent
    λ          proximal                 strength of the pull towards w^t (0.75 in the DFedPGP paper)
    s          personal_epochs          local epochs of the personal model

The personal model is trained first, against the model received at the start of the round, and the
global one after it: the anchor is then still there without a third copy. Published code interleaves
the two per mini-batch, which gives the same anchor. It is trained when the client is sampled, and
it is what is evaluated at both stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from quiverfl.methods.blocks import (
    Weighting,
    average_leaf,
    sample_weight,
    train_whole,
    weight_message,
)
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.methods.state import Personal, Scalar, Shared
from quiverfl.options import Count, NotNegative
from quiverfl.task import Params, Task


class DittoState(NamedTuple):
    u: Shared  # global model
    v: Personal
    theta_u: Shared  # personal model
    theta_v: Personal
    samples: Scalar


@dataclass(frozen=True)
class Ditto(Method[DittoState]):
    epochs: Count = 5
    personal_epochs: Count = 5
    proximal: NotNegative = 0.75
    weighting: Weighting = "samples"

    name = "ditto"
    title = "Ditto"
    topology = "star"

    def init(self, task: Task, start: Start) -> DittoState:
        samples = sample_weight(start, self.weighting)
        return DittoState(*start.params, *start.params, samples=samples)

    def phases(self, task: Task) -> tuple[Train, ...]:
        train_personal = Train(
            part="whole",
            epochs=self.personal_epochs,
            params=self.personal,
            update=lambda state, theta: state._replace(
                theta_u=theta.shared, theta_v=theta.personal
            ),
            gradient=self._regularize,
            trains_message=False,
        )
        return train_personal, train_whole(self.epochs, model=1)

    def _regularize(self, gradient: Params, theta: Params, state: DittoState) -> Params:
        """∇F_k(v_k) + λ (v_k - w^t)."""
        return Params(
            gradient.shared + self.proximal * (theta.shared - state.u),
            gradient.personal + self.proximal * (theta.personal - state.v),
        )

    def message(self, state: DittoState) -> Message:
        return weight_message(state.samples, u=state.u, v=state.v)

    def merge(self, state: DittoState, mixed: Message) -> DittoState:
        return state._replace(u=average_leaf(mixed, "u"), v=average_leaf(mixed, "v"))

    def personal(self, state: DittoState) -> Params:
        return Params(state.theta_u, state.theta_v)
