"""Unreliable links: in each round every one-way link fails by itself with some probability."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.seeds import hashed
from quiverfl.topologies.arguments import share
from quiverfl.topologies.graph import TOLERANCE, Flags, Graph, Integers
from quiverfl.topologies.topology import Topology, from_entries
from quiverfl.topologies.view import View

Exchange: TypeAlias = Literal["push", "pull", "both"]
BITS = 53


def unreliable(
    topology: Topology, failure: float, seed: int = 0, exchange: Exchange | None = None
) -> Topology:
    """The same graphs without the links that fail; what each of them carried stays at home.

    A push needs one direction: its weight stays on the sender's diagonal, and columns still sum to
    1. A pull needs one, too, and its weight stays with the receiver. An undirected exchange needs
    both directions: when either fails, its weights return to the diagonals of both ends, and a
    symmetric matrix stays one. `exchange` says which it is; unless given, symmetric matrices are
    undirected exchanges, others pushes if their columns sum to 1 and pulls if their rows do.
    """
    failure = share("unreliable", "link_failure", failure, zero=True)
    first = topology(0)
    if first.hub:
        raise QuiverError(
            f"topology.link_failure = {failure}: {topology.name} has links to a server only, and a "
            "server's round needs every client it sampled; take a topology without a server."
        )
    kind = exchange or _kind(first, topology.name)
    options = {**topology.options, "link_failure": failure, "link_failure_seed": seed}
    draw = partial(_draw, topology, failure, seed, kind)
    return Topology(topology.name, topology.clients, draw, options, topology.looks)


def failed(failure: float, seed: int, round: int, receivers: Integers, senders: Integers) -> Flags:
    """Whether the links from these senders to these receivers fail: each by a draw of its own."""
    drawn = hashed(seed, "link-failure", round, receivers, senders) >> np.uint64(64 - BITS)
    lost: Flags = drawn < np.uint64(failure * (1 << BITS))
    return lost


def _draw(
    topology: Topology,
    failure: float,
    seed: int,
    kind: Exchange,
    round: int,
    view: View | None = None,
) -> Graph:
    graph = topology(round, view)
    links = graph.sparse.tocoo()
    receivers = links.row.astype(np.int64)
    senders = links.col.astype(np.int64)
    lost = failed(failure, seed, round, receivers, senders)
    if kind == "both":
        lost |= failed(failure, seed, round, senders, receivers)
    lost &= receivers != senders  # what one keeps needs no link
    owner = senders if kind == "push" else receivers
    return from_entries(
        graph.clients,
        np.where(lost, owner, receivers),
        np.where(lost, owner, senders),
        links.data,
        active=graph.active,
    )


def _kind(graph: Graph, name: str) -> Exchange:
    if graph.clients == 1 or abs(graph.sparse - graph.sparse.T).max() <= TOLERANCE:
        return "both"
    if graph.column_stochastic:
        return "push"
    if graph.row_stochastic:
        return "pull"
    raise QuiverError(
        f"unreliable: neither rows nor columns of {name} sum to 1, so it is not known whose the "
        "weights of failed links are; say exchange='push', 'pull' or 'both'."
    )
