"""Many clients: what is recorded of them, and how their kept models are stored."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.data.examples import ClientExamples
from quiverfl.engine import checkpoint as checkpoints
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.models import make_model
from quiverfl.results.run_files import read_run
from quiverfl.results.scores import run_scores
from quiverfl.results.summary import condense_metrics, condense_record, describe_spread

CLIENTS, INPUTS, CLASSES = 230, 3, 2


def _simulate(**options: object) -> qv.Run:
    generator = torch.Generator().manual_seed(0)
    samples = 4 * CLIENTS
    split = ClientExamples(
        torch.randn(samples, INPUTS, generator=generator),
        torch.randint(CLASSES, (samples,), generator=generator),
        np.arange(CLIENTS + 1) * 4,
    )
    given = {"rounds": 2, "method": qv.FedRep(1, 1), "topology": qv.star(CLIENTS, sampled=200)}
    return qv.simulate(
        qv.Task(partial(make_model, "mlp", (INPUTS,), CLASSES, hidden=(2,))),
        qv.FederatedData(split, split, CLASSES),
        training=qv.Training(lr=0.1, batch_size=4),
        **{**given, **options},
    )


def test_hundredths_are_the_means_of_equal_parts_of_the_sorted_clients() -> None:
    values = np.random.default_rng(0).permutation(400).astype(np.float64)
    values = np.concatenate([values, [np.nan] * 7])
    kept = condense_metrics({"accuracy": values, "few": values[:50]}, most=50)
    assert kept["accuracy"].tolist() == [4 * k + 1.5 for k in range(100)]
    assert kept["few"] is not values
    assert np.array_equal(kept["few"], values[:50])
    few = condense_metrics({"loss": np.array([np.nan, 2.0, 1.0])}, most=1)["loss"]
    assert few[:2].tolist() == [1.0, 2.0]
    assert len(few) == 100
    assert np.isnan(few[2:]).all()


def test_a_round_has_sums_in_place_of_long_lists() -> None:
    record = {"round": 3, "steps": [1, 2, 3], "epsilon": [0.5, 2.0, 1.0], "pair": [1, 2]}
    assert condense_record(record, most=2) == {
        "round": 3,
        "steps": 6,
        "epsilon": 2.0,
        "pair": [1, 2],
    }


def test_mean_and_worst_tenth_of_hundredths_are_those_of_all_clients(tmp_path: Path) -> None:
    whole, short = _simulate(history="clients"), _simulate(history="hundredths")
    for one, other in zip(whole._shard.state, short._shard.state, strict=True):
        assert torch.equal(one, other)
    assert whole.history["client"].nunique() == CLIENTS
    assert short.history["client"].nunique() == 100
    assert whole.rounds["steps"].tolist() == short.rounds["steps"].tolist()
    last = whole.history.query("round == 1 and stage == 'mixed'")["loss"].to_numpy()
    kept = short.history.query("round == 1 and stage == 'mixed'")["loss"].to_numpy()
    cuts = np.arange(101) * CLIENTS // 100
    assert np.array_equal(kept, [np.sort(last)[a:b].mean() for a, b in itertools.pairwise(cuts)])
    run = read_run(short.save(tmp_path / "run"))
    assert run.is_condensed
    assert run.clients == CLIENTS
    assert run.client_name(4) == "hundredth 5"
    assert run.client_size(4) is None
    with pytest.raises(qv.QuiverError, match="recorded hundredths of its clients"):
        run_scores(run, "mixed", "last", "loss", "samples")


def test_equal_hundredths_keep_mean_and_worst_tenth() -> None:
    import pandas as pd

    values = np.random.default_rng(1).normal(size=3_000)
    short = condense_metrics({"loss": values}, most=100)["loss"]
    long, kept = (describe_spread(pd.Series(some), "loss") for some in (values, short))
    assert kept["mean"] == pytest.approx(long["mean"], abs=1e-12)
    assert kept["worst10"] == pytest.approx(long["worst10"], abs=1e-12)
    assert kept["std"] == pytest.approx(long["std"], rel=0.01)


def test_by_default_a_history_has_every_client_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _simulate().history["client"].nunique() == CLIENTS
    monkeypatch.setattr("quiverfl.runs.simulate.CROWD", CLIENTS)
    assert _simulate().history["client"].nunique() == CLIENTS
    monkeypatch.setattr("quiverfl.runs.simulate.CROWD", CLIENTS - 1)
    assert _simulate().history["client"].nunique() == 100
    assert _simulate(history="clients").history["client"].nunique() == CLIENTS
    pushed = {"method": qv.DFedPGP(1, 1), "topology": qv.random_push(CLIENTS, 2)}
    attacked = _simulate(adversary=qv.SignFlip(), **pushed)
    assert attacked.history["client"].nunique() == CLIENTS
    with pytest.raises(qv.QuiverError, match="hundredths"):
        _simulate(adversary=qv.SignFlip(), history="hundredths", **pushed)


def test_kept_models_of_many_clients_are_stored_as_stacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file of more than a million names could not be read."""
    whole = _simulate(rounds=4)
    taken: list[Checkpoint] = []
    _simulate(rounds=4, checkpoint=taken.append, checkpoint_every=2)
    apart = taken[0]
    monkeypatch.setattr(checkpoints, "MANY", CLIENTS - 1)
    taken.clear()
    _simulate(rounds=4, checkpoint=taken.append, checkpoint_every=2)
    stacked = taken[0]
    kept = {name for name in stacked.tensors if name.startswith("local/")}
    assert kept == {"local/rows", "local/shared", "local/personal"}
    rows = stacked.tensors["local/rows"].nonzero().flatten().tolist()
    assert 0 < len(rows) < CLIENTS
    for row in rows:
        for part in ("shared", "personal"):
            one = apart.tensors[f"local/{row}/{part}"]
            assert torch.equal(stacked.tensors[f"local/{part}"][row], one)
    loaded = Checkpoint.load(stacked.save(tmp_path), stacked.history)
    for checkpoint in (loaded, apart):
        resumed = _simulate(rounds=4, resume=checkpoint)
        assert resumed.history.equals(whole.history)
        assert resumed._shard.local.points.keys() == whole._shard.local.points.keys()
        for row, point in whole._shard.local.points.items():
            assert torch.equal(resumed._shard.local.points[row].shared, point.shared)
        for one, other in zip(whole._shard.state, resumed._shard.state, strict=True):
            assert torch.equal(one, other)
