"""Links that fail: whose the weight is then, and how often it happens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import make_method, make_run_topology
from quiverfl.topologies import Graph, Topology, from_matrix, make_topology, unreliable
from quiverfl.topologies.participation import draw_failures

PUSH = np.array([[0.5, 0.5, 0.0], [0.0, 0.5, 0.25], [0.5, 0.0, 0.75]])
"""weights[receiver, sender]; columns sum to 1."""


def all_pairs(clients: int) -> tuple[np.ndarray, np.ndarray]:
    receivers, senders = np.indices((clients, clients)).reshape(2, -1)
    return receivers, senders


@pytest.mark.parametrize("round", [0, 1, 2, 3])
def test_a_push_that_fails_stays_with_its_sender(round: int) -> None:
    lost = draw_failures(0.5, 7, round, *all_pairs(3)).reshape(3, 3)
    expected = PUSH.copy()
    for receiver in range(3):
        for sender in range(3):
            if receiver != sender and lost[receiver, sender]:
                expected[sender, sender] += expected[receiver, sender]
                expected[receiver, sender] = 0
    found = unreliable(from_matrix(PUSH), 0.5, seed=7)(round)
    assert found.weights == pytest.approx(expected)
    assert found.column_stochastic


def test_a_pull_that_fails_stays_with_its_receiver() -> None:
    pull = PUSH.T
    lost = draw_failures(0.5, 7, 0, *all_pairs(3)).reshape(3, 3)
    assert (lost & (pull > 0) & ~np.eye(3, dtype=bool)).any()
    found = unreliable(from_matrix(pull), 0.5, seed=7)(0)
    assert found.row_stochastic
    assert np.array_equal(found.weights == 0, (pull == 0) | (lost & ~np.eye(3, dtype=bool)))


@settings(max_examples=30, deadline=None)
@given(
    clients=st.integers(3, 12),
    failure=st.floats(0, 1),
    seed=st.integers(0, 1000),
    round=st.integers(0, 5),
)
def test_an_undirected_exchange_needs_both_directions(
    clients: int, failure: float, seed: int, round: int
) -> None:
    graph = make_topology("ring", clients, link_failure=failure)(round)
    assert graph.row_stochastic
    assert graph.column_stochastic
    assert graph.weights == pytest.approx(graph.weights.T)
    whole = make_topology("ring", clients)(round).weights
    lost = draw_failures(failure, 0, round, *all_pairs(clients)).reshape(clients, clients)
    gone = (lost | lost.T) & ~np.eye(clients, dtype=bool)
    assert np.array_equal(graph.weights > 0, (whole > 0) & ~gone)


def test_a_push_to_everybody_is_still_a_push() -> None:
    """Its matrix is symmetric, but one direction is enough."""
    graph = make_topology("random_push", 6, neighbors=5, link_failure=0.5)(0)
    assert graph.column_stochastic
    assert not np.allclose(graph.weights, graph.weights.T)


@pytest.mark.parametrize(("name", "left"), [("random_push", 0.7), ("random_regular", 0.49)])
def test_how_many_links_are_left(name: str, left: float) -> None:
    """1 − p of the pushes, (1 − p)² of the exchanges."""
    topology = make_topology(name, 50, neighbors=10, link_failure=0.3)
    links = [topology(t).sparse.nnz - 50 for t in range(200)]
    assert np.mean(links) == pytest.approx(50 * 10 * left, rel=0.02)  # four standard errors


def test_none_and_all() -> None:
    whole = make_topology("random_push", 8, neighbors=3)
    assert make_topology("random_push", 8, neighbors=3, link_failure=0.0).options == whole.options
    alone = make_topology("random_push", 8, neighbors=3, link_failure=1.0)(0)
    assert np.array_equal(alone.weights, np.eye(8))


def test_it_goes_with_participation() -> None:
    topology = make_topology(
        "random_push", 20, neighbors=5, participation=0.5, link_failure=0.4, seed=3
    )
    graph = topology(2)
    assert graph.column_stochastic
    assert graph.active.sum() == 10
    assert topology.options["link_failure"] == 0.4
    assert topology.options["link_failure_seed"] == 3


@pytest.mark.parametrize("failure", [-0.1, 1.5])
def test_what_is_no_probability_is_refused(failure: float) -> None:
    with pytest.raises(QuiverError, match="link_failure = "):
        make_topology("ring", 5, link_failure=failure)


def test_a_server_has_no_such_links() -> None:
    """Also where the topology was not named: silence would compare unlike things."""
    with pytest.raises(QuiverError, match="links to a server only"):
        make_topology("star", 5, sampled=2, link_failure=0.1)
    config = parse_config({"method": {"name": "fedavg"}, "topology": {"link_failure": 0.1}})
    with pytest.raises(QuiverError, match="links to a server only"):
        make_run_topology(config, make_method(config), 10)
    config = parse_config({"method": {"name": "dfedpgp"}, "topology": {"link_failure": 0.1}})
    assert make_run_topology(config, make_method(config), 20).options["link_failure"] == 0.1


def test_weights_that_nobody_owns_are_refused() -> None:
    odd = Graph(sparse.csr_array([[0.5, 0.3], [0.1, 0.2]]), np.ones(2, dtype=bool))
    with pytest.raises(QuiverError, match="neither rows nor columns"):
        unreliable(Topology.from_graph("odd", odd), 0.1)


def test_the_command_shows_it() -> None:
    words = ["topology", "show", "random_push", "--clients", "20", "--neighbors", "5"]
    shown = CliRunner().invoke(app, [*words, "--link-failure", "0.4", "--json"])
    report = json.loads(shown.stdout)
    assert report["options"]["link_failure"] == 0.4
    assert report["column_stochastic"]
    assert report["messages"] == pytest.approx(60, rel=0.1)
