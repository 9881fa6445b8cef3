"""Checks of methods and graphs for peers, and whether they send shares of a message or copies."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from quiverfl.engine.checks.method import check_graph
from quiverfl.engine.exchange.fixed_point import receiver_weights
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.topologies.analysis import draw_first_graphs
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import ReportView
from quiverfl.topologies.topology import Topology, build_graph

MessageSplit: TypeAlias = Literal["shares", "copies"]

CHECKED_ROUNDS = 256
"""Rounds whose graphs are checked before a run, at most."""


def choose_message_split(method: Method, topology: Topology, rounds: int) -> MessageSplit:
    """Whether peers send shares or copies; refuses a method or graph that they cannot run."""
    check_peer_method(method)
    split: MessageSplit = "shares"
    # Without reports a rule may look like another: two rounds, with made-up reports.
    adaptive = topology.reports is not None
    graphs = draw_first_graphs(topology, 2 if adaptive else count_checked_rounds(topology, rounds))
    for graph in graphs:
        if graph.hub:
            raise QuiverError(
                f"topology {topology.name!r} has a server, and peers have none: use random_push, "
                "random_regular, random_pull or another topology of clients among themselves."
            )
        check_graph(method, graph)
        if not graph.column_stochastic:
            split = "copies"
    if adaptive and split == "copies":
        raise QuiverError(
            f"topology {topology.name!r} is adaptive, and its columns do not sum to 1: a peer "
            "chooses whom to give shares of its message, and cannot know who would choose a copy "
            "of it. Use loss_push, similar_push, bandit_push or another in which senders choose."
        )
    for round, graph in enumerate(graphs):
        check_message_split(split, graph, round)
    return split


def count_checked_rounds(topology: Topology, rounds: int) -> int:
    """Rounds whose graph is known before a run: only the first if clients choose it."""
    return 1 if topology.reports is not None else min(max(1, rounds), CHECKED_ROUNDS)


def seen_alone(topology: Topology) -> Topology:
    """The topology with every client choosing from the reports that it received itself.

    A rule that uses no other reports gives the same graph.
    """
    if topology.reports is None:
        return topology
    options = dict(topology.options)
    draw = partial(_draw_by_client, topology)
    return Topology(topology.name, topology.clients, draw, options, topology.reports)


def _draw_by_client(topology: Topology, round: int, view: ReportView) -> Graph:
    graphs = [topology(round, view.of_client(client)) for client in range(topology.clients)]
    columns = [receiver_weights(graph, client) for client, graph in enumerate(graphs)]
    return build_graph(
        topology.clients,
        np.array([receiver for column in columns for receiver in column], dtype=np.int64),
        np.array([client for client, column in enumerate(columns) for _ in column], dtype=np.int64),
        np.array([weight for column in columns for weight in column.values()]),
        active=graphs[0].active,
    )


def check_peer_method(method: Method) -> None:
    """Refuse a method that peers without a server cannot run."""
    if method.topology == "star":
        raise QuiverError(
            f"{method.title} needs a server, and peers have none. Use dfedavgm, which averages "
            "whole models among neighbours, or dfedavgmp (undirected) or dfedpgp (directed), which "
            "share the body and keep the head."
        )
    if method.delay:
        raise QuiverError(
            f"method.delay = {method.delay}: a peer's link carries one message at a time, so none "
            'can be under way for several rounds. Set delay = 0; with peers.mode = "async" '
            "training and communication overlap by themselves."
        )


def check_message_split(split: MessageSplit, graph: Graph, round: int) -> None:
    """Refuse a round whose graph is of another kind than those before the run."""
    if split == "shares" and not graph.column_stochastic:
        raise QuiverError(
            f"in round {round} the columns of the mixing matrix do not sum to 1, though they did "
            "in the rounds before: peers split their messages on all graphs of a run, or on none."
        )
    if split == "copies" and not graph.row_stochastic:
        raise QuiverError(
            f"in round {round} the rows of the mixing matrix do not sum to 1, and in some round "
            "its columns do not: peers need a topology whose columns sum to 1 in every round "
            "(random_push, random_regular, ring, exponential) or whose rows do (random_pull)."
        )
