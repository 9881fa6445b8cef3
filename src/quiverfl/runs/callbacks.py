"""Callbacks that watch a run: progress, early stopping, and experiment trackers."""

from __future__ import annotations

import hashlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from quiverfl.engine.history import Callback, Record
from quiverfl.errors import QuiverError, suggest
from quiverfl.identity import flatten_settings
from quiverfl.options import python_number
from quiverfl.results.formatting import write_result_file
from quiverfl.results.run_files import read_run
from quiverfl.results.summary import STAGES, client_frame, describe_spread, higher_is_better
from quiverfl.runs.config import Config
from quiverfl.support.environment import require_package
from quiverfl.types import Metrics, Stage

if TYPE_CHECKING:
    import pandas as pd

# Ending a run when it does not get better.


@dataclass(eq=False)
class EarlyStopping(Callback):
    """End the run after `patience` evaluations in which the mean over clients was not better than
    the best before by more than `margin`. It watches the clients' test data: what it picks is no
    longer measured by them (set data aside with `validation`).
    """

    metric: str = "accuracy"
    patience: int = 10
    stage: Stage = "mixed"
    margin: float = 0.0
    best: float = field(default=float("nan"), init=False)
    _waited: int = field(default=0, init=False, repr=False)
    _round: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        self.patience = python_number(self.patience)
        self.margin = python_number(self.margin)
        if isinstance(self.patience, bool) or not isinstance(self.patience, int):
            raise QuiverError(
                f"EarlyStopping: patience = {self.patience!r}: it must be a whole number."
            )
        if self.patience < 1:
            raise QuiverError(f"EarlyStopping: patience = {self.patience}: it must be at least 1.")
        if self.stage not in get_args(Stage):
            known = suggest(str(self.stage), get_args(Stage))
            raise QuiverError(f"EarlyStopping: stage = {self.stage!r}: {known}")
        if not self.margin >= 0:
            raise QuiverError(f"EarlyStopping: margin = {self.margin!r}: it must be 0 or more.")

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        if stage != self.stage:
            return
        if self.metric not in metrics:
            raise QuiverError(
                f"EarlyStopping: no metric {self.metric!r}; {suggest(self.metric, metrics)}"
            )
        if round <= self._round:  # another run
            self.best, self._waited = float("nan"), 0
        self._round = round
        values = metrics[self.metric][~np.isnan(metrics[self.metric])]
        mean = float(values.mean()) if len(values) else float("nan")
        if self._better(mean):
            self.best, self._waited = mean, 0
        else:
            self._waited += 1

    def _better(self, mean: float) -> bool:
        if np.isnan(self.best):
            return not np.isnan(mean)
        gain = mean - self.best if higher_is_better(self.metric) else self.best - mean
        return gain > self.margin

    def should_stop(self) -> bool:
        return self._waited >= self.patience


# A run as TensorBoard event files.


COLUMNS = {
    "network_bytes": "cost/bytes of the round",
    "busiest_bytes": "cost/bytes of the busiest node",
    "steps": "cost/local steps of the round",
    "seconds": "cost/seconds of the round",
    "clock": "cost/seconds on the clock",
    "joules": "cost/joules of the round",
    "mu_min": "mass/smallest",
    "mu_max": "mass/largest",
    "consensus": "consensus distance",
    "gradient_shared": "gradient/shared part at the mean",
    "gradient_personal": "gradient/personal parts",
}


def write_events(run_folder: Path, out: Path) -> int:
    """Write a run's history into the folder `out`; how many points were written.

    Steps are rounds, counted from 1; times are those of the run.
    """
    require_package("tensorboard", "writing event files")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    if out.is_dir() and any(out.glob("*tfevents*")):
        raise QuiverError(f"{out} holds event files already: choose another folder.")
    run = read_run(run_folder)
    started = (run_folder / "config.json").stat().st_mtime
    clock = _clock(run.rounds)
    try:
        writer = EventFileWriter(str(out), filename_suffix=".quiver")
    except OSError as problem:
        raise QuiverError(f"{out} cannot be written: {problem.strerror}.") from problem
    count = 0
    for name, round, number in (*_scores(run.history), *_per_round(run.rounds)):
        value = Summary.Value(tag=name, simple_value=number)
        at = started + clock.get(round, 0.0)
        writer.add_event(Event(wall_time=at, step=round + 1, summary=Summary(value=[value])))
        count += 1
    writer.close()
    return count


ScalarPoints = Iterator[tuple[str, int, float]]


def _scores(history: pd.DataFrame) -> ScalarPoints:
    """(name, round, number) for every metric and stage: the mean and the worst tenth."""
    for metric in history.columns.difference(["round", "stage", "client"]):
        for stage in STAGES:
            for round, row in client_frame(history, stage, metric).iterrows():
                figures = describe_spread(row, metric)
                yield f"{metric}/{stage}", int(str(round)), figures["mean"]
                yield f"{metric}, worst 10 %/{stage}", int(str(round)), figures["worst10"]


