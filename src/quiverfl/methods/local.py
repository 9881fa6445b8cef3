"""Local: every client trains alone. What collaboration has to beat.

paper      here        meaning
(u, v)     state.u, .v the whole model of the client; nothing is ever sent
"""

from __future__ import annotations

from dataclasses import dataclass

from quiverfl.methods.blocks import model_params, train_whole
from quiverfl.methods.contract import Message, Method, Start, Train
from quiverfl.methods.state import Model
from quiverfl.options import Count
from quiverfl.task import Params, Task


@dataclass(frozen=True)
class Local(Method[Model]):
    epochs: Count = 5

    name = "local"
    title = "Local"
    topology = "isolated"

    def init(self, task: Task, start: Start) -> Model:
        return Model(*start.params)

    def phases(self, task: Task) -> tuple[Train, ...]:
        return (train_whole(self.epochs),)

    def message(self, state: Model) -> Message:
        return {}

    def merge(self, state: Model, mixed: Message) -> Model:
        return state

    def personal(self, state: Model) -> Params:
        return model_params(state)
