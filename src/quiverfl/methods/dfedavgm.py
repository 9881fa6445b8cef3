"""DFedAvgM: decentralized federated averaging with momentum.

Sun, Li and Wang, "Decentralized Federated Averaging", TPAMI 2022, Algorithm 1 (not quantised).

    paper      here                 meaning
    x(i)       (state.u, state.v)   the whole model of client i
    K          epochs               local steps, here epochs
    θ          Training.momentum    heavy ball, zero at the start of each round
    W          graph.weights        symmetric and doubly stochastic on an undirected graph
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quiverfl.methods.contract import Message, Start, Train, check_epochs
from quiverfl.methods.plain import PlainState
from quiverfl.task import Point, Task


@dataclass(frozen=True)
class DFedAvgM:
    epochs: int = 5

    name: ClassVar[str] = "dfedavgm"
    title: ClassVar[str] = "DFedAvgM"
    carries_mass: ClassVar[bool] = False
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)

    def init(self, task: Task, start: Start) -> PlainState:
        return PlainState(*start.point)

    def phases(self, task: Task) -> tuple[Train, ...]:
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                point=self.personal,
                absorb=lambda state, point: PlainState(*point),
            ),
        )

    def message(self, state: PlainState) -> Message:
        return {"u": state.u, "v": state.v}

    def merge(self, state: PlainState, mixed: Message) -> PlainState:
        """x(i) ← Σ_l w_{i,l} z(l)."""
        return PlainState(u=mixed["u"], v=mixed["v"])

    def personal(self, state: PlainState) -> Point:
        return Point(state.u, state.v)
