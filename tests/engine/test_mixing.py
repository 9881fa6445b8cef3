"""mixed = P · messages: against numpy, dense and sparse, with delays and clients that are away."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quiverfl as qv
from quiverfl.engine.exchange import matrix as mixing
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct, mix


@given(
    clients=st.integers(2, 30),
    width=st.integers(1, 50),
    seed=st.integers(0, 10),
    dense=st.booleans(),
    chunk=st.sampled_from([64, 2_000_000]),
    threads=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_mixing_is_the_matrix_product(
    clients: int, width: int, seed: int, dense: bool, chunk: int, threads: int
) -> None:
    graph = qv.random_push(clients=clients, neighbors=min(3, clients - 1), seed=seed)(seed)
    leaf = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, width)))
    expected = graph.weights @ leaf.numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "DENSE_SHARE", -1 if dense else 2)
        patch.setattr(mixing, "CHUNK_BYTES", chunk)
        patch.setattr(mixing, "NARROWEST", 1)
        torch.set_num_threads(threads)
        try:
            mixed = mix(graph, leaf)
        finally:
            torch.set_num_threads(1)
    np.testing.assert_allclose(mixed.numpy(), expected, rtol=0, atol=1e-13)
    assert graph.one_row or mixed.data_ptr() == leaf.data_ptr()  # in place


def test_a_star_is_summed_once_for_all() -> None:
    graph = qv.star(clients=5, sampled=2, seed=0)(0)
    leaf = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    expected = graph.weights @ leaf.numpy()
    assert mix(graph, leaf.clone()).numpy() == pytest.approx(expected)
    only = mix(graph, leaf[torch.from_numpy(graph.senders)])  # the senders' messages alone
    assert only.shape == (5, 2)
    assert only.numpy() == pytest.approx(expected)


def test_mu_stays_one_for_500_row_stochastic_rounds_and_sums_to_m_for_column_stochastic() -> None:
    pull, push = (f(clients=20, neighbors=5, seed=0) for f in (qv.random_pull, qv.random_push))
    rows, columns = torch.ones(20, dtype=torch.float64), torch.ones(20, dtype=torch.float64)
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 7)))
    total = values.sum(dim=0)
    for t in range(500):
        rows = mix(pull(t), rows)
        columns, values = mix(push(t), columns), mix(push(t), values)
    assert (rows - 1).abs().max() <= 1e-12
    assert float(columns.sum()) == pytest.approx(20, abs=1e-12)
    torch.testing.assert_close(values.sum(dim=0), total, rtol=0, atol=1e-12)
    ratio = values / columns.unsqueeze(1)
    torch.testing.assert_close(ratio, (total / 20).expand(20, 7), rtol=0, atol=1e-9)


def test_a_delayed_share_arrives_when_it_is_due_by_hand() -> None:
    """Two clients that halve their mass each round; the other's half comes two rounds late."""
    graph = qv.from_matrix(np.full((2, 2), 0.5))
    exchange = Exchange(MatrixProduct(delay=2))
    x = torch.tensor([8.0, 16.0], dtype=torch.float64)
    seen = []
    for t in range(4):
        exchange.push(t, graph(t), {"x": x})
        x = exchange.collect(t)["x"]
        seen.append(x.tolist())
    # own halves: 8→4→2, then 16/2 of round 0 arrives at client 0 in round 2, and so on
    assert seen[0] == [4, 8]
    assert seen[1] == [2, 4]
    assert seen[2] == [1 + 8, 2 + 4]
    assert seen[3] == [4.5 + 4, 3 + 2]
    flying = sum(float(leaf.sum()) for leaf in exchange.tensors().values())
    assert flying + sum(seen[3]) == 24


def test_a_share_waits_for_a_client_that_is_away() -> None:
    half = np.full((2, 2), 0.5)
    alone = np.eye(2)
    present, away = np.array([True, True]), np.array([True, False])
    graphs = [
        qv.from_matrix(half)(0),
        qv.Graph(qv.from_matrix(alone)(0).sparse, away),
        qv.Graph(qv.from_matrix(alone)(0).sparse, present),
    ]
    exchange = Exchange(MatrixProduct(delay=1))
    x = torch.tensor([8.0, 16.0], dtype=torch.float64)
    for t, graph in enumerate(graphs):
        exchange.push(t, graph, {"x": x})
        x = exchange.collect(t)["x"]
        if t == 1:
            assert x.tolist() == [4 + 8, 8]  # client 1 is away: its 4 waits
            assert sum(float(leaf.sum()) for leaf in exchange.tensors().values()) == 4
    assert x.tolist() == [12, 12]
