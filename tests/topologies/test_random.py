"""Random graphs: invariants by hypothesis, purity, uniformity, large numbers of clients."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiverfl.errors import QuiverError
from quiverfl.topologies import (
    erdos_renyi,
    exponential,
    full,
    participating,
    random_pull,
    random_push,
    random_regular,
    ring,
    star,
)
from quiverfl.topologies.graph import DENSE_LIMIT, Graph
from quiverfl.topologies.random import _switch_edges
from quiverfl.topologies.topology import count_downloads, count_links, count_uploads

SEEDS = st.integers(0, 2**40)
ROUNDS = st.integers(0, 10_000)


@st.composite
def sizes(draw):
    """(clients, neighbours) with neighbours from 1 to clients - 1."""
    clients = draw(st.integers(2, 24))
    return clients, draw(st.integers(1, clients - 1))


@st.composite
def regular_sizes(draw):
    clients, neighbors = draw(sizes())
    return (clients + 1, neighbors) if clients * neighbors % 2 else (clients, neighbors)


@settings(deadline=None)
@given(sizes(), SEEDS, ROUNDS)
def test_push_splits_columns_evenly_over_oneself_and_n_others(size, seed, round):
    clients, neighbors = size
    graph = random_push(clients, neighbors, seed)(round)
    links = graph.weights > 0
    assert (links.sum(axis=0) == neighbors + 1).all()
    assert links.diagonal().all()
    assert np.allclose(graph.weights[links], 1 / (neighbors + 1), rtol=0, atol=0)
    assert graph.column_stochastic
    assert (count_uploads(graph) == neighbors).all()
    assert count_downloads(graph).sum() == clients * neighbors
    assert graph.active.all()


@settings(deadline=None)
@given(sizes(), SEEDS, ROUNDS)
def test_pull_averages_rows_over_oneself_and_n_others(size, seed, round):
    clients, neighbors = size
    graph = random_pull(clients, neighbors, seed)(round)
    links = graph.weights > 0
    assert (links.sum(axis=1) == neighbors + 1).all()
    assert links.diagonal().all()
    assert graph.row_stochastic
    assert (count_downloads(graph) == neighbors).all()
    assert count_uploads(graph).sum() == clients * neighbors


@settings(deadline=None)
@given(regular_sizes(), SEEDS, ROUNDS)
def test_regular_is_simple_symmetric_and_doubly_stochastic(size, seed, round):
    clients, neighbors = size
    graph = random_regular(clients, neighbors, seed)(round)
    links = graph.weights > 0
    # A double edge would leave fewer distinct neighbours, a loop a heavier diagonal.
    assert (links.sum(axis=1) == neighbors + 1).all()
    assert np.allclose(graph.weights[links], 1 / (neighbors + 1), rtol=0, atol=1e-15)
    assert np.array_equal(graph.weights, graph.weights.T)
    assert graph.row_stochastic
    assert graph.column_stochastic


@settings(deadline=None)
@given(st.integers(1, 24), st.floats(0, 1), SEEDS, ROUNDS)
def test_erdos_renyi_is_symmetric_and_doubly_stochastic(clients, probability, seed, round):
    graph = erdos_renyi(clients, probability, seed)(round)
    weights = graph.weights
    assert np.array_equal(weights, weights.T)
    assert np.allclose(weights.sum(axis=0), 1, atol=1e-14)
    assert (weights.diagonal() > 0).all()
    degrees = (weights > 0).sum(axis=0) - 1
    first, second = np.nonzero(np.triu(weights, 1))
    larger = np.maximum(degrees[first], degrees[second])
    assert np.allclose(weights[first, second], 1 / (1 + larger))


def test_erdos_renyi_links_every_pair_with_the_same_probability():
    topology = erdos_renyi(8, 0.3, seed=5)
    linked = np.mean([topology(t).weights > 0 for t in range(3_000)], axis=0)
    pairs = linked[np.triu_indices(8, 1)]  # standard deviation √(0.21/3000) ≈ 0.0084
    assert np.abs(pairs - 0.3).max() < 0.04


def test_erdos_renyi_at_the_ends():
    assert np.array_equal(erdos_renyi(5, 0.0)(0).weights, np.eye(5))
    assert np.allclose(erdos_renyi(5, 1.0)(0).weights, 0.2)
    assert count_uploads(erdos_renyi(5, 1e-12)(0)).sum() == 0


@pytest.mark.parametrize("factory", [random_push, random_pull])
def test_every_other_client_is_chosen_equally_often(factory):
    topology = factory(7, 3, seed=2)
    linked = np.mean([topology(t).weights > 0 for t in range(2_000)], axis=0)
    others = linked[~np.eye(7, dtype=bool)]  # each with probability 1/2, deviation 0.011
    assert np.abs(others - 0.5).max() < 0.06


def test_regular_links_every_pair_equally_often():
    topology = random_regular(8, 3, seed=2)
    linked = np.mean([topology(t).weights > 0 for t in range(500)], axis=0)
    others = linked[~np.eye(8, dtype=bool)]  # each with probability 3/7, deviation 0.022
    assert np.abs(others - 3 / 7).max() < 0.1


def test_regular_mixes_like_chance_and_not_like_a_lattice():
    weights = random_regular(400, 10, seed=0)(0).weights
    second = np.sort(np.abs(np.linalg.eigvalsh(weights)))[-2]
    chance = (1 + 2 * np.sqrt(9)) / 11  # Friedman: 2√(n - 1) for the adjacency matrix
    assert second < chance + 0.03  # the lattice it starts from has 0.998


def test_regular_small_graphs_are_drawn_evenly():
    """2-regular graphs on six clients are hexagons or pairs of triangles."""
    topology = random_regular(6, 2, seed=9)
    triangles = sum(
        np.trace(np.linalg.matrix_power((topology(t).weights > 0) - np.eye(6), 3)) > 0
        for t in range(700)
    )
    # 60 hexagons and 10 pairs of triangles: 1/7 of 700 = 100, standard deviation 9.3.
    assert abs(triangles - 100) < 45


def numbers(graph: Graph) -> list[bytes]:
    matrix = graph.sparse
    return [matrix.indptr.tobytes(), matrix.indices.tobytes(), matrix.data.tobytes()]


@pytest.mark.parametrize(
    "make",
    [
        lambda seed, static=False: random_push(30, 4, seed, static),
        lambda seed, static=False: random_pull(30, 4, seed, static),
        lambda seed, static=False: random_regular(30, 4, seed, static),
        lambda seed, static=False: erdos_renyi(30, 0.2, seed, static),
    ],
)
def test_pure_in_seed_and_round_whatever_was_asked_before(make):
    first = [numbers(make(seed=3)(t)) for t in range(6)]
    topology = make(seed=3)
    backwards = [numbers(topology(t)) for t in reversed(range(6))]
    np.random.default_rng(0).random(10)
    assert first == backwards[::-1]
    assert len({tuple(entry) for entry in first}) == 6, "a new graph in every round"
    assert numbers(make(seed=4)(0)) != first[0]
    static = make(seed=3, static=True)
    assert all(numbers(static(t)) == first[0] for t in range(4))


@pytest.mark.parametrize("factory", [random_push, random_pull])
def test_neighbouring_clients_and_rounds_do_not_repeat_each_other(factory):
    """Seeding with round + client would make client i at round t equal i - 1 at round t + 1."""
    topology = factory(50, 5, seed=0)

    def chosen(client: int, round: int) -> frozenset[int]:
        weights = topology(round).weights
        line = weights[:, client] if factory is random_push else weights[client]
        return frozenset(np.flatnonzero(line)) - {client}

    places = [(client, round) for client in range(1, 50) for round in range(4)]
    absolute = sum(chosen(i, t) == chosen(i - 1, t + 1) for i, t in places)
    relative = sum(
        {(c - i) % 50 for c in chosen(i, t)} == {(c - i + 1) % 50 for c in chosen(i - 1, t + 1)}
        for i, t in places
    )
    assert absolute == relative == 0


def test_push_and_pull_draw_different_neighbours():
    push, pull = random_push(40, 5, seed=0)(0), random_pull(40, 5, seed=0)(0)
    assert not np.array_equal(push.weights, pull.weights.T)


@pytest.mark.parametrize("clients", [1_000, 10_000])
@pytest.mark.parametrize("factory", [random_push, random_pull, random_regular])
def test_many_clients_stay_sparse(factory, clients):
    began = time.perf_counter()
    graph = factory(clients, 10, seed=1)(3)
    assert time.perf_counter() - began < 5, "a tenth of it on an idle machine"
    assert graph.sparse.nnz == count_links(graph) == clients * 11
    assert graph.row_stochastic or graph.column_stochastic
    assert "weights" not in vars(graph)


def test_many_clients_of_erdos_renyi_stay_sparse():
    graph = erdos_renyi(10_000, 0.001, seed=1)(0)
    links = count_uploads(graph).sum() / 2  # 49,995 expected, standard deviation 223
    assert abs(links - 49_995) < 1_500
    assert graph.sparse.nnz == 10_000 + 2 * links


def test_no_generator_asks_for_the_dense_matrix(monkeypatch):
    def refuse(self):
        raise AssertionError("dense")

    monkeypatch.setattr(Graph, "weights", property(refuse))
    clients = 2 * DENSE_LIMIT
    for topology in (random_push(clients, 3), random_pull(clients, 3), random_regular(clients, 3)):
        assert participating(topology, 0.5)(0).active.sum() == clients // 2
    assert star(clients, 100)(0).active.sum() == 100


@pytest.mark.parametrize("factory", [random_push, random_pull, random_regular])
@pytest.mark.parametrize("neighbors", [0, -1, 10, 11, 2.5])
def test_more_neighbours_than_clients_are_refused(factory, neighbors):
    with pytest.raises(QuiverError, match=f"{factory.__name__}: neighbors = {neighbors}"):
        factory(clients=10, neighbors=neighbors)


def test_the_refusal_says_what_would_work():
    with pytest.raises(QuiverError, match=r"has 9 others .* from 1 to 9"):
        random_push(clients=10, neighbors=12)
    with pytest.raises(QuiverError, match="'isolated'"):
        random_push(clients=1, neighbors=1)
    with pytest.raises(QuiverError, match="neighbors = 2 or 4, or an even number of clients"):
        random_regular(clients=9, neighbors=3)
    with pytest.raises(QuiverError, match=r"probability = 1.5: it must be in \[0, 1\]"):
        erdos_renyi(clients=9, probability=1.5)


CONSERVED = {
    "push": lambda m, seed: random_push(m, min(3, m - 1), seed),
    "pull": lambda m, seed: random_pull(m, min(3, m - 1), seed),
    "ring": lambda m, seed: ring(m),
    "full": lambda m, seed: full(m),
    "exponential": lambda m, seed: exponential(m),
    "erdos_renyi": lambda m, seed: erdos_renyi(m, 0.4, seed),
}


@settings(deadline=None)
@given(st.sampled_from(sorted(CONSERVED)), st.integers(2, 15), st.floats(0.01, 1), SEEDS, ROUNDS)
def test_who_is_offline_is_left_alone_and_sums_hold(kind, clients, fraction, seed, round):
    before = CONSERVED[kind](clients, seed)
    graph = participating(before, fraction, seed)(round)
    whole, part = before(round).weights, graph.weights
    online = graph.active
    assert online.sum() == max(1, int(fraction * clients + 0.5))
    assert np.array_equal(part[~online], np.eye(clients)[~online])
    assert np.array_equal(part[:, ~online], np.eye(clients)[:, ~online])
    across = ~np.eye(clients, dtype=bool) & online[:, None] & online
    assert np.array_equal(part[across], whole[across])
    if before(round).column_stochastic:
        assert np.allclose(part.sum(axis=0), 1, atol=1e-14)
    else:
        assert np.allclose(part.sum(axis=1), 1, atol=1e-14)
    if np.array_equal(whole, whole.T):
        assert np.allclose(part, part.T, atol=0)
        assert np.allclose(part.sum(axis=1), 1, atol=1e-14)


def test_unused_weights_stay_with_the_sender_or_the_receiver():
    topology = exponential(4)  # client i sends a third to i + 1 and to i + 2
    graph = participating(topology, 0.75, seed=0)(0)
    (offline,) = np.flatnonzero(~graph.active)
    third = 1 / 3
    diagonal = graph.weights.diagonal()
    assert diagonal[offline] == 1
    assert diagonal[(offline - 1) % 4] == pytest.approx(2 * third), "it could not send to offline"
    assert diagonal[(offline - 2) % 4] == pytest.approx(2 * third)
    assert diagonal[(offline - 3) % 4] == pytest.approx(third), "it sends to the other two"
    assert graph.column_stochastic
    assert not graph.row_stochastic
    other = participating(topology, 0.75, seed=0, kept_by="receiver")(0)
    assert other.row_stochastic
    assert not other.column_stochastic
    assert other.weights.diagonal()[(offline + 1) % 4] == pytest.approx(2 * third)


def test_everybody_online_changes_nothing():
    before = random_push(12, 3, seed=1)
    after = participating(before, 1.0, seed=5)
    assert np.array_equal(before(2).weights, after(2).weights)
    assert after(2).active.all()


def test_who_is_online_changes_by_round_and_seed_and_is_pure():
    def online(seed: int, round: int) -> tuple[int, ...]:
        topology = participating(ring(20), 0.3, seed=seed)
        return tuple(np.flatnonzero(topology(round).active))

    assert online(0, 3) == online(0, 3)
    assert len({online(0, t) for t in range(10)}) == 10
    assert online(0, 0) != online(1, 0)


def test_participation_is_recorded():
    topology = participating(random_push(12, 3, seed=1), 0.5, seed=7)
    assert topology.name == "random_push"
    expected = {"neighbors": 3, "seed": 1, "participation": 0.5, "participation_seed": 7}
    assert expected.items() <= topology.options.items()


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_participation_refuses_fractions_outside(fraction):
    with pytest.raises(QuiverError, match=r"fraction = .* \(0, 1\]"):
        participating(ring(5), fraction)


def test_participation_of_a_star_is_its_sampling():
    with pytest.raises(QuiverError, match="sampled="):
        participating(star(10, 3), 0.5)
    with pytest.raises(QuiverError, match="kept_by = 'both'"):
        participating(ring(5), 0.5, kept_by="both")


def test_a_switch_takes_the_first_ends_together_and_turned_edges_the_other_way():
    edges, none = np.array([[0, 1], [2, 3]]), np.array([False, False])
    assert _switch_edges(edges, none, 4).tolist() == [[0, 2], [1, 3]]
    turned = _switch_edges(edges, np.array([True, False]), 4)
    assert turned.tolist() == [[1, 2], [0, 3]]
    # 0 – 2 is there already, so that nothing is switched.
    three = np.array([[0, 1], [2, 3], [0, 2]])
    assert _switch_edges(three, np.array([False] * 3), 4).tolist() == three.tolist()


def test_drawn_regular_graphs_stay_what_they_are():
    """Recorded runs are found again by their settings, so the same draw gives the same graph."""
    graph = random_regular(8, 3, seed=1)(2)
    first, second = np.nonzero(np.triu(graph.weights, 1))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 3),
        (1, 5),
        (1, 7),
        (2, 5),
        (2, 6),
        (3, 4),
        (4, 7),
        (5, 6),
        (6, 7),
    ]
