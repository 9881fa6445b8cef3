"""Fixed and given graphs: exact matrices, and what is refused."""

from __future__ import annotations

import pickle

import networkx as nx
import numpy as np
import pytest
from scipy import sparse

import quiverfl.topologies as topologies
from quiverfl.errors import QuiverError
from quiverfl.topologies import (
    Graph,
    Topology,
    custom,
    directed_ring,
    exponential,
    from_matrix,
    from_networkx,
    full,
    grid,
    isolated,
    make_topology,
    metropolis,
    one_peer_exponential,
    ring,
    star,
    torus,
)
from quiverfl.topologies.fixed import lattice_sides
from quiverfl.topologies.reports import ReportView
from quiverfl.topologies.topology import (
    build_one_row_graph,
    count_downloads,
    count_links,
    count_uploads,
    find_offline,
)

FIXED = [isolated, ring, directed_ring, full, exponential, one_peer_exponential, grid, torus]


def matrix(topology: Topology, round: int = 0) -> np.ndarray:
    return topology(round).weights


def test_isolated_is_the_identity_and_everybody_trains():
    graph = isolated(3)(7)
    assert np.array_equal(graph.weights, np.eye(3))
    assert graph.active.all()
    assert count_uploads(graph).sum() == count_downloads(graph).sum() == 0


def test_ring():
    third = 1 / 3
    expected = [
        [third, third, 0, third],
        [third, third, third, 0],
        [0, third, third, third],
        [third, 0, third, third],
    ]
    assert np.array_equal(matrix(ring(4)), expected)
    assert np.array_equal(matrix(ring(2)), np.full((2, 2), 0.5))
    assert np.array_equal(matrix(ring(1)), [[1.0]])


def test_directed_ring_sends_to_the_next():
    expected = [[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]
    assert np.array_equal(matrix(directed_ring(3)), expected)


def test_exponential_sends_one_two_and_four_ahead():
    weights = matrix(exponential(6))
    for sender in range(6):
        receivers = {sender, (sender + 1) % 6, (sender + 2) % 6, (sender + 4) % 6}
        assert set(np.flatnonzero(weights[:, sender])) == receivers
    assert set(np.unique(weights)) == {0, 0.25}


def test_one_peer_exponential_takes_the_hops_in_turn():
    topology = one_peer_exponential(6)
    for round, hop in enumerate([1, 2, 4, 1, 2, 4]):
        weights = matrix(topology, round)
        assert np.array_equal(weights, (np.eye(6) + np.roll(np.eye(6), hop, axis=0)) / 2)


def test_one_peer_exponential_averages_exactly_after_one_pass_over_a_power_of_two():
    topology = one_peer_exponential(8)
    product = matrix(topology, 2) @ matrix(topology, 1) @ matrix(topology, 0)
    assert np.allclose(product, 1 / 8, atol=1e-16)


def test_grid_is_as_square_as_possible_with_metropolis_weights():
    # 0 1 2
    # 3 4 5 : corners have degree 2, the middle ones degree 3.
    weights = matrix(grid(6))
    assert weights[0, 1] == weights[1, 0] == pytest.approx(1 / 4)
    assert weights[0, 3] == pytest.approx(1 / 3)
    assert weights[0, 0] == pytest.approx(1 - 1 / 4 - 1 / 3)
    assert weights[1, 1] == pytest.approx(1 / 4)
    assert weights[0, 4] == weights[2, 3] == 0


@pytest.mark.parametrize(
    ("clients", "shape"), [(12, (3, 4)), (16, (4, 4)), (7, (1, 7)), (100, (10, 10)), (1, (1, 1))]
)
def test_sides(clients, shape):
    assert lattice_sides(clients) == shape


def test_torus_links_everybody_to_four():
    weights = matrix(torus(12))
    assert set(np.flatnonzero(weights[0])) == {0, 1, 3, 4, 8}
    assert np.allclose(weights[weights > 0], 1 / 5)
    # Two rows: up and down are the same client, which is linked once.
    assert set(np.flatnonzero(matrix(torus(6))[0])) == {0, 1, 2, 3}


@pytest.mark.parametrize("factory", FIXED)
@pytest.mark.parametrize("clients", [1, 2, 3, 5, 8, 12, 30])
def test_fixed_graphs_are_doubly_stochastic_and_everybody_is_its_own_neighbour(factory, clients):
    for round in range(5):
        graph = factory(clients)(round)
        assert np.allclose(graph.weights.sum(axis=0), 1, atol=1e-15)
        assert np.allclose(graph.weights.sum(axis=1), 1, atol=1e-15)
        assert (np.diag(graph.weights) > 0).all()
        assert graph.row_stochastic
        assert graph.column_stochastic


def test_full_stores_one_row_and_the_matrix_only_on_request():
    graph = full(10_000)(0)
    assert graph.one_row
    assert np.array_equal(graph.senders, np.arange(10_000))
    assert (graph.matrix.data == 1e-4).all()
    assert graph.row_stochastic
    assert graph.column_stochastic
    assert (count_uploads(graph) == 9_999).all()
    assert (count_downloads(graph) == 9_999).all()
    assert count_links(graph) == 10_000**2
    assert "sparse" not in vars(graph)
    assert np.array_equal(full(3)(0).weights, np.full((3, 3), 1 / 3))


def test_a_graph_given_as_a_row_counts_as_the_matrix_does():
    lazy = build_one_row_graph(np.array([3, 1]), np.array([0.75, 0.25]), np.ones(5, dtype=bool))
    built = Graph(lazy.sparse, active=lazy.active)
    assert lazy.one_row
    assert not built.one_row
    assert np.array_equal(lazy.weights[4], [0, 0.25, 0, 0.75, 0])
    for count in (count_uploads, count_downloads, find_offline):
        assert np.array_equal(count(lazy), count(built)), count
    for figure in ("senders", "weights"):
        assert np.array_equal(getattr(lazy, figure), getattr(built, figure)), figure
    for figure in ("row_stochastic", "column_stochastic"):
        assert getattr(lazy, figure) == getattr(built, figure), figure
    assert count_links(lazy) == count_links(built)


def test_one_row_only_where_rows_are_equal():
    assert from_matrix([[0.5, 0.5], [0.5, 0.5]])(0).one_row
    assert not from_matrix([[0.5, 0.5], [0.25, 0.75]])(0).one_row
    assert not from_matrix([[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])(0).one_row
    assert not ring(5)(0).one_row


def test_offline_is_who_neither_trains_nor_receives_whatever_stands_on_the_diagonal():
    matrix = np.array([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.9, 0], [0, 0, 0, 1.0]])
    active = np.array([True, False, False, True])
    graph = Graph(sparse.csr_array(matrix), active)
    assert np.array_equal(find_offline(graph), [False, False, True, False])


def test_a_dense_matrix_of_many_clients_is_refused():
    with pytest.raises(QuiverError, match=r"10000 clients is too large .* graph\.sparse"):
        _ = ring(10_000)(0).weights


def test_metropolis_weights_of_a_star_graph():
    adjacency = np.zeros((4, 4))
    adjacency[0, 1:] = adjacency[1:, 0] = 7.0  # its weights are not used
    expected = np.diag([0.25, 0.75, 0.75, 0.75])
    expected[0, 1:] = expected[1:, 0] = 0.25
    assert np.allclose(metropolis(adjacency).toarray(), expected)
    assert np.allclose(metropolis(sparse.coo_array(adjacency)).toarray(), expected)


def test_metropolis_refuses_a_directed_graph():
    with pytest.raises(QuiverError, match="not symmetric"):
        metropolis(np.array([[0, 1], [0, 0]]))


def test_networkx_undirected():
    path = nx.path_graph(3)
    expected = [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]
    topology = from_networkx(path)
    assert np.allclose(matrix(topology), expected)
    assert topology.options["weights"] == "metropolis"
    assert np.allclose(matrix(from_networkx(path, weights="out")).sum(axis=0), 1)


def test_networkx_directed_means_sender_to_receiver():
    graph = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 2)])
    out = matrix(from_networkx(graph))
    assert np.allclose(out, [[1 / 3, 0, 0], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1]])
    into = matrix(from_networkx(graph, weights="in"))
    assert np.allclose(into, [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])


