"""Graphs without chance. All of them have rows and columns that sum to 1."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from quiverfl.seeds import key_hashes
from quiverfl.topologies.arguments import check_clients, check_whole
from quiverfl.topologies.from_graphs import metropolis_graph
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, build_graph, build_one_row_graph
from quiverfl.types import Integers


def isolated(clients: int) -> Topology:
    """Nobody sends anything: every client keeps its own message (the identity matrix)."""
    clients = check_clients("isolated", clients)
    return Topology.from_graph("isolated", _circulant(clients, [0]))


def ring(clients: int) -> Topology:
    """Undirected ring: 1/3 to oneself and to each of the two neighbours."""
    clients = check_clients("ring", clients)
    return Topology.from_graph("ring", _circulant(clients, [0, 1, -1]))


def directed_ring(clients: int) -> Topology:
    """Directed ring: client i keeps one half and sends the other to client i + 1."""
    clients = check_clients("directed_ring", clients)
    return Topology.from_graph("directed_ring", _circulant(clients, [0, 1]))


def full(clients: int) -> Topology:
    """Everybody sends to everybody: each round ends in the exact average."""
    clients = check_clients("full", clients)
    every, active = np.arange(clients), np.ones(clients, dtype=bool)
    graph = build_one_row_graph(every, np.full(clients, 1 / clients), active)
    return Topology.from_graph("full", graph)


def exponential(clients: int) -> Topology:
    """Directed exponential: client i sends to i + 1, i + 2, i + 4, … in every round."""
    clients = check_clients("exponential", clients)
    graph = _circulant(clients, [0, *_list_hops(clients)])
    return Topology.from_graph("exponential", graph)


def one_peer_exponential(clients: int) -> Topology:
    """Directed exponential, one peer a round: client i sends half to i + 1, then i + 2, i + 4, …

    With a power of two of clients, one pass over the hops is the exact average.
    """
    clients = check_clients("one_peer_exponential", clients)
    graphs = tuple(_circulant(clients, [0, hop]) for hop in _list_hops(clients) or [0])
    return Topology("one_peer_exponential", clients, partial(_take_turns, graphs))


def grid(clients: int) -> Topology:
    """Undirected grid, as square as the number of clients allows, with Metropolis weights."""
    clients = check_clients("grid", clients)
    return Topology.from_graph("grid", _lattice(clients, wrap=False))


def torus(clients: int) -> Topology:
    """Undirected grid whose edges wrap around, as square as possible, with Metropolis weights."""
    clients = check_clients("torus", clients)
    return Topology.from_graph("torus", _lattice(clients, wrap=True))


def _take_turns(graphs: tuple[Graph, ...], round: int) -> Graph:
    return graphs[round % len(graphs)]


def _list_hops(clients: int) -> list[int]:
    """1, 2, 4, … below the number of clients."""
    return [2**k for k in range((clients - 1).bit_length())]


def _circulant(clients: int, offsets: list[int]) -> Graph:
    """Every client sends equal shares to the clients at these distances ahead of it."""
    distinct = np.unique(np.mod(offsets, clients))
    senders = np.repeat(np.arange(clients), len(distinct))
    receivers = (senders + np.tile(distinct, clients)) % clients
    return build_graph(clients, receivers, senders, np.full(len(senders), 1 / len(distinct)))


def lattice_sides(clients: int) -> tuple[int, int]:
    """Rows × columns with rows ≤ columns as near to each other as the divisors allow."""
    rows = next(r for r in range(math.isqrt(clients), 0, -1) if clients % r == 0)
    return rows, clients // rows


def _lattice(clients: int, wrap: bool) -> Graph:
    rows, columns = lattice_sides(clients)
    place: Integers = np.arange(clients).reshape(rows, columns)
    pairs = [(place[:, :-1], place[:, 1:]), (place[:-1], place[1:])]
    if wrap:
        pairs += [(place[:, -1], place[:, 0]), (place[-1], place[0])]
    first = np.concatenate([one.ravel() for one, _ in pairs])
    second = np.concatenate([other.ravel() for _, other in pairs])
    return metropolis_graph(clients, first, second)


# A server, as a graph: every client receives the average of the sampled clients' messages.


def star(clients: int, sampled: int, seed: int = 0, static: bool = False) -> Topology:
    """A server: a random set of clients trains; all receive the average of that set."""
    clients = check_clients("star", clients)
    why = f"a round samples some of the {clients} clients"
    sampled = check_whole("star", "sampled", sampled, 1, clients, why)
    draw = partial(_star, clients, sampled, seed)
    options = {"sampled": sampled, "seed": seed, "static": static}
    if static:
        return Topology.from_graph("star", draw(0), **options)
    return Topology("star", clients, draw, options)


def _star(clients: int, sampled: int, seed: int, round: int) -> Graph:
    chosen = sample_clients(clients, sampled, seed, "star", round)
    active = np.zeros(clients, dtype=bool)
    active[chosen] = True
    return build_one_row_graph(chosen, np.full(sampled, 1 / sampled), active, hub=True)


def sample_clients(clients: int, count: int, seed: int, purpose: str, round: int) -> Integers:
    """A uniformly random set of clients, ascending: those with the smallest hashes."""
    keys = key_hashes(seed, purpose, round, np.arange(clients))
    return np.sort(np.argsort(keys, kind="stable")[:count])
