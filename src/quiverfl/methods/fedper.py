"""FedPer: body and personal head trained jointly, only the body is averaged.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2.

    paper      here           meaning
    W_B        state.u        base layers, averaged over the sampled clients
    W_P,j      state.v        personalization layers of client j, which stay and persist
    n_j        state.samples  weight in the average

Difference from the paper: here 10 of 100 clients take part in a round, there all of them.
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
class FedPer:
    epochs: int = 5
    weighting: Weighting = "samples"

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer"
    carries_mass: ClassVar[bool] = False
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)
        check_weighting(self.weighting)

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.point, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        """Both parts in every step; the gradient is clipped over both together."""
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                point=self.personal,
                absorb=lambda state, point: state._replace(u=point.shared, v=point.personal),
                personal_rate=True,
            ),
        )

    def message(self, state: ServerState) -> Message:
        return weighted(state.samples, u=state.u)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        return state._replace(u=averaged(mixed, "u"))

    def personal(self, state: ServerState) -> Point:
        return Point(state.u, state.v)
