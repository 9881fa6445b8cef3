"""Balanced push, Epidemic Learning, Base-(k+1): exact graphs, sums, purity, exact averages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiverfl.errors import QuiverError
from quiverfl.seeds import key_hashes
from quiverfl.topologies import (
    balanced_push,
    base_graph,
    epidemic,
    make_topology,
    random_pull,
    random_push,
)
from quiverfl.topologies.analysis import analyze_topology, measure_skewness
from quiverfl.topologies.topology import count_downloads, count_uploads

SEEDS = st.integers(0, 2**40)
ROUNDS = st.integers(0, 10_000)


@st.composite
def sizes(draw):
    clients = draw(st.integers(2, 24))
    return clients, draw(st.integers(1, clients - 1))


@settings(deadline=None)
@given(sizes(), SEEDS, ROUNDS)
def test_everybody_sends_to_n_and_receives_from_n(size, seed, round):
    clients, neighbors = size
    graph = balanced_push(clients, neighbors, seed)(round)
    links = graph.weights > 0
    assert (links.sum(axis=0) == neighbors + 1).all()
    assert (links.sum(axis=1) == neighbors + 1).all()
    assert links.diagonal().all()
    assert np.allclose(graph.weights[links], 1 / (neighbors + 1), rtol=0, atol=1e-16)
    assert graph.column_stochastic
    assert graph.row_stochastic


@settings(deadline=None)
@given(sizes(), SEEDS, ROUNDS)
def test_independent_circles_are_balanced_by_weight(size, seed, round):
    clients, neighbors = size
    weights = balanced_push(clients, neighbors, seed, circles="independent")(round).weights
    assert np.allclose(weights.sum(axis=0), 1, atol=1e-14)
    assert np.allclose(weights.sum(axis=1), 1, atol=1e-14)
    assert (weights.diagonal() == pytest.approx(1 / (neighbors + 1))) or clients == 2
    counts = np.rint(weights * (neighbors + 1))
    assert np.allclose(weights, counts / (neighbors + 1), atol=1e-14)
    assert (count_uploads(balanced_push(clients, neighbors, seed)(round)) == neighbors).all()


def test_a_peer_finds_its_neighbours_alone():
    """The order of the circle is that of the hashes; everybody sends to those behind it."""
    clients, neighbors, seed, round = 9, 3, 5, 41
    keys = [int(key_hashes(seed, "balanced_push", round, client)) for client in range(clients)]
    circle = sorted(range(clients), key=keys.__getitem__)
    graph = balanced_push(clients, neighbors, seed)(round)
    for place, client in enumerate(circle):
        behind = {circle[(place + step) % clients] for step in range(1, neighbors + 1)}
        assert set(np.flatnonzero(graph.weights[:, client])) == behind | {client}


def test_every_other_client_is_met_equally_often():
    for circles in ("one", "independent"):
        topology = balanced_push(7, 3, seed=2, circles=circles)
        mean = np.mean([topology(t).weights for t in range(2_000)], axis=0)
        others = mean[~np.eye(7, dtype=bool)]  # 3/4 of the weight over 6 others
        assert np.abs(others - 0.125).max() < 0.016  # five standard deviations


def test_rounds_and_seeds_differ_and_static_keeps_the_first():
    topology = balanced_push(30, 4, seed=1)
    assert (topology(0).weights != topology(1).weights).any()
    assert (topology(0).weights != balanced_push(30, 4, seed=2)(0).weights).any()
    assert np.array_equal(topology(3).weights, balanced_push(30, 4, seed=1)(3).weights)
    fixed = balanced_push(30, 4, seed=1, static=True)
    assert np.array_equal(fixed(7).weights, topology(0).weights)


@settings(deadline=None)
@given(sizes(), st.floats(0, 1), st.floats(0.05, 1), SEEDS, ROUNDS)
def test_mass_is_conserved_where_links_fail_or_clients_are_away(size, failure, online, seed, round):
    clients, neighbors = size
    graph = make_topology(
        "balanced_push",
        clients,
        neighbors=neighbors,
        seed=seed,
        link_failure=failure,
        participation=online,
    )(round)
    assert np.allclose(graph.weights.sum(axis=0), 1, atol=1e-14)


@settings(deadline=None)
@given(sizes(), SEEDS, ROUNDS)
def test_epidemic_receivers_average_what_arrives(size, seed, round):
    clients, neighbors = size
    graph, push = (make(clients, neighbors, seed)(round) for make in (epidemic, random_push))
    assert np.array_equal(graph.weights > 0, push.weights > 0)
    arrived = (graph.weights > 0).sum(axis=1, keepdims=True)
    assert np.allclose(graph.weights, (graph.weights > 0) / arrived, atol=1e-15)
    assert (count_uploads(graph) == neighbors).all()
    half = make_topology(
        "epidemic", clients, neighbors=neighbors, seed=seed, participation=0.5, link_failure=0.3
    )
    assert half(round).row_stochastic
    assert "kept_by" not in half.options


def test_a_pull_that_is_balanced_by_chance_stays_a_pull():
    """Three clients, one neighbour: the pull of some rounds is a permutation."""
    pull = make_topology("random_pull", 3, neighbors=1, participation=0.7)
    by_chance = [t for t in range(40) if random_pull(3, 1)(t).column_stochastic]
    assert by_chance
    assert all(pull(t).row_stochastic for t in range(40))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 90), st.integers(1, 10))
def test_base_graph_ends_in_the_exact_average_for_any_number(clients, neighbors):
    neighbors = min(neighbors, clients - 1)
    topology = base_graph(clients, neighbors)
    rounds = len(topology.draw.args[0])
    product = np.eye(clients)
    for t in range(rounds):
        graph = topology(t)
        assert np.array_equal(graph.weights, graph.weights.T)
        assert np.allclose(graph.weights.sum(axis=0), 1, atol=1e-13)
        assert (graph.weights.diagonal() > 0).all()
        assert count_uploads(graph).max() <= neighbors
        product = graph.weights @ product
    assert np.allclose(product, 1 / clients, atol=1e-12)
    assert np.array_equal(topology(rounds).weights, topology(0).weights)
    assert rounds <= 2 * np.log(clients) / np.log(neighbors + 1) + 2.0001


def test_base_graph_of_a_power_is_the_hypercube():
    first = base_graph(8, 1)(0).weights
    assert np.array_equal(first, np.kron(np.eye(4), np.full((2, 2), 0.5)))
    assert len(base_graph(8, 1).draw.args[0]) == 3
    assert count_downloads(base_graph(27, 2)(1)).tolist() == [2] * 27


@pytest.mark.parametrize("name", ["balanced_push", "epidemic", "base_graph"])
def test_what_cannot_be_is_refused(name):
    with pytest.raises(QuiverError, match="has one other"):
        make_topology(name, 2, neighbors=2)
    with pytest.raises(QuiverError, match="needs the option 'neighbors'"):
        make_topology(name, 5)


def test_circles_are_named():
    with pytest.raises(QuiverError, match="circles = 'two': known are independent, one"):
        balanced_push(5, 2, circles="two")


def test_an_exchange_says_what_a_failed_link_means():
    arrives = make_topology(
        "random_regular", 20, neighbors=4, link_failure=0.5, exchange="pull", seed=3
    )
    both = make_topology("random_regular", 20, neighbors=4, link_failure=0.5, seed=3)
    for t in range(20):
        graph = arrives(t)
        assert graph.row_stochastic
        assert (both(t).weights > 0)[~(graph.weights > 0)].sum() == 0  # one direction suffices
    assert not all(arrives(t).column_stochastic for t in range(20))
    assert arrives.options["exchange"] == "pull"
    with pytest.raises(QuiverError, match=r"topology.exchange = 'pul': did you mean 'pull'"):
        make_topology("ring", 5, link_failure=0.5, exchange="pul")
    with pytest.raises(QuiverError, match=r"give topology.link_failure as well"):
        make_topology("ring", 5, exchange="pull")


def test_skewness_of_push_and_pull_by_hand():
    report = analyze_topology(balanced_push(20, 3), rounds=10)
    assert report.mu_deviation == pytest.approx(0, abs=1e-15)
    assert report.skewness == pytest.approx(0, abs=1e-14)
    push = analyze_topology(random_push(100, 2, seed=0), rounds=200)
    assert push.mu_deviation == pytest.approx(1 / np.sqrt(3), rel=0.05)  # 1/√(k + 1)
    graphs = [random_push(4, 1, seed=3)(t) for t in range(3)]
    masses = [np.array([0.5, 1, 1.5, 1]), np.array([0.25, 1, 2, 0.75])]
    assert measure_skewness(graphs, masses) == pytest.approx((np.log(3) + np.log(8)) / 2)
    pulled = [epidemic(4, 1, seed=3)(t) for t in range(3)]
    product = pulled[2].weights @ pulled[1].weights @ pulled[0].weights
    counts = product.mean(axis=0)
    assert measure_skewness(pulled, None) == pytest.approx(np.log(counts.max() / counts.min()))
    assert measure_skewness(graphs, [np.array([0.0, 1, 1, 2])]) is None
