"""Graphs drawn again in every round, as pure functions of (seed, round).

Every draw is a hash of its coordinates (seeds.hashed), never the state of a generator: any client
can work out any round's graph alone, on any machine, and get the same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.seeds import key_hashes
from quiverfl.topologies.arguments import check_clients, check_fraction, check_neighbors
from quiverfl.topologies.from_graphs import metropolis_graph
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, build_graph
from quiverfl.types import Flags, Integers

SWEEPS = 12
"""Passes over the edges of random_regular. One suffices in large graphs, small dense ones refuse
many switches; with these no difference from uniform draws shows in their triangles."""


def random_push(clients: int, neighbors: int, seed: int = 0, static: bool = False) -> Topology:
    """Each client splits its mass over itself and n random others: columns sum to 1.

    The graph of DFedPGP's Algorithm 1; with it μ moves and Σμ is conserved.
    """
    clients = check_clients("random_push", clients)
    neighbors = check_neighbors("random_push", neighbors, clients)
    draw = partial(_push, clients, neighbors, seed)
    return draw_topology("random_push", clients, draw, static, neighbors=neighbors, seed=seed)


def random_pull(clients: int, neighbors: int, seed: int = 0, static: bool = False) -> Topology:
    """Each client averages itself and n random others evenly: rows sum to 1.

    As described in DFedPGP's appendix. μ stays 1, and the mean over clients is not conserved, so
    the paper's theorem does not cover it.
    """
    clients = check_clients("random_pull", clients)
    neighbors = check_neighbors("random_pull", neighbors, clients)
    draw = partial(_pull, clients, neighbors, seed)
    return draw_topology("random_pull", clients, draw, static, neighbors=neighbors, seed=seed)


def random_regular(clients: int, neighbors: int, seed: int = 0, static: bool = False) -> Topology:
    """Undirected, every client with n neighbours, weights 1/(n + 1): rows and columns sum to 1."""
    clients = check_clients("random_regular", clients)
    neighbors = check_neighbors("random_regular", neighbors, clients)
    if clients * neighbors % 2:
        remedy = " or ".join(str(n) for n in (neighbors - 1, neighbors + 1) if 0 < n < clients)
        raise QuiverError(
            f"random_regular: {clients} clients with {neighbors} neighbours each would have "
            f"{clients * neighbors} / 2 edges, which is no whole number; "
            f"give neighbors = {remedy}, or an even number of clients."
        )
    draw = partial(_regular, clients, neighbors, seed)
    return draw_topology("random_regular", clients, draw, static, neighbors=neighbors, seed=seed)


def erdos_renyi(clients: int, probability: float, seed: int = 0, static: bool = False) -> Topology:
    """Undirected, every pair linked with a probability, Metropolis weights; some may be alone."""
    clients = check_clients("erdos_renyi", clients)
    probability = check_fraction("erdos_renyi", "probability", probability, zero=True)
    draw = partial(_erdos_renyi, clients, probability, seed)
    return draw_topology("erdos_renyi", clients, draw, static, probability=probability, seed=seed)


def draw_topology(
    name: str, clients: int, draw: Callable[[int], Graph], static: bool, **options: Any
) -> Topology:
    """Draw a graph in every round, or keep that of the first."""
    if static:
        return Topology.from_graph(name, draw(0), **options, static=True)
    return Topology(name, clients, draw, {**options, "static": False})


def _push(clients: int, neighbors: int, seed: int, round: int) -> Graph:
    owner, other = _draw_others("random_push", clients, neighbors, seed, round)
    weights = np.full(len(owner), 1 / (neighbors + 1))
    return build_graph(clients, receivers=other, senders=owner, weights=weights)


def _pull(clients: int, neighbors: int, seed: int, round: int) -> Graph:
    owner, other = _draw_others("random_pull", clients, neighbors, seed, round)
    weights = np.full(len(owner), 1 / (neighbors + 1))
    return build_graph(clients, receivers=owner, senders=other, weights=weights)


def _draw_others(
    purpose: str, clients: int, neighbors: int, seed: int, round: int
) -> tuple[Integers, Integers]:
    """(owner, chosen) pairs: each client chooses itself and n distinct others.

    Floyd's sampling without replacement, one step for all clients at a time. A client's choice
    depends on (seed, round, client) alone.
    """
    everyone = np.arange(clients)
    bits = key_hashes(seed, purpose, round, everyone[:, None], np.arange(neighbors))
    chosen: Integers = np.empty((clients, neighbors), dtype=np.int64)
    for step in range(neighbors):
        last = clients - 1 - neighbors + step
        pick = (bits[:, step] % np.uint64(last + 1)).astype(np.int64)
        repeated = (chosen[:, :step] == pick[:, None]).any(axis=1)
        chosen[:, step] = np.where(repeated, last, pick)
    # Choice k stands for the client k + 1 places further on, so that no client chooses itself.
    others = (everyone[:, None] + 1 + chosen) % clients
    owners = np.repeat(everyone, neighbors)
    return np.concatenate([everyone, owners]), np.concatenate([everyone, others.ravel()])


def _regular(clients: int, neighbors: int, seed: int, round: int) -> Graph:
    edges = _lattice(clients, neighbors)
    edges = np.argsort(key_hashes(seed, "random_regular", round, np.arange(clients)))[edges]
    for sweep in range(1, SWEEPS + 1):
        keys = key_hashes(seed, "random_regular", round, sweep, np.arange(len(edges)))
        edges = _switch_edges(edges[np.argsort(keys)], keys % np.uint64(2) == 1, clients)
    everyone = np.arange(clients)
    ends = np.concatenate([edges, edges[:, ::-1], np.stack([everyone, everyone], axis=1)])
    weights = np.full(len(ends), 1 / (neighbors + 1))
    return build_graph(clients, receivers=ends[:, 0], senders=ends[:, 1], weights=weights)


def _lattice(clients: int, neighbors: int) -> Integers:
    """Edges of the ring that link each client to its n nearest; an odd n adds the opposite one."""
    everyone = np.arange(clients)
    parts = [
        np.stack([everyone, (everyone + distance) % clients], axis=1)
        for distance in range(1, neighbors // 2 + 1)
    ]
    if neighbors % 2:
        half = everyone[: clients // 2]
        parts.append(np.stack([half, half + clients // 2], axis=1))
    return np.concatenate(parts)


def _switch_edges(edges: Integers, flip: Flags, clients: int) -> Integers:
    """Consecutive edges a – b, c – d become a – c, b – d wherever that keeps the graph simple.

    Degrees never change and a switch that would make a loop or a double edge is left out, so the
    graph is regular and simple after any number of sweeps: nothing is ever drawn again.
    """
    edges = np.where(flip[:, None], edges[:, ::-1], edges)
    pairs = len(edges) // 2
    first, second = edges[: 2 * pairs : 2], edges[1 : 2 * pairs : 2]
    proposed = np.stack([first[:, 0], second[:, 0], first[:, 1], second[:, 1]], axis=1)
    new = proposed.reshape(-1, 2)
    bad = (new[:, 0] == new[:, 1]) | _find_repeated(
        _number_edges(edges, clients), _number_edges(new, clients)
    )
    accepted = ~bad.reshape(-1, 2).any(axis=1)
    switched = edges.copy()
    switched[: 2 * pairs : 2][accepted] = proposed[accepted, :2]
    switched[1 : 2 * pairs : 2][accepted] = proposed[accepted, 2:]
    return switched


def _find_repeated(known: Integers, new: Integers) -> Flags:
    """Flags of new numbers that are known already, or stand earlier among the new ones."""
    numbers = np.concatenate([known, new])
    order = np.argsort(numbers, kind="stable")
    repeated = np.zeros(len(numbers), dtype=bool)
    repeated[order[1:]] = numbers[order[1:]] == numbers[order[:-1]]
    return repeated[len(known) :]


def _number_edges(edges: Integers, clients: int) -> Integers:
    """One number per undirected edge."""
    names: Integers = edges.min(axis=1) * clients + edges.max(axis=1)
    return names


def _erdos_renyi(clients: int, probability: float, seed: int, round: int) -> Graph:
    pairs = _draw_linked(clients * (clients - 1) // 2, probability, seed, round)
    # Pair numbers run over (0, 1), (0, 2), …, (1, 2), …: client i's block starts at starts[i].
    everyone = np.arange(clients)
    starts = everyone * (clients - 1) - everyone * (everyone - 1) // 2
    low = np.searchsorted(starts, pairs, side="right") - 1
    return metropolis_graph(clients, low, pairs - starts[low] + low + 1)


def _draw_linked(pairs: int, probability: float, seed: int, round: int) -> Integers:
    """Draw the linked pairs, at a cost that grows with the links and not with the pairs.

    The gap to the next linked pair is geometric, so gaps are drawn until they pass the end.
    """
    if probability in (0, 1) or not pairs:
        return np.arange(pairs if probability == 1 else 0)
    expected = pairs * probability
    block = int(expected + 4 * math.sqrt(expected)) + 16
    drawn: Integers = np.zeros(0, dtype=np.int64)
    reached = -1
    while reached < pairs:
        counters = np.arange(len(drawn), len(drawn) + block)
        bits = key_hashes(seed, "erdos_renyi", round, counters) >> np.uint64(11)
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
        with np.errstate(over="ignore"):  # the tiniest probabilities: a gap past every end
            gaps = np.minimum(np.log(uniform) / math.log1p(-probability), pairs)
        places = reached + np.cumsum(gaps.astype(np.int64) + 1)
        drawn, reached = np.concatenate([drawn, places]), int(places[-1])
    return drawn[drawn < pairs]
