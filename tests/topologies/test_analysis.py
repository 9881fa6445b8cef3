"""Diagnostics against hand-worked examples, brute force and networkx."""

from __future__ import annotations

import json

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiverfl.errors import QuiverError
from quiverfl.topologies import (
    analyze_topology,
    custom,
    directed_ring,
    erdos_renyi,
    exponential,
    from_matrix,
    full,
    isolated,
    one_peer_exponential,
    participating,
    random_pull,
    random_push,
    random_regular,
    ring,
    star,
)
from quiverfl.topologies.analysis import compute_diameter, find_connectivity_window
from quiverfl.topologies.graph import Graph


def taking_turns(round: int) -> np.ndarray:
    """Two clients; in even rounds 0 sends half to 1, in odd rounds 1 sends half to 0."""
    return np.array([[0.5, 0], [0.5, 1]]) if round % 2 == 0 else np.array([[1, 0.5], [0, 0.5]])


def test_directed_ring():
    report = analyze_topology(directed_ring(6), rounds=10)
    assert report.fixed
    assert report.doubly_stochastic
    assert not report.symmetric
    assert (report.window, report.diameter, report.window_diameter) == (1, 5, 5)
    # (I + S)/2 is normal with eigenvalues (1 + ω^k)/2, the second of modulus cos(π/6).
    assert report.rate == pytest.approx(np.cos(np.pi / 6), abs=1e-9)
    assert report.constant == pytest.approx(1, abs=1e-9)
    assert report.spectral_gap is None
    assert (report.mu_low, report.mu_high, report.delta) == (1, 1, 1)


def test_ring_has_the_known_second_eigenvalue():
    report = analyze_topology(ring(9), rounds=20)
    second = (1 + 2 * np.cos(2 * np.pi / 9)) / 3
    assert report.symmetric
    assert report.spectral_gap == pytest.approx(1 - second, abs=1e-12)
    assert report.rate == pytest.approx(second, abs=1e-9)
    assert (report.window, report.diameter) == (1, 4)


def test_isolated_never_agrees():
    report = analyze_topology(isolated(5), rounds=10)
    assert (report.window, report.diameter, report.window_diameter) == (None, None, None)
    assert (report.rate, report.constant) == pytest.approx((1, 1))
    assert report.spectral_gap == pytest.approx(0)
    assert (report.messages, report.busiest_messages) == (0, 0)


def test_full_agrees_at_once():
    report = analyze_topology(full(5), rounds=10)
    assert (report.window, report.diameter) == (1, 1)
    assert report.rate == 0
    assert report.constant == pytest.approx(1)
    assert report.spectral_gap == pytest.approx(1)
    assert report.messages == 20


def test_one_client_alone():
    report = analyze_topology(full(1), rounds=3)
    assert (report.window, report.diameter, report.rate, report.spectral_gap) == (1, 0, 0, 1)


def test_one_peer_exponential_needs_all_its_hops():
    report = analyze_topology(one_peer_exponential(8), rounds=12)
    assert not report.fixed
    assert report.window == 3
    assert report.diameter == 7, "round 0 alone is a directed ring"
    assert report.window_diameter == 3, "4 + 2 + 1 reaches the seventh"


def test_exponential_is_normal_so_its_rate_is_an_eigenvalue():
    weights = exponential(8)(0).weights
    second = np.sort(np.abs(np.linalg.eigvals(weights)))[-2]
    report = analyze_topology(exponential(8), rounds=10)
    assert report.rate == pytest.approx(second, abs=1e-9)
    assert report.diameter == 3


def test_taking_turns_by_hand():
    report = analyze_topology(custom(taking_turns, 2), rounds=3)
    # μ: (1, 1) → (1/2, 3/2) → (5/4, 3/4) → (5/8, 11/8)
    assert report.column_stochastic
    assert not report.row_stochastic
    assert (report.mu_low, report.mu_high) == (0.5, 1.5)
    assert report.delta == 0.5
    assert report.window == 2
    assert report.diameter is None
    assert report.window_diameter == 1
    assert report.messages == 1


