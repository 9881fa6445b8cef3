"""Partial participation and unreliable links.

In each round only some clients are online, and every one-way link fails with some probability.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias, get_args

import numpy as np

from quiverfl.errors import QuiverError, suggest
from quiverfl.seeds import key_hashes
from quiverfl.topologies.arguments import check_fraction
from quiverfl.topologies.fixed import sample_clients
from quiverfl.topologies.graph import TOLERANCE, Graph
from quiverfl.topologies.reports import ReportView
from quiverfl.topologies.topology import Topology, build_graph
from quiverfl.types import Flags, Integers

Keeper: TypeAlias = Literal["sender", "receiver"]


def check_topology(function: str, topology: object) -> None:
    if not isinstance(topology, Topology):
        raise QuiverError(
            f"{function}: a {type(topology).__name__} is no topology: give one, such as "
            "qv.ring(clients=6)."
        )


def participating(
    topology: Topology, fraction: float, seed: int = 0, kept_by: Keeper | None = None
) -> Topology:
    """The same graphs with only a fraction of the clients online, drawn again in every round.

    round(fraction · clients) clients are online, at least one. All others neither train nor send
    nor receive: identity row and column. A weight that cannot be used stays on the diagonal of the
    sender where columns sum to 1 (mass is conserved), of the receiver where only rows do. Symmetric
    matrices stay symmetric either way; for directed ones whose rows and columns both sum to 1
    `kept_by` says which of the two shall last.
    """
    check_topology("participating", topology)
    fraction = check_fraction("participating", "fraction", fraction, zero=False)
    if kept_by not in (None, "sender", "receiver"):
        raise QuiverError(
            f"participating: kept_by = {kept_by!r}: it must be 'sender', 'receiver' or None."
        )
    if topology(0).hub:
        raise QuiverError(
            f"participating: {topology.name} already says who takes part in a round; "
            "give star(sampled=…) the number of clients instead."
        )
    options = {**topology.options, "participation": fraction, "participation_seed": seed}
    if kept_by is not None:
        options["kept_by"] = kept_by
    draw = partial(_draw_participants, topology, fraction, seed, kept_by)
    return Topology(topology.name, topology.clients, draw, options, topology.reports)


def _draw_participants(
    topology: Topology,
    fraction: float,
    seed: int,
    kept_by: Keeper | None,
    round: int,
    view: ReportView | None = None,
) -> Graph:
    clients = topology.clients
    count = max(1, int(fraction * clients + 0.5))
    online = np.zeros(clients, dtype=bool)
    online[sample_clients(clients, count, seed, "participation", round)] = True
    graph = topology(round, view)
    return _remove_offline(graph, online, kept_by or _choose_keeper(graph, topology.name))


def _choose_keeper(graph: Graph, name: str) -> Keeper:
    if graph.column_stochastic:
        return "sender"
    if graph.row_stochastic:
        return "receiver"
    raise QuiverError(
        f"participating: neither rows nor columns of {name} sum to 1, so it is not known whose "
        "the unused weights are; say kept_by='sender' or kept_by='receiver'."
    )


def _remove_offline(graph: Graph, online: Flags, kept_by: Keeper) -> Graph:
    links = graph.sparse.tocoo()
    receivers, senders, weights = links.row, links.col, links.data
    owner = senders if kept_by == "sender" else receivers
    used = online[receivers] & online[senders]
    unused = ~used & online[owner]
    offline = np.flatnonzero(~online)
    return build_graph(
        graph.clients,
        np.concatenate([receivers[used], owner[unused], offline]),
        np.concatenate([senders[used], owner[unused], offline]),
        np.concatenate([weights[used], weights[unused], np.ones(len(offline))]),
        active=graph.active & online,
        hub=graph.hub,
    )


Exchange: TypeAlias = Literal["push", "pull", "both"]
BITS = 53


def unreliable(
    topology: Topology, failure: float, seed: int = 0, exchange: Exchange | None = None
) -> Topology:
    """The same graphs without the links that fail; the weight of a failed link stays at home.

    A push needs one direction: its weight stays on the sender's diagonal, and columns still sum to
    1. A pull needs one, too, and its weight stays with the receiver. An undirected exchange needs
    both directions: when either fails, its weights return to the diagonals of both ends, and a
    symmetric matrix stays one. `exchange` says which it is; unless given, symmetric matrices are
    undirected exchanges, others pushes if their columns sum to 1 and pulls if their rows do. With
    `exchange = "pull"` a client of an undirected graph averages over whatever arrives.
    """
    check_topology("unreliable", topology)
    if exchange not in (None, *get_args(Exchange)):
        raise QuiverError(
            f"topology.exchange = {exchange!r}: {suggest(str(exchange), get_args(Exchange))}"
        )
    failure = check_fraction("unreliable", "link_failure", failure, zero=True)
    first = topology(0)
    if first.hub:
        raise QuiverError(
            f"topology.link_failure = {failure}: {topology.name} has links to a server only, and a "
            "server's round needs every client it sampled; take a topology without a server."
        )
    kind = exchange or _choose_exchange(first, topology.name)
    options = {**topology.options, "link_failure": failure, "link_failure_seed": seed}
    draw = partial(_draw_links, topology, failure, seed, kind)
    return Topology(topology.name, topology.clients, draw, options, topology.reports)


def draw_failures(
    failure: float, seed: int, round: int, receivers: Integers, senders: Integers
) -> Flags:
    """Draw for each link from a sender to a receiver whether it fails."""
    bits = key_hashes(seed, "link-failure", round, receivers, senders) >> np.uint64(64 - BITS)
    failures: Flags = bits < np.uint64(failure * (1 << BITS))
    return failures


def _draw_links(
    topology: Topology,
    failure: float,
    seed: int,
    kind: Exchange,
    round: int,
    view: ReportView | None = None,
) -> Graph:
    graph = topology(round, view)
    links = graph.sparse.tocoo()
    receivers = links.row.astype(np.int64)
    senders = links.col.astype(np.int64)
    failures = draw_failures(failure, seed, round, receivers, senders)
    if kind == "both":
        failures |= draw_failures(failure, seed, round, senders, receivers)
    failures &= receivers != senders  # what one keeps needs no link
    owner = senders if kind == "push" else receivers
    return build_graph(
        graph.clients,
        np.where(failures, owner, receivers),
        np.where(failures, owner, senders),
        links.data,
        active=graph.active,
    )


def _choose_exchange(graph: Graph, name: str) -> Exchange:
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
