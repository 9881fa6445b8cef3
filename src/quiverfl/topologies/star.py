"""A server, as a graph: every client receives the average of the sampled clients' messages."""

from __future__ import annotations

from functools import partial

import numpy as np

from quiverfl.seeds import hashed
from quiverfl.topologies.arguments import checked_clients, checked_whole
from quiverfl.topologies.graph import Graph, Integers
from quiverfl.topologies.topology import Topology, same_for_all


def star(clients: int, sampled: int, seed: int = 0, static: bool = False) -> Topology:
    """A server: a random set of clients trains; all receive the average of that set."""
    clients = checked_clients("star", clients)
    why = f"a round samples some of the {clients} clients"
    sampled = checked_whole("star", "sampled", sampled, 1, clients, why)
    draw = partial(_star, clients, sampled, seed)
    options = {"sampled": sampled, "seed": seed, "static": static}
    if static:
        return Topology.fixed("star", draw(0), **options)
    return Topology("star", clients, draw, options)


def _star(clients: int, sampled: int, seed: int, round: int) -> Graph:
    chosen = sample(clients, sampled, seed, "star", round)
    active = np.zeros(clients, dtype=bool)
    active[chosen] = True
    return same_for_all(chosen, np.full(sampled, 1 / sampled), active, hub=True)


def sample(clients: int, count: int, seed: int, purpose: str, round: int) -> Integers:
    """A uniformly random set of clients, ascending: those with the smallest hashes."""
    keys = hashed(seed, purpose, round, np.arange(clients))
    return np.sort(np.argsort(keys, kind="stable")[:count])