def test_contraction_of_one_round_by_hand():
    """Push-sum is measured against the mean of the start, pull against the clients' own mean."""
    push = analyze_topology(custom(taking_turns, 2), rounds=1)
    # z = ((1, 0), (1/3, 2/3)), less 1/2 everywhere: rank one with norm √(20/36).
    assert (push.rate, push.constant) == pytest.approx((np.sqrt(5) / 3, 1))
    pull = analyze_topology(from_matrix([[0.5, 0.5], [0, 1]]), rounds=1)
    # Less the mean row (1/4, 3/4): ±1/4 everywhere.
    assert (pull.rate, pull.constant) == pytest.approx((0.5, 1))


def test_delta_is_the_smallest_row_sum_of_the_products():
    topology = random_push(12, 2, seed=3)
    product, smallest = np.eye(12), np.inf
    for round in range(20):
        product = topology(round).weights @ product
        smallest = min(smallest, product.sum(axis=1).min())
    assert analyze_topology(topology, rounds=20).delta == pytest.approx(smallest, rel=1e-12)


def test_contraction_of_a_fixed_push_matrix_is_its_second_eigenvalue():
    weights = np.array([[0.6, 0.2, 0.1], [0.3, 0.7, 0.2], [0.1, 0.1, 0.7]])
    second = np.sort(np.abs(np.linalg.eigvals(weights)))[-2]
    report = analyze_topology(from_matrix(weights), rounds=60)
    assert report.rate == pytest.approx(second, rel=0.05)


@pytest.mark.parametrize(
    "topology",
    [
        random_push(15, 3, seed=1),
        random_pull(15, 3, seed=1),
        random_regular(15, 4, seed=1),
        erdos_renyi(15, 0.2, seed=1),
        participating(random_push(15, 4, seed=1), 0.6),
    ],
    ids=lambda topology: topology.name,
)
def test_the_measured_bound_holds_for_what_clients_really_hold(topology):
    """‖z - agreement‖ ≤ C q^t ‖u⁰‖ with z = u/μ; push-sum agrees on the mean of u⁰."""
    report = analyze_topology(topology, rounds=25)
    assert 0 < report.rate < 1
    start = np.random.default_rng(0).normal(size=(15, 4))
    u, mu = start, np.ones((15, 1))
    for round in range(25):
        weights = topology(round).weights
        u, mu = weights @ u, weights @ mu
        z = u / mu
        agreement = start.mean(axis=0) if report.column_stochastic else z.mean(axis=0)
        bound = report.constant * report.rate ** (round + 1) * np.linalg.norm(start)
        assert np.linalg.norm(z - agreement) <= bound + 1e-11


def test_denser_graphs_contract_faster():
    rates = [analyze_topology(random_push(50, n, seed=0), rounds=20).rate for n in (2, 5, 20)]
    assert rates[0] > rates[1] > rates[2]


def test_the_spread_of_mu_that_the_paper_setting_has():
    report = analyze_topology(random_push(100, 10, seed=0), rounds=500)
    assert 0.03 < report.mu_low < 0.2
    assert 1.9 < report.mu_high < 3.2
    assert analyze_topology(random_push(100, 2, seed=0), rounds=500).mu_low < 0.02
    for fixed in (random_pull(100, 10, seed=0), random_regular(100, 10, seed=0)):
        row = analyze_topology(fixed, rounds=50)
        assert row.mu_low == pytest.approx(1, abs=1e-12)
        assert row.mu_high == pytest.approx(1, abs=1e-12)


def test_degrees_and_cost_of_push():
    report = analyze_topology(random_push(20, 5, seed=0), rounds=10, message_bytes=1_000)
    assert (report.sent.low, report.sent.mean, report.sent.high) == (5, 5, 5)
    assert report.received.mean == 5
    assert report.received.low < 5 < report.received.high
    assert report.messages == 100
    assert report.bytes == 100_000
    assert report.busiest_bytes == 1_000 * report.busiest_messages > 10_000


