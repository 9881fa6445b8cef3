"""Callbacks: who is told what, who may end a run, and what happens when one fails."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import quiverfl as qv
from quiverfl.runs.progress import _Notebook
from small import PUSH, TRAINING, simulate, tiny_data, tiny_task


class Noting(qv.Callback):
    def __init__(self, last: int = 99) -> None:
        self.seen: list[Any] = []
        self._last = last

    def on_evaluation(self, round: int, stage: str, metrics: Any) -> None:
        self.seen.append((round, stage, float(metrics["loss"].mean())))

    def should_stop(self) -> bool:
        return self.seen[-1][0] >= self._last

    def close(self) -> None:
        self.seen.append("closed")


def test_a_callback_ends_a_run_and_the_run_is_that_of_so_many_rounds() -> None:
    noting = Noting(last=1)
    kept: list[Any] = []
    ended = simulate(qv.DFedPGP(), PUSH(6), rounds=5, callbacks=[noting], checkpoint=kept.append)
    short = simulate(qv.DFedPGP(), PUSH(6), rounds=2)
    assert ended.history.equals(short.history)
    assert torch.equal(ended.state(3)["u"]["body.0.weight"], short.state(3)["u"]["body.0.weight"])
    assert (ended.complete, short.complete) == (False, True)
    assert "2 of 5" in repr(ended)
    assert [row[:2] for row in noting.seen[:-1]] == [
        (t, stage) for t in (0, 1) for stage in ("local", "mixed")
    ]
    assert noting.seen[-1] == "closed"
    assert [checkpoint.round for checkpoint in kept] == [2]
    with pytest.raises(qv.QuiverError, match="ended early"):
        ended.personal(0, "local")


def test_a_failing_callback_loses_nothing_and_the_others_are_closed() -> None:
    class Failing(qv.Callback):
        def on_round_end(self, record: Any) -> None:
            if record["round"] == 1:
                raise ValueError("the network is down")

    noting = Noting()
    with pytest.raises(
        qv.CallbackFailed, match="Failing failed: ValueError: the network"
    ) as caught:
        simulate(qv.DFedPGP(), PUSH(6), callbacks=[Failing(), noting])
    assert len(caught.value.run.rounds) == 2
    assert noting.seen[-1] == "closed"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("evaluated", "on_evaluation"),
        ("finished", "on_round_end"),
        ("enough", "should_stop"),
    ],
)
def test_a_callback_with_an_old_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    callback = type("Own", (qv.Callback,), {old: lambda *_: None})()
    with pytest.raises(qv.QuiverError, match=f"'{old}', which is now called '{new}'"):
        simulate(qv.DFedPGP(), PUSH(6), callbacks=[callback])


def told(stopping: qv.EarlyStopping, means: list[float], metric: str = "accuracy") -> int:
    """After how many rounds it has had enough."""
    for round, mean in enumerate(means):
        stopping.on_evaluation(round, "local", {metric: np.array([9.0, 9.0])})
        stopping.on_evaluation(round, "mixed", {metric: np.array([mean - 0.1, mean + 0.1, np.nan])})
        if stopping.should_stop():
            return round + 1
    return 0


def test_early_stopping_counts_rounds_without_a_better_mean() -> None:
    assert told(qv.EarlyStopping("accuracy", 2), [0.1, 0.3, 0.2, 0.35, 0.3, 0.35, 0.9]) == 6
    assert told(qv.EarlyStopping("loss", 2), [0.9, 0.5, 0.6, 0.4, 0.4, 0.4, 0.1], "loss") == 6
    assert told(qv.EarlyStopping("accuracy", 2, margin=0.1), [0.1, 0.15, 0.19, 0.9]) == 3
    again = qv.EarlyStopping("accuracy", 2)
    assert told(again, [0.5, 0.4, 0.4]) == 3
    assert told(again, [0.1, 0.2, 0.3, 0.1]) == 0  # another run starts from nothing


def test_early_stopping_ends_a_run_that_does_not_learn() -> None:
    stopping = qv.EarlyStopping("accuracy", patience=3, margin=1.0)
    run = qv.simulate(
        tiny_task(),
        tiny_data(),
        method=qv.Local(),
        topology=qv.isolated(clients=6),
        training=TRAINING,
        rounds=40,
        callbacks=[stopping],
    )
    assert len(run.rounds) == 4


def test_tensorboard_gets_the_numbers_of_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = simulate(qv.DFedPGP(), PUSH(6), callbacks=[qv.TensorBoard(tmp_path / "events")])
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    points = events.Scalars("accuracy/mixed")
    means = run.history.query("stage == 'mixed'").groupby("round")["accuracy"].mean()
    assert [point.step for point in points] == [1, 2, 3]
    assert np.allclose([point.value for point in points], means, atol=1e-6)
    # The same folder again: what is computed again replaces what was there.
    simulate(qv.DFedPGP(), PUSH(6), callbacks=[qv.TensorBoard(tmp_path / "events")])
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [point.step for point in events.Scalars("accuracy/mixed")] == [1, 2, 3]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A stand-in for somebody else's library."""
    made = types.ModuleType(name)
    made.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]
    for key, value in content.items():
        setattr(made, key, value)
    monkeypatch.setitem(sys.modules, name, made)


