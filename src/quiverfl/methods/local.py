"""Local: every client trains alone. What collaboration has to beat.

paper      here        meaning
(u, v)     state.u, .v the whole model of the client; nothing is ever sent
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quiverfl.methods.contract import Message, Start, Train, check_epochs
from quiverfl.methods.pushsum import PushSumState, started
from quiverfl.task import Point, Task


@dataclass(frozen=True)
class Local:
    epochs: int = 5

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    carries_mass: ClassVar[bool] = True  # it sends nothing, so any weights will do
    delay: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_epochs(self)

    def init(self, task: Task, start: Start) -> PushSumState:
        return started(start)

    def phases(self, task: Task) -> tuple[Train, ...]:
        return (
            Train(
                part="whole",
                epochs=self.epochs,
                point=lambda state: Point(state.u, state.v),
                absorb=lambda state, point: state._replace(u=point.shared, v=point.personal),
            ),
        )

    def message(self, state: PushSumState) -> Message:
        return {}

    def merge(self, state: PushSumState, mixed: Message) -> PushSumState:
        return state

    def personal(self, state: PushSumState) -> Point:
        return Point(state.u, state.v)