def test_a_star_counts_two_models_for_each_sampled_client_and_the_server_sees_all():
    report = analyze_topology(star(50, 5, seed=0), rounds=10, message_bytes=8)
    assert report.active == 5
    assert report.messages == report.busiest_messages == 10
    assert report.bytes == 80
    assert report.row_stochastic
    assert not report.column_stochastic
    assert report.rate == 0, "everybody receives the same average"


def test_a_star_is_connected_when_everybody_was_sampled():
    topology = star(6, 3, seed=0)
    report = analyze_topology(topology, rounds=40)
    picks = [set(np.flatnonzero(topology(t).active)) for t in range(40)]
    covered = [
        all(len(set().union(*picks[s : s + b])) == 6 for s in range(41 - b)) for b in range(1, 41)
    ]
    assert report.window == 1 + covered.index(True)


def test_symmetry_and_change():
    regular = analyze_topology(random_regular(10, 3, seed=0), rounds=5)
    assert regular.symmetric
    assert not regular.fixed
    assert analyze_topology(random_regular(10, 3, seed=0, static=True), rounds=5).fixed
    assert analyze_topology(custom(lambda _: np.eye(3), 3), rounds=5).fixed
    assert analyze_topology(full(4), rounds=2).symmetric


@st.composite
def sequences(draw):
    clients, rounds = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    pairs = st.tuples(st.integers(0, clients - 1), st.integers(0, clients - 1))
    return clients, [draw(st.lists(pairs, max_size=6)) for _ in range(rounds)]


@settings(deadline=None)
@given(sequences())
def test_window_equals_brute_force(sequence):
    clients, rounds = sequence

    def links(edges: list[tuple[int, int]]) -> Graph:
        weights = np.eye(clients)
        for receiver, sender in edges:
            weights[receiver, sender] = 1
        return from_matrix(weights / weights.sum(axis=0))(0)

    def connected(first: int, last: int) -> bool:
        union = nx.empty_graph(clients, create_using=nx.DiGraph)
        union.add_edges_from(edge for edges in rounds[first:last] for edge in edges)
        return nx.is_strongly_connected(union)

    expected = next(
        (
            window
            for window in range(1, len(rounds) + 1)
            if all(connected(s, s + window) for s in range(len(rounds) - window + 1))
        ),
        None,
    )
    assert find_connectivity_window([links(edges) for edges in rounds]) == expected


@pytest.mark.parametrize("seed", range(5))
def test_diameter_equals_networkx(seed):
    matrix = random_push(15, 2, seed=seed)(0).sparse
    graph = nx.from_scipy_sparse_array(matrix, create_using=nx.DiGraph)
    expected = nx.diameter(graph) if nx.is_strongly_connected(graph) else None
    assert compute_diameter(matrix) == expected


def test_thousands_of_clients_are_examined_without_a_dense_matrix(monkeypatch):
    def refuse(self):
        raise AssertionError("dense")

    monkeypatch.setattr(Graph, "weights", property(refuse))
    report = analyze_topology(random_push(5_000, 10, seed=0), rounds=4)
    assert report.window in (1, 2, 3)
    assert 0 < report.mu_low < 1 < report.mu_high
    assert report.rate is None
    assert report.diameter is None
    assert len(report.left_out) == 2
    assert "5,000 × 5,000" in report.left_out[0]
    large = analyze_topology(star(10_000, 1_000), rounds=3)
    assert large.window is None
    assert any("links" in reason for reason in large.left_out)


def test_a_client_left_without_mass_has_no_rate():
    report = analyze_topology(from_matrix([[0.0, 0.0], [1.0, 1.0]]), rounds=3)
    assert report.mu_low == 0
    assert report.rate is None


def test_the_report_is_plain_data():
    values = analyze_topology(random_push(10, 3, seed=1), rounds=5, message_bytes=4).as_dict()
    assert json.loads(json.dumps(values)) == {**values, "left_out": []}
    assert values["options"] == {"neighbors": 3, "seed": 1, "static": False}
    assert values["delta"] == values["mu_low"]


def test_no_rounds_are_refused():
    with pytest.raises(QuiverError, match="rounds = 0"):
        analyze_topology(ring(4), rounds=0)
