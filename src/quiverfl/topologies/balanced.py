"""Balanced graphs: every client sends as much as it receives, so rows and columns sum to 1.

In a random push the number of messages that a client receives is random: its μ wanders, its step
on z is η/μ, and in some rounds it receives nothing. In a balanced graph μ stays 1 while links work,
and push-sum takes over where links fail.

Every draw is a hash of its coordinates, so a client can compute its receivers and senders of any
round by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, TypeAlias, get_args

import numpy as np

from quiverfl.errors import QuiverError, suggest
from quiverfl.seeds import key_hashes
from quiverfl.topologies.arguments import check_clients, check_neighbors
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.random import draw_topology, random_push
from quiverfl.topologies.topology import Topology, build_graph
from quiverfl.types import Integers

Circles: TypeAlias = Literal["one", "independent"]


def balanced_push(
    clients: int,
    neighbors: int,
    seed: int = 0,
    circles: Circles = "one",
    static: bool = False,
) -> Topology:
    """Directed and balanced: each client sends to n others and receives from n others.

    In every round all clients stand in a circle in random order, and each sends 1/(n + 1) to each
    of the n behind it. With `circles = "independent"` there are n circles, and each client sends to
    the next one in each; a client that is next in two of them gets both parts.
    """
    clients = check_clients("balanced_push", clients)
    neighbors = check_neighbors("balanced_push", neighbors, clients)
    if circles not in get_args(Circles):
        raise QuiverError(f"balanced_push: circles = {circles!r}: {suggest(str(circles), CIRCLES)}")
    draw = partial(_draw_balanced, clients, neighbors, seed, circles)
    options = {} if circles == "one" else {"circles": circles}
    return draw_topology(
        "balanced_push", clients, draw, static, neighbors=neighbors, seed=seed, **options
    )


CIRCLES = get_args(Circles)


def draw_circle(clients: int, seed: int, purpose: str, *coordinates: int) -> Integers:
    """All clients in random order."""
    order: Integers = np.argsort(key_hashes(seed, purpose, *coordinates, np.arange(clients)))
    return order


def _draw_balanced(clients: int, neighbors: int, seed: int, circles: Circles, round: int) -> Graph:
    if circles == "one":
        circle = draw_circle(clients, seed, "balanced_push", round)
        rings = [(circle, step) for step in range(1, neighbors + 1)]
    else:
        rings = [
            (draw_circle(clients, seed, "balanced_push-circles", round, number), 1)
            for number in range(neighbors)
        ]
    everyone = np.arange(clients)
    senders = np.concatenate([everyone, *(circle for circle, _ in rings)])
    receivers = np.concatenate([everyone, *(np.roll(circle, -step) for circle, step in rings)])
    weights = np.full(len(senders), 1 / (neighbors + 1))
    return build_graph(clients, receivers, senders, weights)


def epidemic(clients: int, neighbors: int, seed: int = 0, static: bool = False) -> Topology:
    """Epidemic Learning: each client sends to n random others; a receiver averages what it gets.

    EL-Local of de Vos et al. 2023. Its links are those of `random_push`, but rows sum to 1: every
    receiver weighs its own message and each that arrived alike. EL-Oracle is `random_regular`.
    """
    push = random_push(clients, neighbors, seed)
    draw = partial(_average_arrivals, push)
    return draw_topology("epidemic", push.clients, draw, static, neighbors=neighbors, seed=seed)


def _average_arrivals(push: Topology, round: int) -> Graph:
    links = push(round).sparse.tocoo()
    counts = np.bincount(links.row, minlength=push.clients)
    receivers = links.row.astype(np.int64)
    return build_graph(push.clients, receivers, links.col.astype(np.int64), 1 / counts[receivers])


def base_graph(clients: int, neighbors: int) -> Topology:
    """The Base-(n + 1) graph: after one pass of its rounds every client holds the exact average.

    Takezawa et al. 2023, Algorithm 2 (the simple one): undirected, without chance, at most n
    neighbours in a round, for any number of clients. Its rounds repeat.
    """
    clients = check_clients("base_graph", clients)
    neighbors = check_neighbors("base_graph", neighbors, clients)
    rounds = tuple(_list_base_rounds(clients, neighbors + 1))
    return Topology("base_graph", clients, partial(_repeat, rounds), {"neighbors": neighbors})


def _repeat(graphs: Sequence[Graph], round: int) -> Graph:
    return graphs[round % len(graphs)]


Link: TypeAlias = tuple[int, int, float]
"""An undirected link and its weight."""


def _list_base_rounds(clients: int, base: int) -> Iterator[Graph]:
    """The rounds of one pass."""
    blocks = _split_blocks(clients, base)
    whole = [np.concatenate(parts) for parts in blocks]
    inner = [[_list_hypercube(part, base) for part in parts] for parts in blocks]
    outer = [_list_hypercube(block, base) for block in whole]
    # 1. Every block agrees on its own average. The first is the largest and takes longest.
    for step in range(len(outer[0])):
        links = [cubes[step] for cubes in outer if step < len(cubes)]
        yield _make_undirected(clients, [link for group in links for link in group])
    if len(blocks) == 1:
        return
    # 2. One block after the other is averaged into all that are smaller; its own parts then hold
    #    the right sum each, and agree on it while the next block has its turn.
    for step in range(1 + len(inner[0][0])):
        links = []
        if step < len(blocks) - 1:
            links.append(_join_block(blocks[step], whole[step + 1 :]))
        for number, cubes in enumerate(inner):
            turn = step - number - 1
            links += [cube[turn] for cube in cubes if 0 <= turn < len(cube)]
        yield _make_undirected(clients, [link for group in links for link in group])


def _split_blocks(clients: int, base: int) -> list[list[Integers]]:
    """Clients by the digits of their number: a block has `digit` parts of base^power clients."""
    blocks, start = [], 0
    for power in reversed(range(64)):
        size = base**power
        digit = (clients - start) // size
        if digit:
            ends = start + size * np.arange(digit + 1)
            blocks.append([np.arange(low, low + size) for low in ends[:-1]])
            start = int(ends[-1])
    return blocks


def _list_hypercube(members: Integers, base: int) -> list[list[Link]]:
    """Rounds after which `members` agree: complete groups along one factor after another."""
    rounds, stride = [], 1
    for factor in _factorize(len(members), base):
        places = np.arange(len(members)).reshape(-1, factor, stride)
        groups = places.transpose(0, 2, 1).reshape(-1, factor)
        rounds.append(
            [
                (int(members[group[a]]), int(members[group[b]]), 1 / factor)
                for group in groups
                for a in range(factor)
                for b in range(a)
            ]
        )
        stride *= factor
    return rounds


def _factorize(number: int, base: int) -> list[int]:
    """Factors of at most `base`, the largest first; of digit · base^power there always are some."""
    factors = []
    while number > 1:
        factor = next(f for f in range(min(base, number), 1, -1) if number % f == 0)
        factors.append(factor)
        number //= factor
    return factors


def _join_block(parts: list[Integers], smaller: list[Integers]) -> list[Link]:
    """Every client of the smaller blocks meets one client of each part."""
    others = np.concatenate(smaller)
    size = len(parts) * len(parts[0])
    weight = size / (len(parts) * (size + len(others)))
    return [
        (int(other), int(part[place]), weight)
        for place, other in enumerate(others)
        for part in parts
    ]


def _make_undirected(clients: int, links: list[Link]) -> Graph:
    ends = np.array([link[:2] for link in links], dtype=np.int64).reshape(-1, 2)
    edge_weights = np.array([link[2] for link in links])
    own = np.ones(clients)
    for side in (0, 1):
        own -= np.bincount(ends[:, side], weights=edge_weights, minlength=clients)
    everyone = np.arange(clients)
    return build_graph(
        clients,
        receivers=np.concatenate([everyone, ends[:, 0], ends[:, 1]]),
        senders=np.concatenate([everyone, ends[:, 1], ends[:, 0]]),
        weights=np.concatenate([own, edge_weights, edge_weights]),
    )
