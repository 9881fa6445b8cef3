"""mixed = P · messages: against numpy, dense and sparse, with delays and clients that are away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quiverfl as qv
from compilers import mutated, no_compiler, run_sanitized
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


needs_compiler = pytest.mark.skipif(
    not mixing.compiled_matches_torch(), reason="no compiler, or other bits than PyTorch's here"
)


@needs_compiler
@given(
    clients=st.integers(12, 60),
    width=st.integers(1, 300),
    seed=st.integers(0, 10),
    cache=st.sampled_from([1, 4 << 10, 32 << 10]),
    threads=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_compiled_sum_has_the_bits_of_pytorchs(
    clients: int, width: int, seed: int, cache: int, threads: int
) -> None:
    """Wherever columns are cut, and whoever adds some of them; what is infinite stays so."""
    graph = qv.random_push(clients=clients, neighbors=2, seed=seed)(seed)
    draws = np.random.default_rng(seed)
    leaf = torch.from_numpy(draws.normal(size=(clients, width))).float()
    leaf[draws.integers(clients), draws.integers(width)] = np.inf
    assert not mixing.is_dense(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "compiled_matches_torch", lambda: False)
        expected = mix(graph, leaf.clone())
        patch.setattr(mixing, "compiled_matches_torch", lambda: True)
        patch.setattr(mixing, "FIRST_CACHE", cache)
        torch.set_num_threads(threads)
        try:
            mixed = mix(graph, leaf)
        finally:
            torch.set_num_threads(1)
    assert torch.equal(mixed.view(torch.int32), expected.view(torch.int32))
    assert mixed.data_ptr() == leaf.data_ptr()


@needs_compiler
def test_a_large_product_is_computed_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = qv.random_push(clients=20, neighbors=2, seed=0)(0)
    leaf = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 1000))).float()
    expected = mix(graph, leaf.clone())
    monkeypatch.setattr(mixing, "AT_ONCE", 1)
    monkeypatch.setattr(mixing, "FIRST_CACHE", 1)
    assert torch.equal(mix(graph, leaf), expected)


FORWARD = "entry = m->starts[client]; entry < m->starts[client + 1]; entry++"
MUTANTS = {
    "rounded once more": ("__builtin_fmaf(weight, row[c], sum[c])", "weight * row[c] * 3 / 3"),
    "another order": (
        FORWARD,
        "entry = m->starts[client + 1] - 1; entry >= m->starts[client]; entry--",
    ),
    "a sum in place of a product": ("weight * *(const V *)", "weight + *(const V *)"),
    "the neighbour's columns": ("add_senders(1, m, i, buffer + c", "add_senders(1, m, i, buffer"),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_sum_with_other_bits_is_not_used(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = MUTANTS[mutant]
    with mutated(monkeypatch, tmp_path, "mixing.c", before, after):
        mixing.compiled_matches_torch.cache_clear()
        assert not mixing.compiled_matches_torch()
    mixing.compiled_matches_torch.cache_clear()


SANITIZED = r"""
#include <stdio.h>
#include <stdlib.h>

int main(void) {
  for (int64_t clients = 1; clients < 40; clients += 6)
    for (int64_t columns = 1; columns < 300; columns += 37)
      for (int64_t width = 64; width <= 192; width += 64) {
        int64_t stride = columns + 3;
        float *rows = malloc((clients * stride - 3) * sizeof *rows);
        float *buffer = malloc(clients * width * sizeof *buffer);
        int32_t *starts = malloc((clients + 1) * sizeof *starts);
        int32_t *senders = malloc(3 * clients * sizeof *senders);
        float *weights = malloc(3 * clients * sizeof *weights);
        for (int64_t i = 0; i < clients * stride - 3; i++) rows[i] = (float)i;
        for (int64_t i = 0; i < 3 * clients; i++) senders[i] = i * 7 % clients, weights[i] = 0.25f;
        for (int64_t i = 0; i <= clients; i++) starts[i] = i == 0 ? 0 : 3 * i - 2;
        Mixing m = {rows, clients, stride, starts, senders, weights};
        mix_rows(&m, 0, columns, width, buffer);
        free(rows), free(buffer), free(starts), free(senders), free(weights);
      }
  printf("finished\n");
  return 0;
}
"""


@needs_compiler
@pytest.mark.slow
def test_nothing_is_read_or_written_outside_of_what_is_given(tmp_path: Path) -> None:
    run_sanitized(tmp_path, "mixing.c", "-ffp-contract=fast", SANITIZED)


def test_without_a_compiler_pytorch_sums() -> None:
    graph = qv.random_push(clients=20, neighbors=2, seed=0)(0)
    leaf = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 100))).float()
    expected = mix(graph, leaf.clone())
    mixing.compiled_matches_torch.cache_clear()
    with no_compiler():
        assert not mixing.compiled_matches_torch()
        assert torch.equal(mix(graph, leaf), expected)
    mixing.compiled_matches_torch.cache_clear()


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
