"""Compression changes nothing where nothing was to change: on every graph, however messages fare.

What a client gives up of its message is what its neighbours decode of it, k = Q(u):

    u'_i = u_i - k_i + P_ii · k_i + what arrives of Σ_{j≠i} P_ij · k_j

Here this is computed message by message, as the page on compression has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.exchange.build import build_exchange
from quiverfl.engine.exchange.quantized import transmit_columns
from quiverfl.engine.settings import RunSettings
from quiverfl.topologies import TOPOLOGIES, ReportView, make_topology, metropolis
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, count_uploads, keeps_own_weight
from quiverfl.transforms import Transforms
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.noise import BLOCK, ClientDither, Dither

CLIENTS, NUMBERS, ROUNDS, SEED = 6, BLOCK + 7, 4, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "isolated": {},
    "random_push": {"neighbors": 2, "seed": 1},
    "random_pull": {"neighbors": 2, "seed": 1},
    "balanced_push": {"neighbors": 2, "seed": 1},
    "epidemic": {"neighbors": 2, "seed": 1},
    "base_graph": {"neighbors": 2},
    "random_regular": {"neighbors": 2, "seed": 1},
    "erdos_renyi": {"probability": 0.3, "seed": 1},
    "ring": {},
    "directed_ring": {},
    "exponential": {},
    "one_peer_exponential": {},
    "grid": {},
    "torus": {},
    "full": {},
    "loss_push": {"neighbors": 2, "seed": 1},
    "similar_push": {"neighbors": 2, "sketch": 4, "seed": 1},
    "bandit_push": {"neighbors": 2, "seed": 1},
    "similar_pull": {"neighbors": 2, "sketch": 4, "seed": 1},
}
"""Every generator but the star, over which messages are not compressed."""

DIGRAPH = nx.DiGraph([(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (4, 1), (2, 5)])
"""Nobody hears of client 5, and client 0 hears of nobody."""
ONE_ROW = np.tile(np.array([0.5, 0.3, 0.2, 0.0, 0.0, 0.0]), (CLIENTS, 1))
"""Three of them are heard by all."""

ADJACENCY = np.zeros((CLIENTS, CLIENTS))
ADJACENCY[[0, 1, 3], [1, 2, 4]] = ADJACENCY[[1, 2, 4], [0, 1, 3]] = 1

Maker = Callable[[], Topology]


def named(name: str, participation: float, failure: float) -> Topology:
    options: dict[str, Any] = dict(OPTIONS[name])
    if failure:
        options["link_failure"] = failure
    return make_topology(name, CLIENTS, **options, participation=participation)


def unreliable(topology: Topology, participation: float, failure: float) -> Topology:
    """One of your own, with the same two ways to lose a link."""
    if failure:
        topology = qv.unreliable(topology, failure, seed=1)
    return topology if participation == 1 else qv.participating(topology, participation, seed=1)


OWN: dict[str, Maker] = {
    "from_networkx, in": lambda: qv.from_networkx(DIGRAPH, weights="in"),
    "from_networkx, out": lambda: qv.from_networkx(DIGRAPH, weights="out"),
    "from_matrix, one row": lambda: qv.from_matrix(ONE_ROW),
    "metropolis": lambda: qv.from_matrix(metropolis(ADJACENCY)),
}
KINDS = [*OPTIONS, *OWN]
FATES = [(1.0, 0.0), (1.0, 0.4), (0.5, 0.0), (0.7, 0.4)]
"""(share of clients that take part, probability that a link fails)"""


@cache
def graphs_of(kind: str, participation: float, failure: float) -> list[Graph]:
    if kind in OWN:
        topology = unreliable(OWN[kind](), participation, failure)
    else:
        topology = named(kind, participation, failure)
    if topology.reports is None:
        return [topology(t) for t in range(ROUNDS)]
    nothing = ReportView.empty(topology.reports, CLIENTS)
    return [topology(t, nothing) for t in range(ROUNDS)]


LOSSY: list[Any] = [
    qv.Quantize(bits=8),
    qv.Quantize(bits=2),
    qv.Quantize(bits=4, rounding="nearest"),
    qv.TopK(fraction=0.1),
    qv.RandomK(fraction=0.1),
]
EXACT: list[Any] = [qv.TopK(fraction=0.1), qv.RandomK(fraction=1.0)]
"""Of a model with one number in ten they send everything."""


def exchange(
    compression: Compression, delay: int, mass: bool, dtype: torch.dtype, arithmetic: str
) -> Any:
    method = qv.OSGP(delay=delay) if mass else qv.DFedAvgM()
    settings: Any = RunSettings(rounds=ROUNDS, seed=SEED, dtype=dtype, arithmetic=arithmetic)
    changing = qv.random_pull(clients=CLIENTS, neighbors=2)  # as it is for what is not sent
    return build_exchange(Transforms(compression), method, changing, settings)


def delays(graphs: list[Graph]) -> tuple[int, ...]:
    """Who keeps nothing of its own would have nothing until something arrives: that is refused."""
    return (0, 2) if all(keeps_own_weight(graph) for graph in graphs) else (0,)


def decoded(compression: Compression, u: torch.Tensor, round: int) -> torch.Tensor:
    return transmit_columns(compression, draws_of(round), u, 0)


@cache
def draws_of(round: int) -> ClientDither:
    return Dither(SEED, round).for_leaf("u", np.arange(CLIENTS), NUMBERS)


def weighted(matrix: Any, rows: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asarray(matrix)).to(rows.dtype) @ rows


def compare(
    compression: Compression, graphs: list[Graph], delay: int, mass: bool, dtype: torch.dtype
) -> None:
    """Round by round, from what the exchange itself has left."""
    made = exchange(compression, delay, mass, dtype, "matrix")
    u = torch.from_numpy(np.random.default_rng(2).normal(size=(CLIENTS, NUMBERS))).to(dtype)
    now: dict[str, torch.Tensor] = {"u": u}
    if mass:
        now["mu"] = torch.ones(CLIENTS, dtype=torch.float64)
    due: list[torch.Tensor] = [torch.zeros_like(u) for _ in range(ROUNDS + delay)]
    waiting = torch.zeros_like(u)
    for t, graph in enumerate(graphs):
        before = now["u"].clone()
        code = decoded(compression, before, t)
        own = np.diag(np.diag(graph.weights))
        due[t + delay] = weighted(graph.weights - own, code)
        arriving = due[t] + waiting
        receives = (graph.weights - own).any(axis=1) | graph.active | (delay == 0)
        there = torch.from_numpy(receives).to(dtype)[:, None]
        waiting = arriving * (1 - there)
        expected = before - code + weighted(own, code) + arriving * there
        made.push(t, graph, now)
        now = made.collect(t)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-6 * float(before.abs().max())
        torch.testing.assert_close(now["u"], expected, rtol=0, atol=tolerance)
        keeps = (count_uploads(graph) == 0) & (graph.weights.diagonal() == 1) & ~receives
        assert torch.equal(now["u"][keeps], before[keeps])


@pytest.mark.parametrize("compression", LOSSY, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_client_gives_up_what_is_decoded_of_it_and_nothing_else(
    kind: str, compression: Compression
) -> None:
    for participation, failure in FATES:
        graphs = graphs_of(kind, participation, failure)
        for delay in delays(graphs):
            compare(compression, graphs, delay, mass=True, dtype=torch.float64)
        compare(compression, graphs, 0, mass=True, dtype=torch.float32)
        if all(graph.row_stochastic for graph in graphs):
            compare(compression, graphs, 0, mass=False, dtype=torch.float64)


def one_in_ten() -> torch.Tensor:
    """The same model for everybody, of which a tenth of the numbers are not zero."""
    model = torch.zeros(NUMBERS, dtype=torch.float64)
    model[3:BLOCK:10] = torch.linspace(-1, 1, 10, dtype=torch.float64) + 0.07
    model[BLOCK + 2] = 0.4
    return model


@pytest.mark.parametrize("compression", EXACT, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_moves_from_equal_starts_without_training(
    kind: str, compression: Compression
) -> None:
    """z = u/μ stays where it is, also with clients away, failed links and messages in flight."""
    model = one_in_ten()
    assert torch.equal(decoded(compression, model[None].repeat(CLIENTS, 1), 0)[2], model)
    for participation, failure in FATES:
        graphs = graphs_of(kind, participation, failure)
        rows = all(graph.row_stochastic for graph in graphs)
        tried = [(True, delay, "matrix") for delay in delays(graphs)]
        tried += [(False, 0, "matrix"), (False, 0, "peers")] if rows else []
        for mass, delay, arithmetic in tried:
            still(compression, graphs, model, mass, delay, arithmetic)


def still(
    compression: Compression,
    graphs: list[Graph],
    model: torch.Tensor,
    mass: bool,
    delay: int,
    arithmetic: str,
) -> None:
    made = exchange(compression, delay, mass, torch.float64, arithmetic)
    now = {"u": model.repeat(CLIENTS, 1)}
    if mass:
        now["mu"] = torch.ones(CLIENTS, dtype=torch.float64)
    for t, graph in enumerate(graphs):
        made.push(t, graph, now)
        now = made.collect(t)
        z = now["u"] / now["mu"][:, None] if mass else now["u"]
        assert float((z - model).abs().max()) <= 1e-14


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("clients", [6, 30])
@pytest.mark.parametrize("fused", [True, False])
def test_pulled_models_keep_their_norm(fused: bool, clients: int, bits: Any) -> None:
    """Thirty rounds of stochastic rounding are a walk of small steps around the start.

    With thirty clients the sums are sparse, and one pass is that of C where there is a compiler.
    """
    topology = qv.random_pull(clients=clients, neighbors=2, seed=1)
    method = qv.OSGP()
    settings = RunSettings(rounds=30, seed=SEED, dtype=torch.float32)
    made: Any = build_exchange(Transforms(qv.Quantize(bits=bits)), method, topology, settings)
    made.stages[-1]._fused = fused
    start = torch.from_numpy(np.random.default_rng(0).normal(size=NUMBERS)).float()
    now = {"u": (2 * start / start.norm()).repeat(clients, 1)}
    now["mu"] = torch.ones(clients, dtype=torch.float64)
    assert any((count_uploads(topology(t)) == 0).any() for t in range(30))
    for t in range(30):
        made.push(t, topology(t), now)
        now = made.collect(t)
    assert float(now["u"].norm(dim=1).sub(2).abs().max()) < {8: 0.05, 4: 0.8}[bits]


@pytest.mark.parametrize("compression", LOSSY, ids=str)
@pytest.mark.parametrize("kind", [kind for kind in OWN if kind != "from_networkx, out"])
def test_replicas_are_kept_of_those_whom_nobody_hears(kind: str, compression: Compression) -> None:
    """CHOCO-SGD: x̂ ← x̂ + Q(x - x̂), x ← x + γ (Σ P · x̂ - x̂) for every client."""
    topology = OWN[kind]()
    settings = RunSettings(rounds=ROUNDS, seed=SEED, dtype=torch.float64)
    made = build_exchange(Transforms(compression), qv.DFedAvgM(), topology, settings)
    now = {"u": torch.from_numpy(np.random.default_rng(0).normal(size=(CLIENTS, NUMBERS)))}
    known = torch.zeros_like(now["u"])
    coder, graph = compression.for_replicas(), topology(0)
    alone = torch.from_numpy((count_uploads(graph) == 0) & (graph.weights.diagonal() == 1))
    for t in range(ROUNDS):
        x = now["u"].clone()
        known += decoded(coder, x - known, t)
        known[alone] = 0  # nobody ever looks at it
        gamma = compression.replica_step()
        expected = x + gamma * (weighted(graph.weights, known) - known)
        made.push(t, graph, now)
        now = made.collect(t)
        torch.testing.assert_close(now["u"], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(made.tensors()["replica/u"], known, rtol=0, atol=1e-12)


def test_every_generator_is_tried() -> None:
    assert set(OPTIONS) == set(TOPOLOGIES) - {"star"}
    assert OWN["from_matrix, one row"]()(0).one_row
    unheard = [count_uploads(OWN["from_networkx, in"]()(0)) == 0]
    assert np.flatnonzero(unheard).tolist() == [5]
