"""Weights & Biases and MLflow themselves, without a server: what they keep is what was run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quiverfl as qv
from quiverfl.errors import Stopped
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import run_in_folder

pytestmark = pytest.mark.slow


def run(*callbacks: Any) -> qv.Run:
    options = {"train": 60, "test": 30, "shape": [3], "classes": 2}
    experiment = qv.Experiment.of(
        {
            "data": {"name": "synthetic", "clients": 3, "partition": "iid", "options": options},
            "run": {"rounds": 3, "threads": 1},
        }
    )
    return experiment.run(callbacks=callbacks)


def test_mlflow_keeps_every_round_in_a_store_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'quiverfl[mlflow]'")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its newest versions ask for consent
    store = (tmp_path / "mlruns").as_uri()
    found = run(qv.MLflow("digits", store, lr=0.1))
    client = MlflowClient(tracking_uri=store)
    number = client.get_experiment_by_name("digits").experiment_id
    (kept,) = client.search_runs([number])
    assert kept.info.status == "FINISHED"
    assert kept.data.params == {"lr": "0.1"}
    history = client.get_metric_history(kept.info.run_id, "accuracy/mixed")
    means = found.history.query("stage == 'mixed'").groupby("round")["accuracy"].mean()
    assert [point.step for point in history] == [1, 2, 3]
    assert [point.value for point in history] == pytest.approx(means.tolist())


def test_mlflow_by_configuration_goes_on_in_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'quiverfl[mlflow]'")
    from mlflow.tracking import MlflowClient

    store = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    options = {"train": 60, "test": 30, "shape": [3], "classes": 2}
    data = {"name": "synthetic", "clients": 3, "partition": "iid", "options": options}
    settings = {"rounds": 4, "threads": 1}
    config = parse_config({"data": data, "run": settings, "track": {"mlflow": "digits"}})
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        run_in_folder(config, tmp_path / "run", stop=lambda: next(asked))
    run_in_folder(config, tmp_path / "run")
    client = MlflowClient(tracking_uri=store)
    (kept,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    history = client.get_metric_history(kept.info.run_id, "accuracy/mixed")
    assert [point.step for point in history] == [1, 2, 3, 4]
    assert kept.info.status == "FINISHED"
    assert kept.data.params["run.rounds"] == "4"


def test_wandb_keeps_every_round_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install 'quiverfl[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged: list[tuple[int, dict[str, float]]] = []
    real = wandb.init

    def init(**options: Any) -> Any:
        made = real(**options)
        log = made.log

        def noted(points: dict[str, float], step: int) -> None:
            log(points, step=step)
            logged.append((step, dict(made.summary)))

        made.log = noted
        return made

    monkeypatch.setattr(wandb, "init", init)
    found = run(qv.WandB("digits", dir=str(tmp_path), config={"lr": 0.1}))
    assert [step for step, _ in logged] == [1, 2, 3]
    last = found.summary["stages"]["mixed"]["last"]["mean"]
    assert logged[-1][1]["accuracy/mixed"] == pytest.approx(last)
    files = list(tmp_path.rglob("*.wandb"))
    assert len(files) == 1
    assert files[0].stat().st_size > 0
