"""The round loop. Read this first.

A client's round: train locally → emit one message → receive one mixed message → merge.
"""

from __future__ import annotations

from collections.abc import Callable

from quiverfl.engine.accounting import Clock
from quiverfl.engine.exchange import Exchange
from quiverfl.engine.fit import fitting
from quiverfl.engine.history import Record, Recorder
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology


def play(
    shard: Shard,
    exchange: Exchange,
    topology: Topology,
    recorder: Recorder,
    settings: RunSettings,
    start: int = 0,
    after_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Rounds `start` to the last. `after_round(t)` is called when round t is complete."""
    if start >= settings.rounds:
        return
    graph = fitting(shard.method, topology(start, shard.view))
    if start == 0:
        shard.remember(~graph.active)
    for t in range(start, settings.rounds):
        clock = Clock()
        shard.train(t, graph.active)
        told = shard.hear(t, graph)
        last = t == settings.rounds - 1
        following = graph if last else fitting(shard.method, topology(t + 1, shard.view))
        # A client that will not train next has its trained model kept: it stays its local one.
        shard.remember(graph.active & (settings.keep_local if last else ~following.active))
        clock.lap("train_seconds")
        if settings.evaluates(t):
            recorder.evaluated(t, "local", shard.evaluate(t, "local"))
        clock.lap("evaluate_seconds")
        cost = communicate(shard, exchange, graph, t)
        clock.lap("mix_seconds")
        if settings.evaluates(t):
            recorder.evaluated(t, "mixed", shard.evaluate(t, "mixed"))
        state = shard.record(t)
        clock.lap("evaluate_seconds")
        recorder.finished({"round": t, **clock.record(), **cost, **state, **told})
        after_round(t)
        graph = following


def communicate(shard: Shard, exchange: Exchange, graph: Graph, round: int) -> Record:
    """Send, sum, merge; the record says what crossed the network."""
    few = exchange.senders(graph)
    outbox = shard.outbox(few)
    payload = exchange.weigh(outbox, shard.payload(outbox, few))
    exchange.push(round, graph, outbox)
    shard.deliver(exchange.collect(round))
    return {**exchange.traffic(graph, payload), "active": int(graph.active.sum())}
