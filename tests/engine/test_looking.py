"""Runs whose topology looks: what is told, what it costs, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.client_reports import count_sketch
from quiverfl.seeds import key_hashes
from quiverfl.topologies.analysis import graph_to_text
from small import CLIENTS, PUSH, REGULAR, TRAINING, simulate, states, tiny_data, tiny_task

EVERYTHING = qv.ReportSpec(loss=True, norm=True, sketch=4, model=3, seed=5)
METHOD = qv.DFedPGP(shared_epochs=2)


def looking(clients: int, looks: qv.ReportSpec = EVERYTHING, **options: Any) -> qv.Topology:
    """random_push with whatever is to be told."""
    plain = qv.random_push(clients=clients, neighbors=2, seed=0)
    return qv.custom(lambda t, view: plain(t), clients, reports=looks)


def bandit(clients: int) -> qv.Topology:
    return qv.bandit_push(clients, 2, by="similarity", sketch=4, seed=0)


def test_looking_alone_changes_nothing_but_the_bytes():
    """The same graphs, looked for or not: the same states, kept models and evaluations."""
    blind, seeing = simulate(METHOD, PUSH(CLIENTS)), simulate(METHOD, looking(CLIENTS))
    assert all(torch.equal(a, b) for a, b in zip(states(blind), states(seeing), strict=True))
    assert blind.history.equals(seeing.history)
    for before, after in zip(blind._history.records, seeing._history.records, strict=True):
        beside = 2 * EVERYTHING.bytes  # two messages of every client
        assert after["sent_bytes"] == [size + beside for size in before["sent_bytes"]]
        assert after["network_bytes"] == before["network_bytes"] + CLIENTS * beside
        assert after["links"] == graph_to_text(PUSH(CLIENTS)(after["round"]))
        assert "links" not in before


def test_models_of_clients_away_are_kept_as_without_looking():
    away = [qv.participating(make(CLIENTS), 0.5, seed=1) for make in (PUSH, looking)]
    blind, seeing = (simulate(METHOD, topology, rounds=4) for topology in away)
    assert blind.history.equals(seeing.history)
    assert blind._shard.local.points.keys() == seeing._shard.local.points.keys()


def test_what_is_told_of_the_first_round():
    run = simulate(METHOD, looking(CLIENTS), rounds=1)
    view, task, data = run._shard.view, tiny_task(), tiny_data()
    for client in range(CLIENTS):
        begun = task.initial_params(0)
        moved = np.concatenate(
            [
                (run.parameters(client, "local")[name] - value).flatten().numpy()
                for name, value in task.shared_layout.split(begun.shared.double()).items()
            ]
        )
        x, y = data.train.x, data.train.y
        rows = slice(*data.train.offsets[client : client + 2])
        model = task.make_module(qv.Params(*(part.double() for part in begun)))
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model(x[rows].double()), y[rows])
        assert view.loss[client, client] == pytest.approx(float(loss), rel=1e-6)
        assert view.norm[client, client] == pytest.approx(np.linalg.norm(moved), rel=1e-6)
        bits = key_hashes(5, "sketch", np.arange(len(moved)))
        expected = np.zeros(4)
        for value, bit in zip(moved, bits, strict=True):
            expected[int(bit >> np.uint64(1)) % 4] += value if bit & np.uint64(1) else -value
        assert np.allclose(view.sketch[client, client], expected, rtol=1e-6, atol=1e-7)
        reached = moved + task.initial_params(0).shared.double().numpy()
        expected = np.zeros(3)
        for value, bit in zip(reached, bits, strict=True):
            expected[int(bit >> np.uint64(1)) % 3] += value if bit & np.uint64(1) else -value
        assert np.allclose(view.model[client, client], expected, rtol=1e-6, atol=1e-7)
    links = PUSH(CLIENTS)(0).weights > 0
    assert (np.isfinite(view.values).all(axis=2) == links).all()
    across = links & ~np.eye(CLIENTS, dtype=bool)
    assert (view.loss[across] == np.broadcast_to(view.loss.diagonal(), links.shape)[across]).all()


def test_a_sketch_keeps_angles_on_average():
    random = np.random.default_rng(0)
    one, other = random.normal(size=(2, 5000))
    other += one
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    found = []
    for seed in range(200):
        bits = key_hashes(seed, "sketch", np.arange(5000))
        buckets = ((bits >> np.uint64(1)) % np.uint64(32)).astype(np.int64)
        signs = np.where(bits & np.uint64(1), 1.0, -1.0)
        a, b = (count_sketch(row, buckets, signs, 32) for row in (one, other))
        found.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert np.mean(found) == pytest.approx(cosine, abs=0.03)
    assert np.std(found) < 2 / np.sqrt(32)


@pytest.mark.parametrize(
    "make",
    [
        bandit,
        lambda m: qv.participating(qv.loss_push(m, 2), 0.5),
        lambda m: qv.similar_pull(m, 3, sketch=4),
    ],
)
def test_resumed_equals_uninterrupted(make, tmp_path: Path):
    kept: list[Checkpoint] = []
    whole = simulate(METHOD, make(CLIENTS), rounds=6, checkpoint_every=2, checkpoint=kept.append)
    path = kept[1].save(tmp_path)
    assert kept[1].round == 4
    read = Checkpoint.load(path, kept[1].history)
    resumed = simulate(METHOD, make(CLIENTS), rounds=6, resume=read)
    assert all(torch.equal(a, b) for a, b in zip(states(whole), states(resumed), strict=True))
    assert whole.history.equals(resumed.history)
    for one, other in zip(whole._history.records, resumed._history.records, strict=True):
        assert one["links"] == other["links"]
    for name, array in whole._shard.view.arrays().items():
        assert np.array_equal(array, resumed._shard.view.arrays()[name], equal_nan=True), name


def test_the_graph_follows_what_clients_told():
    """Other data, other choices; the first round has nothing to choose by."""
    first = simulate(METHOD, bandit(CLIENTS), rounds=8)
    again = simulate(METHOD, bandit(CLIENTS), rounds=8)
    other = qv.simulate(
        tiny_task(),
        tiny_data(seed=1),
        method=METHOD,
        topology=bandit(CLIENTS),
        training=TRAINING,
        rounds=8,
        dtype=torch.float64,
        threads=1,
    )
    links = [[record["links"] for record in r._history.records] for r in (first, again, other)]
    assert links[0] == links[1]
    assert links[0][0] == links[2][0]
    assert links[0] != links[2]
    total = first._shard.state.mu.sum()
    assert float(total) == pytest.approx(CLIENTS, abs=1e-12)


@pytest.mark.parametrize(
    ("method", "topology", "words"),
    [
        (qv.Local(), bandit(CLIENTS), "Local sends nothing"),
        (qv.OSGP(delay=1), bandit(CLIENTS), "with delay = 1: bandit_push needs"),
        (qv.DFedAvgM(), bandit(CLIENTS), "carries no push-sum mass"),
        (
            qv.FedAvg(),
            qv.custom(lambda t, view: qv.star(CLIENTS, 2)(t), CLIENTS, reports=EVERYTHING),
            "is an adaptive star",
        ),
    ],
)
def test_what_cannot_look_is_refused(method, topology, words):
    with pytest.raises(qv.QuiverError, match=words):
        simulate(method, topology)


def test_a_checkpoint_without_a_view_is_refused():
    blind = simulate(METHOD, PUSH(CLIENTS), rounds=2).checkpoint()
    with pytest.raises(qv.QuiverError, match="lacks the client reports"):
        simulate(METHOD, looking(CLIENTS), rounds=4, resume=blind)


def test_row_stochastic_graphs_can_look_too():
    plain = REGULAR(CLIENTS)
    topology = qv.custom(lambda t, view: plain(t), CLIENTS, reports=qv.ReportSpec(norm=True))
    blind, seeing = simulate(qv.DFedAvgM(), plain), simulate(qv.DFedAvgM(), topology)
    assert all(torch.equal(a, b) for a, b in zip(states(blind), states(seeing), strict=True))
    assert (seeing._shard.view.norm.diagonal() > 0).all()


def test_what_is_told_is_counted_beside_a_compressed_message():
    """And Σμ is conserved with both."""
    chosen, coded = bandit(CLIENTS), qv.Quantize(bits=4)
    whole, small = (simulate(METHOD, chosen, compression=c) for c in (None, coded))
    plain = simulate(METHOD, PUSH(CLIENTS), compression=coded)
    beside = chosen.reports.bytes * CLIENTS * 2
    sizes = [r.rounds["network_bytes"].tolist() for r in (whole, small, plain)]
    assert sizes[1] == [size + beside for size in sizes[2]]
    assert sizes[1][0] < sizes[0][0]
    assert float(small._shard.state.mu.sum()) == pytest.approx(CLIENTS, abs=1e-12)
