"""Who sends to whom: functions from a round to its graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from quiverfl.errors import QuiverError, nearest
from quiverfl.topologies.analysis import TopologyReport, analyse
from quiverfl.topologies.fixed import (
    directed_ring,
    exponential,
    full,
    grid,
    isolated,
    one_peer_exponential,
    ring,
    torus,
)
from quiverfl.topologies.from_graphs import custom, from_matrix, from_networkx, metropolis
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.participation import participating
from quiverfl.topologies.random import erdos_renyi, random_pull, random_push, random_regular
from quiverfl.topologies.star import star
from quiverfl.topologies.topology import Topology

__all__ = [
    "TOPOLOGIES",
    "Graph",
    "Topology",
    "TopologyReport",
    "analyse",
    "custom",
    "directed_ring",
    "erdos_renyi",
    "exponential",
    "from_matrix",
    "from_networkx",
    "full",
    "grid",
    "isolated",
    "make_topology",
    "metropolis",
    "one_peer_exponential",
    "participating",
    "random_pull",
    "random_push",
    "random_regular",
    "ring",
    "star",
    "torus",
]

TOPOLOGIES: dict[str, Callable[..., Topology]] = {
    "isolated": isolated,
    "star": star,
    "random_push": random_push,
    "random_pull": random_pull,
    "random_regular": random_regular,
    "erdos_renyi": erdos_renyi,
    "ring": ring,
    "directed_ring": directed_ring,
    "exponential": exponential,
    "one_peer_exponential": one_peer_exponential,
    "grid": grid,
    "torus": torus,
    "full": full,
}


def make_topology(name: str, clients: int, **options: Any) -> Topology:
    """A topology by its name, as a configuration gives it; unknown or missing options are refused.

    `participation` is an option of all of them, a fraction below 1 (see participating).
    """
    if name not in TOPOLOGIES:
        raise QuiverError(f"unknown topology {name!r}: {nearest(name, TOPOLOGIES)}")
    participation = options.pop("participation", 1.0)
    known = inspect.signature(TOPOLOGIES[name]).parameters
    for option in options:
        if option not in known:
            raise QuiverError(
                f"topology {name!r} has no option {option!r}: "
                f"{nearest(option, {*known, 'participation'} - {'clients'})}"
            )
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in {"clients", *options}:
            raise QuiverError(f"topology {name!r} needs the option {option!r}.")
    topology = TOPOLOGIES[name](clients, **options)
    if participation == 1:
        return topology
    return participating(topology, participation, seed=options.get("seed", 0))
