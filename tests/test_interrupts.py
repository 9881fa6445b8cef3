"""Ctrl-C in Python: what a folder holds afterwards, and the sentence that says how to continue."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import quiverfl as qv
from quiverfl.engine.checkpoint import checkpoints

SECTIONS: dict[str, Any] = {
    "data": {"clients": 6, "samples_per_client": 20},
    "model": {"hidden": [8]},
    "topology": {"neighbors": 2},
    "training": {"batch_size": 8},
    "run": {"rounds": 6, "threads": 1, "checkpoint_every": 1000},
}


class CtrlC(qv.Callback):
    """Presses Ctrl-C in a round, so many times."""

    def __init__(self, round: int, times: int = 1) -> None:
        self._round, self._times = round, times

    def on_round_end(self, record: dict[str, Any]) -> None:
        if record["round"] == self._round:
            for _ in range(self._times):
                signal.raise_signal(signal.SIGINT)


@pytest.fixture
def experiment() -> qv.Experiment:
    return qv.Experiment.of(SECTIONS)


def test_the_round_is_finished_and_saved(
    experiment: qv.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(qv.Interrupted) as caught:
        experiment.run(folder, [CtrlC(2)])
    assert str(caught.value) == (
        f"interrupted after round 3, which is saved; the same call, or `quiver resume {folder}`, "
        "continues."
    )
    assert "Ctrl-C again ends it at once" in capsys.readouterr().err
    assert [path.stem for path in checkpoints(folder / "checkpoints")] == ["round-000003"]
    assert len(caught.value.run.rounds) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run = experiment.run(folder)
    assert run.complete
    assert run.history.equals(experiment.run().history)


def test_a_second_one_ends_at_once(experiment: qv.Experiment, tmp_path: Path) -> None:
    with pytest.raises(qv.Interrupted) as caught:
        experiment.run(tmp_path / "run", [CtrlC(2, times=2)])
    assert str(caught.value) == (
        "interrupted in round 4 of 6. The error's `run` has what was recorded before it. From the "
        f"last checkpoint the same call, or `quiver resume {tmp_path / 'run'}`, continues."
    )
    assert caught.value.__suppress_context__
    assert checkpoints(tmp_path / "run" / "checkpoints") == []
    assert experiment.run(tmp_path / "run").history.equals(experiment.run().history)


def test_one_in_the_last_round_is_not_lost(experiment: qv.Experiment, tmp_path: Path) -> None:
    with pytest.raises(qv.Interrupted, match="what was computed is in") as caught:
        qv.compare(experiment, ["local", "fedavg"], folder=tmp_path, callbacks=[CtrlC(5)])
    assert caught.value.run.complete
    assert qv.load_run(tmp_path / "local").complete
    assert not (tmp_path / "fedavg").exists()


def test_without_a_folder_it_says_what_there_is(experiment: qv.Experiment) -> None:
    with pytest.raises(qv.Interrupted) as caught:
        experiment.run(callbacks=[CtrlC(2)])
    assert str(caught.value) == (
        "interrupted in round 4 of 6. The error's `run` has what was recorded before it."
    )
    assert len(caught.value.run.rounds) == 3


def test_somebody_elses_handler_is_left_alone(experiment: qv.Experiment, tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        run = experiment.run(tmp_path / "run", [CtrlC(2)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
    assert run.complete