def test_networkx_numbers_are_clients_and_other_labels_keep_their_order():
    numbers = nx.DiGraph([(2, 0), (0, 1)])  # nodes in the order 2, 0, 1
    assert matrix(from_networkx(numbers))[0, 2] == 0.5
    names = nx.DiGraph([("b", "a")])
    assert np.array_equal(matrix(from_networkx(names)), [[0.5, 0], [0.5, 1]])


def test_networkx_several_edges_between_two_count_once():
    graph = nx.MultiDiGraph([(0, 1), (0, 1)])
    assert np.array_equal(matrix(from_networkx(graph)), [[0.5, 0], [0.5, 1]])


def test_networkx_without_edges_is_isolated():
    graph = nx.empty_graph(3)
    assert np.array_equal(matrix(from_networkx(graph)), np.eye(3))


def test_networkx_refusals():
    with pytest.raises(QuiverError, match="need an undirected graph"):
        from_networkx(nx.DiGraph([(0, 1)]), weights="metropolis")
    with pytest.raises(QuiverError, match="did you mean 'metropolis'"):
        from_networkx(nx.path_graph(2), weights="metropoli")
    with pytest.raises(QuiverError, match="clients = 0"):
        from_networkx(nx.Graph())


def test_from_matrix_dense_and_sparse():
    weights = np.array([[0.5, 0.25], [0.5, 0.75]])
    assert np.array_equal(matrix(from_matrix(weights), 3), weights)
    assert np.array_equal(matrix(from_matrix(sparse.csc_array(weights))), weights)
    graph = from_matrix(weights.tolist())(0)
    assert graph.column_stochastic
    assert not graph.row_stochastic
    assert np.array_equal(count_uploads(graph), [1, 1])


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([[0.5, 0.5]], "square matrix"),
        ([1.0, 2.0], "square matrix"),
        ([[0.5, 0.5], [0.9, 0.9]], "neither the rows nor the columns"),
        ([[1.5, -0.5], [0, 1]], "not negative"),
        ([[np.nan, 1], [0, 1]], "finite"),
        (np.array([["a", "b"], ["c", "d"]]), "numbers"),
    ],
)
def test_from_matrix_refusals(weights, words):
    with pytest.raises(QuiverError, match=words):
        from_matrix(weights)


