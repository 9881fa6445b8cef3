"""The one round loop, the same for every runtime. Read this first.

A client's round: train locally → emit one message → receive one mixed message → merge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quiverfl.engine.accounting import consensus_distance, spread_of_mass, traffic
from quiverfl.engine.exchange import Exchange
from quiverfl.engine.gradients import gradient_norms
from quiverfl.engine.history import Record, Recorder
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.topologies.graph import Graph, Topology


@dataclass(frozen=True)
class Schedule:
    """How many rounds, which are evaluated, whether local models are kept at the end, and whether
    the gradients that the theorem bounds are measured."""

    rounds: int
    evaluate_every: int = 1
    keep_local: bool = True
    gradients: bool = False

    def evaluates(self, round: int) -> bool:
        return (round + 1) % self.evaluate_every == 0 or round == self.rounds - 1


def play(
    shard: Shard,
    exchange: Exchange,
    topology: Topology,
    method: Method,
    recorder: Recorder,
    schedule: Schedule,
    *,
    start: int = 0,
    after_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Rounds `start` to the last. `after_round(t)` is called when round t is complete."""
    if start >= schedule.rounds:
        return
    graph = checked(method, topology(start))
    if start == 0:
        shard.remember(np.flatnonzero(~graph.active))
    for t in range(start, schedule.rounds):
        last = t == schedule.rounds - 1
        following = graph if last else checked(method, topology(t + 1))
        # A client that will not train next has its trained model kept: it stays its local one.
        keep = graph.active & (schedule.keep_local if last else ~following.active)
        clock = Clock()
        shard.train(t, graph.active, keep)
        clock.lap("train_seconds")
        evaluate(shard, recorder, schedule, t, "local")
        clock.lap("evaluate_seconds")
        cost = mix(shard, exchange, graph, t)
        clock.lap("mix_seconds")
        evaluate(shard, recorder, schedule, t, "mixed")
        state = _state_of(shard, method, schedule, t)
        clock.lap("evaluate_seconds")
        recorder.finished({"round": t, **clock.record(), **cost, **state})
        after_round(t)
        graph = following


def mix(shard: Shard, exchange: Exchange, graph: Graph, round: int) -> Record:
    """Send, sum, merge; the record says what crossed the network."""
    few = graph.senders if graph.common_row is not None else None
    outbox = shard.outbox(few)
    payload = shard.payload(outbox, few)
    exchange.push(round, graph, outbox)
    shard.deliver(exchange.collect(round))
    return {**traffic(graph, payload), "active": int(graph.active.sum())}


def evaluate(shard: Shard, recorder: Recorder, schedule: Schedule, round: int, stage: str) -> None:
    if schedule.evaluates(round):
        recorder.evaluated(round, stage, shard.evaluate(round, stage))


def checked(method: Method, graph: Graph) -> Graph:
    """Refuse a method on a graph whose sums it could not make sense of."""
    if method.carries_mass and not (graph.column_stochastic or graph.row_stochastic):
        raise QuiverError(
            f"{method.title} needs mixing weights whose columns (push) or rows (pull) sum to 1; "
            "this graph has neither."
        )
    if not method.carries_mass and not graph.row_stochastic:
        raise QuiverError(
            f"{method.title} averages models and carries no push-sum mass, so every row of the "
            "mixing matrix must sum to 1; this graph only conserves columns. Use random_pull, "
            "random_regular, star or another row-stochastic topology, or a push-sum method "
            "(dfedpgp, osgp)."
        )
    if not method.carries_mass and method.delay:
        raise QuiverError(
            f"{method.title} carries no push-sum mass, so a delay of {method.delay} would shrink "
            "its models: set delay to 0, or use osgp, whose μ accounts for messages in flight."
        )
    return graph


def _state_of(shard: Shard, method: Method, schedule: Schedule, round: int) -> Record:
    record: Record = {"steps": shard.steps.tolist(), **spread_of_mass(shard.state)}
    record.update(consensus=None, gradient_shared=None, gradient_personal=None)
    if schedule.evaluates(round):
        mu = getattr(shard.state, "mu", None)
        record["consensus"] = consensus_distance(shard.state.u, mu)
        if schedule.gradients:
            record.update(gradient_norms(shard, method))
    return record


class Clock:
    """Seconds of a round, by what they were spent on."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._begin = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def record(self) -> dict[str, float]:
        return {"seconds": self._last - self._begin, **self._laps}
