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
from typing import ClassVar, NamedTuple

from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message, Start, Train, check_epochs
from quiverfl.methods.server import (
    Weighting,
    averaged,
    check_weighting,
    sample_weight,
    weighted,
)
from quiverfl.task import Point, Task


class DittoState(NamedTuple):
    u: Tensor  # global model, shared part
    v: Tensor  # global model, personal part
    theta_u: Tensor  # personal model
    theta_v: Tensor
    samples: Tensor


@dataclass(frozen=True)
class Ditto:
    epochs: int = 5
    personal_epochs: int = 5
    proximal: float = 0.75
    weighting: Weighting = "samples"

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    carries_mass: ClassVar[bool] = False
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)
        check_weighting(self.weighting)
        if not self.proximal >= 0:
            raise QuiverError(f"method.proximal = {self.proximal}: it must be 0 or more.")

    def init(self, task: Task, start: Start) -> DittoState:
        samples = sample_weight(start, self.weighting)
        return DittoState(*start.point, *start.point, samples=samples)

    def phases(self, task: Task) -> tuple[Train, ...]:
        train_personal = Train(
            part="whole",
            epochs=self.personal_epochs,
            point=self.personal,
            absorb=lambda state, theta: state._replace(
                theta_u=theta.shared, theta_v=theta.personal
            ),
            gradient=self._regularized,
            sent=False,
        )
        train_global = Train(
            part="whole",
            epochs=self.epochs,
            point=lambda state: Point(state.u, state.v),
            absorb=lambda state, point: state._replace(u=point.shared, v=point.personal),
        )
        return train_personal, train_global

    def _regularized(self, gradient: Point, theta: Point, state: DittoState) -> Point:
        """∇F_k(v_k) + λ (v_k - w^t)."""
        return Point(
            gradient.shared + self.proximal * (theta.shared - state.u),
            gradient.personal + self.proximal * (theta.personal - state.v),
        )

    def message(self, state: DittoState) -> Message:
        return weighted(state.samples, u=state.u, v=state.v)

    def merge(self, state: DittoState, mixed: Message) -> DittoState:
        return state._replace(u=averaged(mixed, "u"), v=averaged(mixed, "v"))

    def personal(self, state: DittoState) -> Point:
        return Point(state.theta_u, state.theta_v)
