"""Your own method in one class: neighbours are followed only part of the way.

    python examples/own_method.py            # about a minute on one core
    python examples/own_method.py --quick    # seconds: to see that it runs

Cautious averages bodies with its neighbours as DFedAvgM-P does, but moves from its own body u to
the mean only by a share γ: u ← u + γ (mean − u). With γ = 1 that is plain averaging. A method says
what is trained, what is sent and what becomes of what arrives; the engine does the rest. On the
command line the same class is `--methods own_method:Cautious`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NamedTuple

import quiverfl as qv


class State(NamedTuple):
    u: qv.Shared
    v: qv.Personal


@dataclass(frozen=True)
class Cautious(qv.Method[State]):
    epochs: qv.Count = 2
    follow: qv.UnitInterval = 0.5

    name = "cautious"
    title = "Cautious"
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
        return {"u": state.u.clone()}  # a copy, as merge still needs u when the mean has arrived

    def merge(self, state: State, mixed: qv.Message) -> State:
        return state._replace(u=state.u + self.follow * (mixed["u"] - state.u))

    def personal(self, state: State) -> qv.Params:
        return qv.Params(state.u, state.v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds: to see that it runs")
    rounds = 3 if parser.parse_args().quick else 60
    data = qv.partition("digits", "dirichlet", clients=20, seed=0, alpha=0.1, samples_per_client=30)
    task = qv.Task(lambda: qv.make_model("mlp", (1, 8, 8), 10, hidden=[64, 32]), personal="head")
    alone, graph = qv.isolated(clients=20), qv.random_regular(clients=20, neighbors=5, seed=0)
    for name, method, topology in (
        ("alone", qv.Local(epochs=2), alone),
        ("γ = 0.2", Cautious(follow=0.2), graph),
        ("γ = 0.5", Cautious(follow=0.5), graph),
        ("γ = 1, plain averaging", Cautious(follow=1.0), graph),
    ):
        run = qv.simulate(
            task,
            data,
            method=method,
            topology=topology,
            training=qv.Training(lr=0.05, momentum=0.9, batch_size=16),
            rounds=rounds,
        )
        found = run.summary["stages"]["mixed"]["last"]
        print(f"{name}: {100 * found['mean']:.2f} %, worst tenth {100 * found['worst10']:.2f} %")


if __name__ == "__main__":
    main()
