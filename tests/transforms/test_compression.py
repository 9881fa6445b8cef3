"""Compression: what is sent, what stays, what it weighs, and with which methods it may go."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.exchange.build import build_exchange
from quiverfl.engine.exchange.compression import CompressionStage
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct, mix
from quiverfl.engine.exchange.quantized import transmit_columns
from quiverfl.engine.memory import predict_memory
from quiverfl.engine.rounds import exchange_messages
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.runs.config import parse_config
from quiverfl.topologies.topology import find_offline
from quiverfl.transforms import Transforms
from quiverfl.transforms.noise import BLOCK, ROWS, Dither
from small import AWAY, CLIENTS, METHODS, PUSH, TRAINING, distance, simulate, states, tiny_data
from small import tiny_task as task

EVERY = [
    qv.Quantize(bits=8),
    qv.Quantize(bits=4),
    qv.Quantize(bits=2),
    qv.TopK(fraction=0.1),
    qv.RandomK(fraction=0.1),
]
NUMBERS = 2 * BLOCK + 7


def exchange(compression: Any, topology: Any, delay: int = 0, mass: str | None = "mu") -> Any:
    method = qv.OSGP(delay=delay) if mass else qv.DFedAvgM()
    settings = RunSettings(rounds=500, seed=3, dtype=torch.float64)
    return build_exchange(Transforms(compression), method, topology, settings)


def messages(seed: int = 0) -> dict[str, torch.Tensor]:
    random = np.random.default_rng(seed)
    u = torch.from_numpy(random.normal(size=(CLIENTS, NUMBERS)))
    return {"u": u, "mu": torch.ones(CLIENTS, dtype=torch.float64)}


# What is sent.


def test_eight_bits_of_a_block_by_hand() -> None:
    """127 steps to the largest magnitude; each number is one of the two steps beside it."""
    x = torch.tensor([[[1.0, -0.5, 0.1, 0.0]]])
    coder = qv.Quantize(bits=8)
    step = float(coder.scales(x))
    assert step == pytest.approx(1 / 127, rel=2**-6)
    assert step * 127 > 1
    low = coder.transmit(x, torch.full_like(x, 2**-17))
    high = coder.transmit(x, torch.full_like(x, 1 - 2**-17))
    torch.testing.assert_close(low, torch.floor(x / step) * step)
    torch.testing.assert_close(high, torch.ceil(x / step) * step)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rounding_is_right_on_average_and_off_by_a_step_at_most(bits: Any) -> None:
    coder, x = qv.Quantize(bits=bits), messages()["u"]
    steps = coder.scales(x).max()
    total, rounds = torch.zeros_like(x), 200
    for t in range(rounds):
        draws = Dither(0, t).for_leaf("u", np.arange(CLIENTS), NUMBERS)
        found = transmit_columns(coder, draws, x, 0)
        assert (found - x).abs().max() <= 1.01 * steps
        total += found
    # Twelve deviations of the mean of numbers that are off by at most half a step on average.
    assert (total / rounds - x).abs().max() < 6 * steps / rounds**0.5
    assert (total / rounds - x).mean().abs() < steps / 100


def test_top_k_sends_the_largest_of_every_block_and_random_k_others_every_round() -> None:
    x = messages()["u"]
    draws = [Dither(0, t).for_leaf("u", np.arange(CLIENTS), NUMBERS) for t in range(2)]
    top = transmit_columns(qv.TopK(fraction=0.1), draws[0], x, 0)
    block, sent = x[:, :BLOCK].abs(), top[:, :BLOCK] != 0
    assert (sent.sum(dim=1) == 10).all()
    assert (block.masked_fill(~sent, 9).amin(dim=1) >= block.masked_fill(sent, 0).amax(dim=1)).all()
    assert (top[:, 2 * BLOCK :] != 0).sum() == CLIENTS  # one of the last seven
    first, second = (transmit_columns(qv.RandomK(fraction=0.1), one, x, 0) for one in draws)
    assert ((first != 0).sum(dim=1) == 21).all()
    assert not torch.equal(first, second)
    assert (first == x)[first != 0].all()


def test_noise_depends_on_seed_round_leaf_client_and_block_alone() -> None:
    clients = np.array([5, 3, 2000, 4])
    draws = Dither(7, 1).for_leaf("u", clients, 10 * BLOCK)
    whole = draws.take_blocks(0, 10)
    assert torch.equal(draws.take_blocks(4, 1), whole[:, 4:5])
    lone = Dither(7, 1).for_leaf("u", np.array([2000]), 10 * BLOCK)
    assert torch.equal(lone.take_blocks(0, 10)[0], whole[2])
    rows = Dither(7, 1).for_leaf("u", np.arange(6), 10 * BLOCK)
    assert torch.equal(rows.take_blocks(4, 1)[3:6, 0], whole[[1, 3, 0], 4])
    others = [
        Dither(8, 1).for_leaf("u", clients, BLOCK),
        Dither(7, 2).for_leaf("u", clients, BLOCK),
    ]
    others.append(Dither(7, 1).for_leaf("v", clients, BLOCK))
    assert all(not torch.equal(other.take_blocks(0, 1), whole[:, :1]) for other in others)
    many = Dither(0, 0).for_leaf("u", np.arange(ROWS), BLOCK).take_blocks(0, 1)
    assert len(torch.unique(many[:, 0, :4], dim=0)) == ROWS
    assert 0 < float(many.min()) < 1e-3
    assert 0.999 < float(many.max()) < 1
    assert float(many.mean()) == pytest.approx(0.5, abs=0.005)


# What stays.


def conserves(made: Any, topology: Any, rounds: int) -> None:
    """Σμ is what it was and Σu to 1e-12, with what flies; clients change what they have."""
    now, random = messages(), np.random.default_rng(1)
    total = now["u"].sum(dim=0)
    for t in range(rounds):
        change = torch.from_numpy(random.normal(size=(CLIENTS, NUMBERS))) * 0.1
        change[-1] = -change[:-1].sum(dim=0)  # as if all gradients were balanced
        now["u"] = now["u"] + change
        made.push(t, topology(t), now)
        now = made.collect(t)
        flying = made.tensors()
        mass = now["mu"].sum() + sum(v.sum() for k, v in flying.items() if k.endswith("/mu"))
        there = now["u"].sum(0) + sum(v.sum(0) for k, v in flying.items() if k.endswith("/u"))
        assert float(mass) == pytest.approx(CLIENTS, abs=1e-12)
        assert (there - total).abs().max() <= 1e-12
    assert (now["mu"] - 1).abs().max() > 1e-3


GRAPHS = cache(AWAY(CLIENTS))


@pytest.mark.parametrize(("compression", "delay"), [(EVERY[0], 2), (EVERY[2], 0), (EVERY[3], 2)])
def test_mass_and_sums_are_conserved_with_clients_that_are_away(
    compression: Any, delay: int
) -> None:
    conserves(exchange(compression, AWAY(CLIENTS), delay), GRAPHS, rounds=500)


@pytest.mark.slow
@pytest.mark.parametrize("compression", EVERY, ids=str)
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "topology",
    [
        PUSH(CLIENTS),
        qv.unreliable(PUSH(CLIENTS), failure=0.3, seed=2),
        qv.participating(PUSH(CLIENTS), fraction=0.3, seed=4),
        AWAY(CLIENTS),
    ],
    ids=lambda t: t.name,
)
def test_mass_and_sums_are_conserved_on_every_push_graph(
    topology: Any, delay: int, compression: Any
) -> None:
    conserves(exchange(compression, topology, delay), topology, rounds=500)


class _Drops(CompressionStage):
    """A mutant: what is not sent is lost."""

    def after(self, round: int, graph: Any, mixed: Any) -> Any:
        self._rest = {name: torch.zeros_like(leaf) for name, leaf in self._rest.items()}
        return super().after(round, graph, mixed)


@pytest.mark.parametrize("compression", EVERY, ids=str)
def test_a_mutant_that_drops_the_rest_is_caught(compression: Any) -> None:
    core = MatrixProduct()
    ids = np.arange(CLIENTS)
    mutant = Exchange(core, [_Drops(core, compression, 0, ids, "mu", replica=False, fused=False)])
    with pytest.raises(AssertionError):
        conserves(mutant, PUSH(CLIENTS), rounds=3)


@pytest.mark.parametrize("compression", EVERY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_and_two_find_the_same_bits(compression: Any, dtype: torch.dtype) -> None:
    for graph in (PUSH(CLIENTS)(0), AWAY(CLIENTS)(1), qv.full(clients=CLIENTS)(0)):
        found = []
        for fused in (True, False):
            core = MatrixProduct(product=lambda g, x: mix(g, x, BLOCK))
            stage = CompressionStage(core, compression, 0, np.arange(CLIENTS), "mu", False, fused)
            made = Exchange(core, [stage])
            wide = torch.from_numpy(np.random.default_rng(0).normal(size=(CLIENTS, 30_000)))
            made.push(4, graph, {"u": wide.to(dtype), "mu": messages()["mu"]})
            found.append(made.collect(4))
        assert all(torch.equal(found[0][name], found[1][name]) for name in ("u", "mu"))


def test_who_sends_nothing_keeps_every_bit() -> None:
    graph = AWAY(CLIENTS)(0)
    away = torch.from_numpy(find_offline(graph))
    assert away.any()
    now = messages()
    before = now["u"].clone()
    made = exchange(qv.Quantize(bits=2), PUSH(CLIENTS))
    made.push(0, graph, now)
    assert torch.equal(made.collect(0)["u"][away], before[away])


# Replicas.


@pytest.mark.parametrize("compression", EVERY, ids=str)
def test_replicas_bring_clients_to_their_exact_mean(compression: Any) -> None:
    """CHOCO-Gossip: no error remains, which remainders alone do not give."""
    ring = qv.ring(clients=CLIENTS)
    made = exchange(compression, ring, mass=None)
    now = {"u": messages()["u"]}
    mean = now["u"].mean(dim=0)
    for t in range(400 if isinstance(compression, qv.Quantize) else 900):
        made.push(t, ring(t), now)
        now = made.collect(t)
    assert (now["u"] - mean).abs().max() < 1e-5
    assert (made.tensors()["replica/u"] - mean).abs().max() < 1e-4


def test_replicas_are_refused_on_graphs_that_change() -> None:
    with pytest.raises(qv.QuiverError, match="a new neighbour has no replica"):
        simulate(
            qv.DFedAvgM(),
            qv.random_regular(clients=CLIENTS, neighbors=2),
            compression=qv.Quantize(feedback="replica"),
        )
    with pytest.raises(qv.QuiverError, match="has a push-sum mass"):
        simulate(qv.OSGP(), qv.ring(clients=CLIENTS), compression=qv.Quantize(feedback="replica"))
    ring, made = qv.ring(clients=CLIENTS), exchange(qv.TopK(), qv.ring(clients=CLIENTS), mass=None)
    made.push(0, ring(0), {"u": messages()["u"]})
    made.collect(0)
    with pytest.raises(qv.QuiverError, match="round 1: the graph has changed"):
        made.push(1, qv.full(clients=CLIENTS)(1), {"u": messages()["u"]})


# Methods.

RATIO = "divides by what arrives"
REFUSED = {
    "local": "sends nothing",
    "dispfl": "codes its messages itself",
    "fedproto": "of which every client has the same copy",
    "scaffold": "of which every client has the same copy",
    "scaffoldp": "of which every client has the same copy",
    **dict.fromkeys(("fedavg", "fedper", "fedrep", "fedbabu", "ditto", "fedprox"), RATIO),
    **dict.fromkeys(("moon", "apfl", "pfedme", "perfedavg"), RATIO),
    **dict.fromkeys(("fedala", "fedrod", "fedas", "fedbn"), RATIO),
    "feddbe": "of which every client has the same copy",
}
STAR = "compression over a star"
CODERS = (qv.Quantize(bits=4), qv.TopK(fraction=0.2), qv.RandomK(fraction=0.2))
PAIRS = [(method, graphs) for method, choices in METHODS for graphs in choices]
CASES = [
    pytest.param(
        *pair,
        coder,
        id=f"{pair[0]}-{pair[1](6).name}-{coder.name}",
        marks=() if (place + number) % 3 == 0 else pytest.mark.slow,
    )
    for place, pair in enumerate(PAIRS)
    for number, coder in enumerate(CODERS)
]
"""Every pair with one of the three; with the other two in the slow tests."""


def test_every_method_is_decided_upon() -> None:
    named = {method.name for method, _ in METHODS}
    assert named == set(qv.METHODS)
    sent = {"osgp", "dfedpgp", "dfedpgpsam", "pushdiging", "dfedavgm", "dfedavgmp", "dfedsam"}
    sent |= {"dfedsalt", "dfedsgpsm", "deprl", "kgt"}
    assert named - set(REFUSED) == sent


@pytest.mark.parametrize(("method", "graphs", "compression"), CASES)
def test_every_method_is_lawful_or_refused(method: Any, graphs: Any, compression: Any) -> None:
    """Laws 1, 4, 6, 8 and 10 of docs/explanation/concepts.md, or a sentence that refuses."""
    topology = graphs(CLIENTS)
    hub = topology(0).hub
    if hub or method.name in REFUSED:
        with pytest.raises(
            qv.QuiverError,
            match=REFUSED.get(method.name, STAR)
            if not hub
            else f"{STAR}|{REFUSED.get(method.name, STAR)}",
        ):
            simulate(method, topology, compression=compression)
        return
    kept: list[Checkpoint] = []
    whole = simulate(
        method,
        topology,
        rounds=4,
        compression=compression,
        checkpoint=kept.append,
        checkpoint_every=1,
    )
    again = simulate(
        method, topology, rounds=4, compression=compression, resume=kept[1], evaluate_every=4
    )
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(again), strict=True))
    plain = simulate(method, topology, rounds=4)
    assert distance(states(whole), states(plain)) > 1e-6
    assert whole.rounds["network_bytes"].sum() < plain.rounds["network_bytes"].sum()
    _idle_and_conserved(method, topology, compression)


def _idle_and_conserved(method: Any, topology: Any, compression: Any) -> None:
    settings = RunSettings(rounds=3, dtype=torch.float64)
    shard = Shard(task(), tiny_data(), method, TRAINING, settings)
    made = build_exchange(Transforms(compression), method, topology, settings)
    shard.train(0, np.ones(CLIENTS, dtype=bool))
    before = [part.clone() for part in shard.personal(np.arange(CLIENTS))]
    exchange_messages(shard, made, qv.isolated(clients=CLIENTS)(0), 0)
    assert distance(before, list(shard.personal(np.arange(CLIENTS)))) == 0
    graph = next(g for t in range(9) if (g := topology(t)).active.any())
    if not graph.column_stochastic:
        return
    outbox = {name: leaf.clone() for name, leaf in shard.outbox().items()}
    sent = {name: leaf.sum(dim=0) for name, leaf in outbox.items()}
    made.push(1, graph, outbox)
    mixed, flying = made.collect(1), made.tensors()
    for name, total in sent.items():
        away = sum(v.sum(0) for k, v in flying.items() if k.endswith("/" + name))
        torch.testing.assert_close(mixed[name].sum(0) + away, total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compression", EVERY[2:4], ids=str)
def test_replicas_are_part_of_a_checkpoint(compression: Any) -> None:
    kept: list[Checkpoint] = []
    ring = qv.ring(clients=CLIENTS)
    whole = simulate(
        qv.DFedAvgM(epochs=1),
        ring,
        rounds=4,
        compression=compression,
        checkpoint=kept.append,
        checkpoint_every=1,
    )
    again = simulate(qv.DFedAvgM(epochs=1), ring, rounds=4, compression=compression, resume=kept[1])
    assert "flight/replica/u" in kept[1].tensors
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(again), strict=True))


def test_permuting_clients_permutes_results() -> None:
    order = [3, 0, 5, 1, 4, 2]
    settings = RunSettings(rounds=3, dtype=torch.float64)
    method, topology = qv.DFedPGP(shared_epochs=1), PUSH(CLIENTS)
    plain = Shard(task(), tiny_data(), method, TRAINING, settings)
    moved = Shard(task(), tiny_data().select(order), method, TRAINING, settings, clients=order)
    chosen = Transforms(qv.Quantize(bits=4))
    first = build_exchange(chosen, method, topology, settings)
    core = MatrixProduct()
    ids = np.array(order)
    stage = CompressionStage(core, qv.Quantize(bits=4), 0, ids, "mu", False, True)
    second = Exchange(core, [stage])
    for t in range(2):
        graph = topology(t)
        other = qv.Graph(graph.sparse[order][:, order], graph.active[order])
        plain.train(t, graph.active)
        moved.train(t, other.active)
        exchange_messages(plain, first, graph, t)
        exchange_messages(moved, second, other, t)
    assert distance([leaf[order] for leaf in plain.state], list(moved.state)) <= 1e-12


# Bytes and words.


def test_bytes_that_travel_are_counted() -> None:
    """35 shared numbers are one block: eight bits each and a scale of two bytes; μ has eight."""
    plain = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=1)
    coded = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=1, compression=qv.Quantize(bits=8))
    links = 2 * CLIENTS
    assert plain.summary["bytes"] == links * (35 * 8 + 8)
    assert coded.summary["bytes"] == links * (35 + 2 + 8)
    four = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=1, compression=qv.Quantize(bits=4))
    assert four.summary["bytes"] == links * (18 + 2 + 8)
    top = simulate(qv.DFedPGP(), PUSH(CLIENTS), rounds=1, compression=qv.TopK(fraction=0.1))
    assert top.summary["bytes"] == links * (4 * (8 + 1) + 8)


def test_memory_is_predicted_with_the_copies_that_coding_takes() -> None:
    settings = RunSettings(rounds=1, dtype=torch.float64)
    parts = (task(), tiny_data(), qv.DFedPGP(), TRAINING, settings)
    plain = predict_memory(*parts)
    coded = predict_memory(*parts, transforms=Transforms(qv.Quantize()))
    message = 35 * 8 + 8
    assert coded.states - plain.states == CLIENTS * 2 * message


def test_eight_bits_are_a_quarter_of_the_bytes() -> None:
    assert qv.Quantize(bits=8).coded_bytes(100_000, 4) <= 0.26 * 400_000
    assert qv.Quantize(bits=4).coded_bytes(100_000, 4) <= 0.13 * 400_000 + 100
    assert qv.TopK(fraction=0.01).coded_bytes(96_000, 4) == 1000 * 5
    assert qv.RandomK(fraction=0.01).coded_bytes(96_000, 4) == 1000 * 4


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"name": "quantise"},
            "compression.name = 'quantise': unknown compression; did you mean 'quantize'?",
        ),
        ({"name": "quantize", "bits": 3}, "compression.bits = 3: known are 2, 4, 8."),
        ({"name": "top_k", "fraction": 0}, "compression.fraction = 0: it must be a number in"),
        ({"name": "top_k", "bits": 3}, "unknown key compression.bits; known are"),
        ({"bits": 8}, "compression.bits without compression.name"),
        (
            {"name": "quantize", "feedback": "remainder", "step": 0.5},
            "compression.step = 0.5: what stays with its sender is not stepped towards",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(qv.QuiverError) as found:
        parse_config({"compression": section})
    assert sentence in str(found.value)


def test_a_configuration_without_it_has_the_identity_it_had() -> None:
    assert parse_config({}).identity() == parse_config({"compression": {}}).identity()
    coded = parse_config({"compression": {"name": "quantize", "bits": 4}})
    assert coded.identity() != parse_config({}).identity()
    assert coded.transforms().compression == qv.Quantize(bits=4)
