"""A method and a model as an author might write them; tests change one thing about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

import quiverfl as qv


class Weights(NamedTuple):
    """No field is called u."""

    body: qv.Shared
    classifier: qv.Personal


@dataclass(frozen=True)
class Alone(qv.Method[Weights]):
    """A method whose phases a test chooses; nothing is sent but the shared part."""

    name = "alone"
    title = "Alone"
    topology = "random_regular"

    def init(self, task: qv.Task, start: qv.Start) -> Weights:
        return Weights(*start.params)

    def phases(self, task: qv.Task) -> tuple[qv.methods.Phase[Weights], ...]:
        return (self.train(epochs=1),)

    def train(self, **options: Any) -> qv.Train[Weights]:
        return qv.Train(
            part="whole",
            params=self.personal,
            update=lambda state, trained: Weights(trained.shared, trained.personal),
            **options,
        )

    def message(self, state: Weights) -> qv.Message:
        return {"body": state.body}

    def merge(self, state: Weights, mixed: qv.Message) -> Weights:
        return state._replace(body=mixed["body"])

    def personal(self, state: Weights) -> qv.Params:
        return qv.Params(state.body, state.classifier)


def with_phases(*phases: Any) -> Any:
    return type("Chosen", (Alone,), {"phases": lambda self, task: phases})()


def anything(**changed: Any) -> Any:
    return type("Odd", (Alone,), changed)()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