def _per_round(rounds: pd.DataFrame) -> ScalarPoints:
    for column, name in COLUMNS.items():
        if column in rounds:
            known = rounds[["round", column]].dropna().astype(float)
            for round, number in known.itertuples(index=False):
                yield name, int(round), float(number)


def _clock(rounds: pd.DataFrame) -> dict[int, float]:
    """Seconds since the start at the end of each round."""
    if "seconds" not in rounds:
        return {}
    return dict(zip(rounds["round"].astype(int), rounds["seconds"].cumsum(), strict=True))


# Runs in TensorBoard, Weights & Biases and MLflow, as they go. Steps are rounds, from 1.


Points = dict[str, float]


class _Tracker(Callback, ABC):
    """Gives `log` the numbers of a round, once it is complete."""

    def __init__(self) -> None:
        self._points: Points = {}

    @abstractmethod
    def log(self, points: Points, step: int) -> None: ...

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        import pandas as pd

        for name, values in metrics.items():
            figures = describe_spread(pd.Series(values), name)
            self._points[f"{name}/{stage}"] = figures["mean"]
            self._points[f"{name}, worst 10 %/{stage}"] = figures["worst10"]

    def on_round_end(self, record: Record) -> None:
        for column, name in COLUMNS.items():
            if record.get(column) is not None:
                self._points[name] = float(np.sum(record[column]))
        known = {name: value for name, value in self._points.items() if np.isfinite(value)}
        self._points = {}
        self.log(known, int(record["round"]) + 1)


class TensorBoard(_Tracker):
    """Event files in a folder. Files of the same run are continued when it resumes: what they have
    of rounds that are computed again is replaced."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        require_package("tensorboard", "qv.TensorBoard")
        self._folder = str(folder)
        self._writer: Any = None

    def log(self, points: Points, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            try:
                self._writer = EventFileWriter(self._folder, filename_suffix=".quiver")
            except OSError as problem:
                raise QuiverError(f"{self._folder}: {problem.strerror}.") from problem
            begin = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=begin))
        values = [Summary.Value(tag=name, simple_value=number) for name, number in points.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB(_Tracker):
    """A run of Weights & Biases; `options` are those of wandb.init, such as name and config."""

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        require_package("wandb", "qv.WandB")
        self._options = {"project": project, **options}
        self._run: Any = None

    def log(self, points: Points, step: int) -> None:
        import wandb

        if self._run is None:
            self._run = wandb.init(**self._options)
        self._run.log(points, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


class MLflow(_Tracker):
    """A run of MLflow, in the experiment of that name; `params` are logged with it.

    It is written through a client, so a run of your own that is active stays as it is.
    """

    def __init__(
        self, experiment: str, tracking_uri: str | None = None, **params: str | int | float
    ) -> None:
        super().__init__()
        require_package("mlflow", "qv.MLflow")
        self._experiment, self._uri, self._params = experiment, tracking_uri, params
        self._client: Any = None
        self._run_id = ""
        self._remember: Path | None = None

    @classmethod
    def resume(cls, experiment: str, file: Path, **params: str | int | float) -> MLflow:
        """The run whose number is in a file, or a new one whose number is written there."""
        made = cls(experiment, None, **params)
        made._remember = file
        made._run_id = file.read_text().strip() if file.exists() else ""
        return made

    def _start(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        if self._run_id:
            self._client.update_run(self._run_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(self._experiment)
        number = (
            self._client.create_experiment(self._experiment)
            if known is None
            else known.experiment_id
        )
        self._run_id = self._client.create_run(number).info.run_id
        for name, value in self._params.items():
            self._client.log_param(self._run_id, name, value)
        if self._remember is not None:
            write_result_file(self._remember, self._run_id.encode())

    def log(self, points: Points, step: int) -> None:
        if self._client is None:
            self._start()
        for name, value in points.items():
            # Its names have letters, digits, blanks and _-./: only.
            plain = re.sub(r"[^\w\-. :/]", "", name.replace("%", "percent"))
            self._client.log_metric(self._run_id, plain, value, step=step)

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id)
            self._client = None


def make_trackers(config: Config, folder: Path) -> list[Callback]:
    """The trackers of [track], which continue what an earlier start of the run has written."""
    track, trackers = config.track, list[Callback]()
    if track.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard"))
    name = f"{folder.name}-{config.identity()[:8]}"
    if track.wandb is not None:
        # The place is part of it: the same configuration in another folder is another run.
        number = hashlib.sha256(f"{folder.resolve()} {config.identity()}".encode()).hexdigest()[:16]
        options = {"id": number, "resume": "allow", "name": name, "dir": str(folder)}
        trackers.append(WandB(track.wandb, config=config.model_dump(mode="json"), **options))
    if track.mlflow is not None:
        written = config.model_dump(mode="json", exclude_defaults=True, exclude={"track"})
        settings = flatten_settings(written)
        params = {key: str(value) for key, value in settings.items() if value is not None}
        trackers.append(MLflow.resume(track.mlflow, folder / "mlflow-run", **params))
    return trackers


__all__ = ["Callback", "EarlyStopping", "MLflow", "TensorBoard", "WandB"]
