"""FedRep: first the head on a frozen body, then the body under the frozen head.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1.

    paper      here             meaning
    φ          state.u          the representation, averaged over the sampled clients
    h_i        state.v          the head of client i, which never leaves it
    τ_h        personal_epochs  head epochs (10)
    n_i        state.samples    weight in the average

A frozen part is not differentiated, so neither weight decay nor momentum can move it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quiverfl.methods.contract import Message, Start, Train, check_epochs
from quiverfl.methods.server import (
    ServerState,
    Weighting,
    averaged,
    check_weighting,
    sample_weight,
    weighted,
)
from quiverfl.task import Point, Task


@dataclass(frozen=True)
class FedRep:
    personal_epochs: int = 10
    shared_epochs: int = 5
    weighting: Weighting = "samples"

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    carries_mass: ClassVar[bool] = False
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)
        check_weighting(self.weighting)

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.point, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        train_head = Train(
            part="personal",
            epochs=self.personal_epochs,
            point=self.personal,
            absorb=lambda state, point: state._replace(v=point.personal),
            personal_rate=True,
            sent=False,
        )
        train_body = Train(
            part="shared",
            epochs=self.shared_epochs,
            point=self.personal,
            absorb=lambda state, point: state._replace(u=point.shared),
        )
        return train_head, train_body

    def message(self, state: ServerState) -> Message:
        return weighted(state.samples, u=state.u)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        return state._replace(u=averaged(mixed, "u"))

    def personal(self, state: ServerState) -> Point:
        return Point(state.u, state.v)