def test_custom_function_of_the_round():
    def swap_on_odd_rounds(round: int) -> np.ndarray:
        return np.eye(2)[::-1] if round % 2 else np.eye(2)

    topology = custom(swap_on_odd_rounds, clients=2)
    assert np.array_equal(matrix(topology, 0), np.eye(2))
    assert np.array_equal(matrix(topology, 1), [[0, 1], [1, 0]])
    graph = ring(3)(0)
    assert custom(lambda _: graph, clients=3)(4) is graph


def test_custom_refuses_another_size_naming_the_round():
    topology = custom(lambda _: np.eye(3), clients=4)
    with pytest.raises(QuiverError, match=r"round 5: the matrix has 3 clients, .* for 4"):
        topology(5)


@pytest.mark.parametrize("factory", FIXED)
@pytest.mark.parametrize("clients", [0, -3, 2.5, "ten", None])
def test_clients_must_be_a_positive_whole_number(factory, clients):
    with pytest.raises(QuiverError, match=f"{factory.__name__}: clients = "):
        factory(clients)


def test_star_rows_are_the_average_of_the_sampled_who_alone_train():
    graph = star(clients=6, sampled=2, seed=3)(4)
    chosen = np.flatnonzero(graph.active)
    assert len(chosen) == 2
    expected = np.zeros((6, 6))
    expected[:, chosen] = 0.5
    assert np.array_equal(graph.weights, expected)
    assert graph.hub
    assert np.array_equal(graph.senders, chosen)
    assert count_uploads(graph).sum() == count_downloads(graph).sum() == 2


def test_star_samples_everybody_equally_often_and_anew():
    topology = star(clients=20, sampled=5, seed=1)
    picks = np.array([topology(round).active for round in range(2_000)])
    assert (picks.sum(axis=1) == 5).all()
    frequency = picks.mean(axis=0)  # standard deviation √(0.25·0.75/2000) ≈ 0.0097
    assert np.abs(frequency - 0.25).max() < 0.05
    again = star(clients=20, sampled=5, seed=1)
    other = star(clients=20, sampled=5, seed=2)
    assert all(np.array_equal(topology(t).active, again(t).active) for t in range(5))
    assert any(not np.array_equal(topology(t).active, other(t).active) for t in range(5))
    fixed = star(clients=20, sampled=5, seed=1, static=True)
    assert all(np.array_equal(topology(0).active, fixed(t).active) for t in range(5))


def test_star_of_many_clients_stores_one_row():
    graph = star(clients=10_000, sampled=1_000)(0)
    assert graph.row_stochastic
    assert not graph.column_stochastic
    assert len(graph.senders) == 1_000
    assert "sparse" not in vars(graph)


@pytest.mark.parametrize("sampled", [0, 11, -1])
def test_star_refuses_more_than_there_are(sampled):
    with pytest.raises(QuiverError, match=f"sampled = {sampled}: .* from 1 to 10"):
        star(clients=10, sampled=sampled)


def test_by_name():
    assert make_topology("ring", 5).name == "ring"
    drawn = make_topology("random_push", 9, neighbors=2, seed=4)
    assert drawn.options == {"neighbors": 2, "seed": 4, "static": False}
    half = make_topology("random_push", 10, neighbors=2, participation=0.5)
    assert half(0).active.sum() == 5


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("rign", {}, "unknown topology 'rign'; did you mean 'ring'"),
        ("random_push", {"neighbours": 3}, "no option 'neighbours': did you mean 'neighbors'"),
        ("random_push", {}, "needs the option 'neighbors'"),
        ("ring", {"seed": 1}, "'ring' has no option 'seed'"),
    ],
)
def test_by_name_refusals(name, options, words):
    with pytest.raises(QuiverError, match=words):
        make_topology(name, 5, **options)


def test_every_generator_is_public_and_named_after_itself():
    for name, factory in topologies.TOPOLOGIES.items():
        assert factory.__name__ == name
        assert name in topologies.__all__


@pytest.mark.parametrize("name", topologies.TOPOLOGIES)
def test_a_topology_can_be_sent_to_another_process(name):
    options = {"star": {"sampled": 3}, "erdos_renyi": {"probability": 0.5}}
    neighbors = {"neighbors": 3} if "neighbors" in topologies.topology_options(name) else {}
    topology = make_topology(name, 8, **options.get(name, neighbors), participation=1.0)
    copy = pickle.loads(pickle.dumps(topology))
    assert copy == topology
    view = None if topology.reports is None else ReportView.empty(topology.reports, 8)
    assert np.array_equal(copy(3, view).weights, topology(3, view).weights)
