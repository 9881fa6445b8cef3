"""The round loop. Read this first, then engine/local/step.py.

A client's round: train locally → push one message → receive one mixed message → merge.
"""

from __future__ import annotations

from collections.abc import Callable

from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.history import Clock, Record, Recorder
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, find_offline


def run_rounds(
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
    graph = topology(start, shard.view)
    if start == 0:
        shard.keep_local_models(~graph.active)
    for t in range(start, settings.rounds):
        clock = Clock()
        shard.train(t, graph.active)
        reports = shard.exchange_reports(t, graph)
        last = t == settings.rounds - 1
        evaluated = last or (t + 1) % settings.evaluate_every == 0
        following = graph if last else topology(t + 1, shard.view)
        # A client that will not train next has its trained model kept: it stays its local one.
        shard.keep_local_models(graph.active & (settings.keep_local if last else ~following.active))
        clock.lap("train_seconds")
        if evaluated:
            recorder.on_evaluation(t, "local", shard.evaluate(t, "local"))
        clock.lap("evaluate_seconds")
        traffic = exchange_messages(shard, exchange, graph, t)
        clock.lap("mix_seconds")
        if evaluated:
            recorder.on_evaluation(t, "mixed", shard.evaluate(t, "mixed"))
        state = shard.record(evaluated)
        clock.lap("evaluate_seconds")
        recorder.on_round_end({"round": t, **clock.record(), **traffic, **state, **reports})
        after_round(t)
        graph = following


def exchange_messages(shard: Shard, exchange: Exchange, graph: Graph, round: int) -> Record:
    """Push, mix, merge; the record says what crossed the network."""
    if shard.members is not None:
        shard.members.keep_leaving(shard)
    senders = exchange.senders(graph)
    messages = shard.outbox(senders)
    payload = exchange.coded_sizes(messages, shard.payload(messages, senders))
    exchange.push(round, graph, messages)
    mixed = exchange.collect(round)
    shard.merge(mixed, None if graph.active.all() else find_offline(graph))
    return {**exchange.record(graph, payload), "active": int(graph.active.sum())}
