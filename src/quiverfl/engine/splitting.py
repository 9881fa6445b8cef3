"""Which methods and graphs peers can carry, and how: by shares of a message, or by copies of it."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from quiverfl.engine.fit import fitting
from quiverfl.engine.shares import column
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, from_entries
from quiverfl.topologies.view import View

Split: TypeAlias = Literal["shares", "copies"]

LOOKED_AT = 256
"""Rounds whose graphs are looked at before a run begins, at most."""


def splitting(method: Method, topology: Topology, rounds: int) -> Split:
    """How peers carry this method's messages over this topology; refused if they cannot."""
    check_peer_method(method)
    split: Split = "shares"
    looked_at = range(foreseen(topology, rounds))
    for round in looked_at:
        graph = topology(round)
        if graph.hub:
            raise QuiverError(
                f"topology {topology.name!r} has a server, and peers have none: use random_push, "
                "random_regular, random_pull or another topology of clients among themselves."
            )
        fitting(method, graph)
        if not graph.column_stochastic:
            split = "copies"
    if topology.looks is not None and split == "copies":
        raise QuiverError(
            f"topology {topology.name!r} looks, and its columns do not sum to 1: a peer chooses "
            "whom to give shares of its message, and cannot know who would choose a copy of it. "
            "Use loss_push, similar_push, bandit_push or another in which senders choose."
        )
    for round in looked_at:
        check_split(split, topology(round), round)
    return split


def foreseen(topology: Topology, rounds: int) -> int:
    """Of how many rounds the graph is looked at before a run: the first, if clients choose it."""
    return 1 if topology.looks is not None else min(max(1, rounds), LOOKED_AT)


def seen_alone(topology: Topology) -> Topology:
    """The same where everybody chooses from what it was told itself, and knows no more.

    A rule that lets clients look no further than that gives the same graph.
    """
    if topology.looks is None:
        return topology
    options = dict(topology.options)
    draw = partial(_chosen_alone, topology)
    return Topology(topology.name, topology.clients, draw, options, topology.looks)


def _chosen_alone(topology: Topology, round: int, view: View) -> Graph:
    graphs = [topology(round, view.only(client)) for client in range(topology.clients)]
    columns = [column(graph, client) for client, graph in enumerate(graphs)]
    return from_entries(
        topology.clients,
        np.array([to for found in columns for to in found], dtype=np.int64),
        np.array([client for client, found in enumerate(columns) for _ in found], dtype=np.int64),
        np.array([weight for found in columns for weight in found.values()]),
        active=graphs[0].active,
    )


def check_peer_method(method: Method) -> None:
    """Refuse a method that is not one of peers among themselves."""
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


def check_split(split: Split, graph: Graph, round: int) -> None:
    """Refuse a round whose graph is of another kind than those the run was begun with."""
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
