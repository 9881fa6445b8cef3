"""Partial participation: in each round only some clients are online."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.topologies.arguments import share
from quiverfl.topologies.graph import Flags, Graph
from quiverfl.topologies.star import sample
from quiverfl.topologies.topology import Topology, from_entries
from quiverfl.topologies.view import View

Keeper: TypeAlias = Literal["sender", "receiver"]


def participating(
    topology: Topology, fraction: float, seed: int = 0, kept_by: Keeper | None = None
) -> Topology:
    """The same graphs with only a fraction of the clients online, drawn again in every round.

    round(fraction · clients) clients are online, at least one. The others neither train nor send
    nor receive: identity row and column. A weight that cannot be used stays on the diagonal of the
    sender where columns sum to 1 (mass is conserved), of the receiver where only rows do. Symmetric
    matrices stay symmetric either way; for directed ones whose rows and columns both sum to 1
    `kept_by` says which of the two shall last.
    """
    fraction = share("participating", "fraction", fraction, zero=False)
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
    draw = partial(_draw, topology, fraction, seed, kept_by)
    return Topology(topology.name, topology.clients, draw, options, topology.looks)


def _draw(
    topology: Topology,
    fraction: float,
    seed: int,
    kept_by: Keeper | None,
    round: int,
    view: View | None = None,
) -> Graph:
    clients = topology.clients
    count = max(1, int(fraction * clients + 0.5))
    online = np.zeros(clients, dtype=bool)
    online[sample(clients, count, seed, "participation", round)] = True
    graph = topology(round, view)
    return _without(graph, online, kept_by or _keeper(graph, topology.name))


def _keeper(graph: Graph, name: str) -> Keeper:
    if graph.column_stochastic:
        return "sender"
    if graph.row_stochastic:
        return "receiver"
    raise QuiverError(
        f"participating: neither rows nor columns of {name} sum to 1, so it is not known whose "
        "the unused weights are; say kept_by='sender' or kept_by='receiver'."
    )


def _without(graph: Graph, online: Flags, kept_by: Keeper) -> Graph:
    links = graph.sparse.tocoo()
    receivers, senders, weights = links.row, links.col, links.data
    owner = senders if kept_by == "sender" else receivers
    used = online[receivers] & online[senders]
    unused = ~used & online[owner]
    offline = np.flatnonzero(~online)
    return from_entries(
        graph.clients,
        np.concatenate([receivers[used], owner[unused], offline]),
        np.concatenate([senders[used], owner[unused], offline]),
        np.concatenate([weights[used], weights[unused], np.ones(len(offline))]),
        active=graph.active & online,
        hub=graph.hub,
    )
