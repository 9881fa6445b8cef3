"""MyMethod: your method. This one is decentralized averaging of the shared part.

docs/how-to/own-method.md has what a method may declare and ask for. After a change try the laws
that every method keeps:

    quiver check my_method:MyMethod
"""

from dataclasses import dataclass
from typing import NamedTuple

import quiverfl as qv


class State(NamedTuple):
    u: qv.Shared
    v: qv.Personal


@dataclass(frozen=True)
class MyMethod(qv.Method[State]):
    epochs: qv.Count = 5

    name = "my_method"
    title = "My method"
    topology = "random_regular"

    def init(self, task: qv.Task, start: qv.Start) -> State:
        return State(*start.params)

    def phases(self, task: qv.Task) -> tuple[qv.Train[State], ...]:
        return (
            qv.Train(
                part="whole",
                epochs=self.epochs,
                params=self.personal,
                update=lambda state, trained: State(trained.shared, trained.personal),
            ),
        )

    def message(self, state: State) -> qv.Message:
        return {"u": state.u}

    def merge(self, state: State, mixed: qv.Message) -> State:
        return state._replace(u=mixed["u"])

    def personal(self, state: State) -> qv.Params:
        """Called after training and after merge: it must be right at both moments."""
        return qv.Params(state.u, state.v)
