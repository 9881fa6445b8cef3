"""FedAvg: federated averaging of the whole model over a star.

McMahan et al., AISTATS 2017, Algorithm 1.

    paper      here           meaning
    w          (state.u, .v)  the global model as this client has received it
    n_k        state.samples  samples of client k, its weight in the average
    E          epochs         local epochs
    S_t        graph.active   the sampled clients, who alone train

The server is a graph: every row of the star's matrix averages the sampled clients, so every client
receives the new model. Stage `local` is the last model a client trained itself.
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
class FedAvg:
    epochs: int = 5
    weighting: Weighting = "samples"

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    carries_mass: ClassVar[bool] = False
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)
        check_weighting(self.weighting)

    def init(self, task: Task, start: Start) -> ServerState:
        return ServerState(*start.point, samples=sample_weight(start, self.weighting))

    def phases(self, task: Task) -> tuple[Train, ...]:
        """ClientUpdate(k, w): E epochs of SGD on the whole model."""
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                point=lambda state: Point(state.u, state.v),
                absorb=lambda state, point: state._replace(u=point.shared, v=point.personal),
            ),
        )

    def message(self, state: ServerState) -> Message:
        return weighted(state.samples, u=state.u, v=state.v)

    def merge(self, state: ServerState, mixed: Message) -> ServerState:
        """w ← Σ_k (n_k / n) · w_k over the sampled clients."""
        return state._replace(u=averaged(mixed, "u"), v=averaged(mixed, "v"))

    def personal(self, state: ServerState) -> Point:
        return Point(state.u, state.v)
