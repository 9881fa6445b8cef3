"""Tests of `run.patience`, of trackers by configuration, and of what `simulate` does unasked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import quiverfl as qv
from quiverfl.errors import QuiverError, Stopped
from quiverfl.identity import hash_settings, select_run_settings
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import run_in_folder

TREE: dict[str, Any] = {
    "data": {
        "name": "synthetic",
        "clients": 3,
        "partition": "iid",
        "options": {"train": 60, "test": 30, "shape": [3], "classes": 2},
    },
    "run": {"rounds": 40, "threads": 1, "checkpoint_every": 2},
}


def with_run(**settings: Any) -> dict[str, Any]:
    return {**TREE, "run": {**TREE["run"], **settings}}


def means(folder: Path) -> list[float]:
    history = qv.load_run(folder).history.query("stage == 'mixed'")
    return history.groupby("round")["accuracy"].mean().tolist()


def first_end(scores: list[float], patience: int) -> int:
    """The number of rounds after which `patience` in a row were no better than the best before."""
    best, waited = -np.inf, 0
    for done, score in enumerate(scores, 1):
        best, waited = (score, 0) if score > best else (best, waited + 1)
        if waited == patience:
            return done
    return len(scores)


def test_a_run_ends_after_so_many_rounds_without_a_better_one(tmp_path: Path) -> None:
    run_in_folder(parse_config(with_run()), tmp_path / "whole")
    whole = means(tmp_path / "whole")
    end = first_end(whole, 3)
    assert 3 < end < 40
    summary = run_in_folder(parse_config(with_run(patience=3)), tmp_path / "early")
    assert means(tmp_path / "early") == whole[:end]
    assert summary["finished"]
    saved = qv.load_run(tmp_path / "early")
    assert saved.complete
    assert saved.done_rounds == end


@pytest.mark.parametrize("before_end", [1, 0])
def test_stopped_and_resumed_it_ends_where_it_would_have(tmp_path: Path, before_end: int) -> None:
    config = parse_config(with_run(patience=3))
    run_in_folder(config, tmp_path / "whole")
    whole = means(tmp_path / "whole")
    asked = iter([False] * (len(whole) - before_end) + [True])
    with pytest.raises(Stopped):
        run_in_folder(config, tmp_path / "cut", stop=lambda: next(asked))
    run_in_folder(config, tmp_path / "cut")
    assert means(tmp_path / "cut") == whole


def test_killed_before_its_end_was_written_it_ends_without_another_round(tmp_path: Path) -> None:
    config = parse_config(with_run(patience=3))
    run_in_folder(config, tmp_path / "run")
    whole = means(tmp_path / "run")
    for name in ("summary.json", "history.parquet", "rounds.parquet"):
        (tmp_path / "run" / name).unlink()
    assert run_in_folder(config, tmp_path / "run")["finished"]
    assert means(tmp_path / "run") == whole


def test_without_them_a_run_is_the_one_it_was() -> None:
    plain = parse_config(TREE)
    written = plain.model_dump(mode="json", exclude_defaults=True)
    assert "track" not in written
    assert "patience" not in written["run"]
    assert plain.identity() == hash_settings(select_run_settings(written))
    tracked = parse_config({**TREE, "track": {"tensorboard": True, "wandb": "here"}})
    assert tracked.identity() == plain.identity()
    assert tracked.experiment() == plain.experiment()
    assert parse_config(with_run(patience=3)).identity() != plain.identity()


def test_tensorboard_is_written_live_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = parse_config({**with_run(rounds=6), "track": {"tensorboard": True}})
    folder, asked = tmp_path / "run", iter([False, False, False, True])

    def read() -> dict[int, float]:
        events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
        events.Reload()
        return {one.step: one.value for one in events.Scalars("accuracy/mixed")}

    with pytest.raises(Stopped):
        run_in_folder(config, folder, stop=lambda: next(asked))
    assert sorted(read()) == [1, 2, 3]
    run_in_folder(config, folder)
    assert list(read().values()) == pytest.approx(means(folder), abs=1e-6)
    assert sorted(read()) == [1, 2, 3, 4, 5, 6]


def test_a_tracked_run_says_what_it_cannot_do(tmp_path: Path) -> None:
    tracked = qv.Experiment.of({**with_run(rounds=1), "track": {"tensorboard": True}})
    with pytest.raises(QuiverError, match=r"\[track\] writes beside a run"):
        tracked.run()
    with pytest.raises(QuiverError, match=r"track\.tensorbord"):
        parse_config({"track": {"tensorbord": True}})
    with pytest.raises(QuiverError, match=r"run\.patience needs a metric"):
        qv.Experiment.of({**with_run(patience=2), "task": {"metrics": []}}).run()
    with pytest.raises(QuiverError, match="patience"):
        parse_config(with_run(patience=0))


def task() -> qv.Task:
    return qv.Task(lambda: torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)), "1")


def frames(rows: int, seed: int) -> tuple[pd.DataFrame, pd.Series]:
    rng = np.random.default_rng(seed)
    index = range(100, 100 + rows)  # as a frame has after a selection
    inputs = pd.DataFrame(rng.normal(size=(rows, 3)).astype(np.float32), index, list("abc"))
    return inputs, pd.Series(rng.integers(0, 2, rows), index)


def test_simulate_takes_the_usual_topology_training_and_rounds() -> None:
    pairs = [frames(10, seed) for seed in range(4)]
    data = qv.FederatedData.from_arrays(pairs, pairs[::-1], names=pd.Series(list("wxyz")))
    assert data.names == ("w", "x", "y", "z")
    run = qv.simulate(task(), data, method=qv.DFedPGP(), seed=3)
    topology = qv.random_push(clients=4, neighbors=3, seed=3)
    other = qv.simulate(
        task(), data, method=qv.DFedPGP(), topology=topology, training=qv.Training(), rounds=20,
        seed=3,
    )  # fmt: skip
    assert run.history.equals(other.history)
    star = qv.simulate(task(), data, method=qv.FedAvg(), rounds=1).simulation.topology
    assert (star.name, star.options["sampled"]) == ("star", 1)
    arrays = [(x.to_numpy(), y.to_numpy()) for x, y in pairs]
    same = qv.FederatedData.from_arrays(arrays, arrays[::-1])
    again = qv.simulate(task(), same, method=qv.DFedPGP(), seed=3)
    assert json.loads(again.history.to_json()) == json.loads(run.history.to_json())
