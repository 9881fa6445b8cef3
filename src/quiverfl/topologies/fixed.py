"""Graphs without chance. All of them have rows and columns that sum to 1."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from quiverfl.topologies.arguments import checked_clients
from quiverfl.topologies.from_graphs import metropolis_graph
from quiverfl.topologies.graph import Graph, Integers
from quiverfl.topologies.topology import Topology, from_entries, same_for_all


def isolated(clients: int) -> Topology:
    """Nobody sends anything: every client keeps its own message (the identity matrix)."""
    clients = checked_clients("isolated", clients)
    return Topology.fixed("isolated", _circulant(clients, [0]))


def ring(clients: int) -> Topology:
    """Undirected ring: 1/3 to oneself and to each of the two neighbours."""
    clients = checked_clients("ring", clients)
    return Topology.fixed("ring", _circulant(clients, [0, 1, -1]))


def directed_ring(clients: int) -> Topology:
    """Directed ring: client i keeps one half and sends the other to client i + 1."""
    clients = checked_clients("directed_ring", clients)
    return Topology.fixed("directed_ring", _circulant(clients, [0, 1]))


def full(clients: int) -> Topology:
    """Everybody sends to everybody: each round ends in the exact average."""
    clients = checked_clients("full", clients)
    every, active = np.arange(clients), np.ones(clients, dtype=bool)
    graph = same_for_all(every, np.full(clients, 1 / clients), active)
    return Topology.fixed("full", graph)


def exponential(clients: int) -> Topology:
    """Directed exponential: client i sends to i + 1, i + 2, i + 4, … in every round."""
    clients = checked_clients("exponential", clients)
    graph = _circulant(clients, [0, *_hops(clients)])
    return Topology.fixed("exponential", graph)


def one_peer_exponential(clients: int) -> Topology:
    """Directed exponential, one peer a round: client i sends half to i + 1, then i + 2, i + 4, …

    With a power of two of clients, one pass over the hops is the exact average.
    """
    clients = checked_clients("one_peer_exponential", clients)
    graphs = tuple(_circulant(clients, [0, hop]) for hop in _hops(clients) or [0])
    return Topology("one_peer_exponential", clients, partial(_in_turn, graphs))


def grid(clients: int) -> Topology:
    """Undirected grid, as square as the number of clients allows, with Metropolis weights."""
    clients = checked_clients("grid", clients)
    return Topology.fixed("grid", _lattice(clients, wrap=False))


def torus(clients: int) -> Topology:
    """Undirected grid whose edges wrap around, as square as possible, with Metropolis weights."""
    clients = checked_clients("torus", clients)
    return Topology.fixed("torus", _lattice(clients, wrap=True))


def _in_turn(graphs: tuple[Graph, ...], round: int) -> Graph:
    return graphs[round % len(graphs)]


def _hops(clients: int) -> list[int]:
    """1, 2, 4, … below the number of clients."""
    return [2**k for k in range((clients - 1).bit_length())]


def _circulant(clients: int, offsets: list[int]) -> Graph:
    """Every client sends equal shares to the clients at these distances ahead of it."""
    distinct = np.unique(np.mod(offsets, clients))
    senders = np.repeat(np.arange(clients), len(distinct))
    receivers = (senders + np.tile(distinct, clients)) % clients
    return from_entries(clients, receivers, senders, np.full(len(senders), 1 / len(distinct)))


def sides(clients: int) -> tuple[int, int]:
    """Rows × columns with rows ≤ columns as near to each other as the divisors allow."""
    rows = next(r for r in range(math.isqrt(clients), 0, -1) if clients % r == 0)
    return rows, clients // rows


def _lattice(clients: int, wrap: bool) -> Graph:
    rows, columns = sides(clients)
    place: Integers = np.arange(clients).reshape(rows, columns)
    pairs = [(place[:, :-1], place[:, 1:]), (place[:-1], place[1:])]
    if wrap:
        pairs += [(place[:, -1], place[:, 0]), (place[-1], place[0])]
    first = np.concatenate([one.ravel() for one, _ in pairs])
    second = np.concatenate([other.ravel() for _, other in pairs])
    return metropolis_graph(clients, first, second)
