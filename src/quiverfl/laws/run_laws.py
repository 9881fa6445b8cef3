"""Laws about whole runs. Each function says how a method breaks its law, or returns None."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.errors import Diverged, QuiverError
from quiverfl.laws.problem import CLIENTS, Case, Difference, quadratics, tiny_task, training_for
from quiverfl.methods.contract import Method, SingleStep
from quiverfl.methods.local import Local
from quiverfl.runs.run import Run
from quiverfl.runs.simulate import simulate
from quiverfl.task import Task
from quiverfl.topologies import Topology
from quiverfl.training import Training

ENOUGH = (30, 300)
"""Rounds in which the loss must have fallen by half: a slow method gets the larger number."""


class LinearPair(nn.Module):
    """x·w in two steps, so that there is a body and a head: fixed features, then a linear map."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(x))
        return outputs


class TwoClasses(LinearPair):
    """Its head has a bias, which methods that add to the head need."""

    def __init__(self) -> None:
        super().__init__(outputs=2)
        self.head = nn.Linear(6, 2)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(dim=-1) / 2


def least_squares() -> tuple[Task, FederatedData, float]:
    """Task, data and learning rate; every client's optimum is known, and has loss 0."""
    made = quadratics(clients=CLIENTS, dimension=6, samples=12, spread=0.3, seed=2)
    task = Task(model=LinearPair, personal=("head",), loss=half_square, metrics={})
    return task, made.data, 0.05


def two_classes() -> tuple[Task, FederatedData, float]:
    """The same inputs, labelled by the sign of the target: for methods that need classes."""
    _, data, _ = least_squares()
    labels = (data.train.y[:, 0] > 0).long()
    split = replace(data.train, y=labels)
    return Task(model=TwoClasses, personal=("head",)), FederatedData(split, split, classes=2), 1.0


Problem = tuple[Task, FederatedData, float]


def losses_after(
    method: Method, topology: Topology, rounds: int, problem: Problem
) -> dict[str, float]:
    """The mean training loss over clients after so many rounds, by stage."""
    task, data, rate = problem
    run = simulate(
        task,
        data,
        method=copy.deepcopy(method),
        topology=topology,
        training=training_for(method, Training(lr=rate, batch_size=None)),
        rounds=rounds,
        evaluate_every=rounds,
        dtype=torch.float64,
        threads=1,
    )
    history = run.history
    return {
        stage: float(history[history["stage"] == stage]["loss"].mean())
        for stage in ("local", "mixed")
    }


def initial_loss(problem: Problem) -> float:
    """The mean training loss over clients of the model that runs start with."""
    task, data, rate = problem
    settings = RunSettings(rounds=1, dtype=torch.float64)
    shard = Shard(task, data, Local(), Training(lr=rate), settings)
    return float(np.mean(shard.evaluate(0, "mixed")["loss"]))


def falling_loss(case: Case) -> str | None:
    """Law 7: on least squares, or on two classes where the method needs classes."""
    method, topology = case.method, case.topology
    problem = least_squares()
    try:
        losses_after(method, topology, 1, problem)
    except Diverged:
        pass
    except QuiverError:
        problem = two_classes()
    first = initial_loss(problem)
    what = f"the loss should fall from {first:.3g} to less than half of it in {ENOUGH[-1]} rounds"
    last: dict[str, float] = {}
    for rounds in ENOUGH:
        try:
            last = losses_after(method, topology, rounds, problem)
        except Diverged as error:
            return f"on least squares {what}; training diverged in round {error.round + 1}."
        if all(loss < first / 2 for loss in last.values()):
            return None
    losses = ", ".join(f"{loss:.3g} at stage {stage}" for stage, loss in last.items())
    return f"on least squares {what}; it is {losses}."


def evaluating(case: Case) -> str | None:
    """Law 6."""
    every, seldom = (case.run(rounds=2, evaluate_every=number) for number in (1, 2))
    apart = Difference.between(states(every), states(seldom))
    if apart.size:
        return (
            "evaluating should change nothing; a run that is evaluated in every round ends "
            f"elsewhere than one that is evaluated in every other: field {apart}."
        )
    before, shard = states(every), every._shard
    shard.evaluate(3, "mixed")
    shard.evaluate(3, "local")
    apart = Difference.between(before, states(every))
    return f"evaluating should change nothing; field {apart}." if apart.size else None


def resuming(case: Case) -> str | None:
    """Law 10."""
    taken: list[Checkpoint] = []
    whole = case.run(rounds=4, checkpoint=taken.append, checkpoint_every=1)
    resumed = case.run(rounds=4, resume=taken[1])
    apart = Difference.between(states(whole), states(resumed))
    start = "a run that is interrupted after two of four rounds and resumed should end with the "
    if apart.size:
        return (
            f"{start}same bits; field {apart}. A method remembers things in its state and nowhere "
            "else."
        )
    if not whole.history.equals(resumed.history):
        return f"{start}same history; it has other numbers."
    for client in range(CLIENTS):
        one, other = (run.parameters(client, stage="local") for run in (whole, resumed))
        if not all(torch.equal(one[name], other[name]) for name in one):
            return f"{start}same local models; that of client {client} is another."
    return None


def vectorising(case: Case, tolerance: float = 1e-12) -> str | None:
    """Law 11, with unequal epochs where the method counts epochs."""
    options: dict[str, Any] = {}
    if counts_epochs(case.method):
        options["epochs_per_client"] = [1, 2, 3, 1, 0, 3]
    together, alone = (
        case.run(rounds=2, executor=name, **options) for name in ("vectorized", "sequential")
    )
    start = "clients that are computed together should reach the numbers they reach one by one; "
    apart = Difference.between(states(together), states(alone))
    if apart.size > tolerance:
        return f"{start}after two rounds field {apart}."
    columns = ["accuracy", "loss"]
    difference = (together.history[columns] - alone.history[columns]).abs().max()
    for name, value in difference.items():
        if not value <= tolerance:
            return f"{start}their {name} differs by {value:.2g}."
    return None


def counts_epochs(method: Method) -> bool:
    """Whether clients may have epochs of their own."""
    loops = [phase for phase in method.phases(tiny_task()) if not isinstance(phase, SingleStep)]
    sent = [phase for phase in loops if phase.trains_message]
    return any(phase.epochs is not None for phase in sent) and all(p.steps is None for p in sent)


def reproducing(case: Case) -> str | None:
    """Law 13."""
    first, again = (states(case.run(rounds=2)) for _ in range(2))
    apart = Difference.between(first, again)
    if apart.size:
        return (
            f"the same seed should give the same run; field {apart} between two of them. Draw "
            "random numbers from start.random and info.noise."
        )
    return None


def states(run: Run) -> dict[str, Tensor]:
    """Copies of all fields of all clients' states."""
    fields: Sequence[tuple[str, Tensor]] = run._shard.state._asdict().items()
    return {name: leaf.clone() for name, leaf in fields}