def test_wandb_is_started_logged_to_and_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Theirs:
        def log(self, points: Any, step: int) -> None:
            calls.append((step, points))

        def finish(self) -> None:
            calls.append("finish")

    def init(**options: Any) -> Theirs:
        calls.append(options)
        return Theirs()

    module(monkeypatch, "wandb", init=init)
    run = simulate(qv.DFedPGP(), PUSH(6), callbacks=[qv.WandB("paper", name="first")])
    assert calls[0] == {"project": "paper", "name": "first"}
    assert [call[0] for call in calls[1:-1]] == [1, 2, 3]
    assert calls[-1] == "finish"
    last = run.summary["stages"]["mixed"]["last"]
    assert calls[3][1]["accuracy/mixed"] == pytest.approx(last["mean"])
    assert calls[3][1]["accuracy, worst 10 %/mixed"] == pytest.approx(last["worst10"])
    sent = run.rounds["network_bytes"].iloc[-1]
    assert calls[3][1]["cost/bytes of the round"] == sent


def test_mlflow_gets_names_that_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class MlflowClient:
        def __init__(self, tracking_uri: str | None) -> None:
            calls.append(tracking_uri)

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"number of {name}"

        def create_run(self, experiment: str) -> Any:
            calls.append(experiment)
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def log_param(self, run: str, name: str, value: Any) -> None:
            calls.append((run, name, value))

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-. :/"), name
            calls.append((run, name, step))

        def set_terminated(self, run: str) -> None:
            calls.append(f"end of {run}")

    module(monkeypatch, "mlflow")
    module(monkeypatch, "mlflow.tracking", MlflowClient=MlflowClient)
    simulate(qv.DFedPGP(), PUSH(6), callbacks=[qv.MLflow("paper", "file:there", seed=0)])
    assert calls[:3] == ["file:there", "number of paper", ("r1", "seed", 0)]
    assert ("r1", "accuracy/local", 3) in calls
    assert ("r1", "loss worst 10 percent/mixed", 1) in calls
    assert calls[-1] == "end of r1"


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(qv.QuiverError, match=r"qv\.WandB needs wandb.*quiverfl\[wandb\]"):
        qv.WandB("paper")


def test_a_notebook_shows_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/html"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/html"])
        return Handle()

    module(monkeypatch, "IPython")
    module(monkeypatch, "IPython.display", display=display)
    bar = _Notebook("<mine>", 3)
    bar.on_evaluation(2, "mixed", {"accuracy": np.array([0.25, 0.75])})
    bar.on_round_end({"round": 2})
    assert '<progress value="0" max="3">' in shown[0]
    assert '<progress value="3" max="3">' in shown[-1]
    assert "&lt;mine&gt;: round 3/3" in shown[-1]
    assert "accuracy 0.5000 mixed" in shown[-1]
