"""Runs in TensorBoard, Weights & Biases and MLflow, as they go. Steps are rounds, from 1."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.engine.history import Metrics, Record
from quiverfl.engine.recorders import Callback
from quiverfl.errors import QuiverError
from quiverfl.extras import require
from quiverfl.results.summary import spread
from quiverfl.results.tensorboard import COLUMNS

Points = dict[str, float]


class _Tracker(Callback, ABC):
    """Gives `log` the numbers of a round, once it is complete."""

    def __init__(self) -> None:
        self._points: Points = {}

    @abstractmethod
    def log(self, points: Points, step: int) -> None: ...

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        import pandas as pd

        for name, values in metrics.items():
            figures = spread(pd.Series(values), name)
            self._points[f"{name}/{stage}"] = figures["mean"]
            self._points[f"{name}, worst 10 %/{stage}"] = figures["worst10"]

    def finished(self, record: Record) -> None:
        for column, name in COLUMNS.items():
            if record.get(column) is not None:
                self._points[name] = float(np.sum(record[column]))
        known = {name: value for name, value in self._points.items() if np.isfinite(value)}
        self._points = {}
        self.log(known, int(record["round"]) + 1)


class TensorBoard(_Tracker):
    """Event files in a folder of their own."""

    def __init__(self, folder: Path | str) -> None:
        super().__init__()
        require("tensorboard", "qv.TensorBoard")
        if Path(folder).is_dir() and any(Path(folder).glob("*tfevents*")):
            raise QuiverError(f"{folder} holds event files already: choose another folder.")
        self._folder = str(folder)
        self._writer: Any = None

    def log(self, points: Points, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(self._folder, filename_suffix=".quiver")
        values = [Summary.Value(tag=name, simple_value=number) for name, number in points.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB(_Tracker):
    """A run of Weights & Biases; `options` are those of wandb.init, such as name and config."""

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        require("wandb", "qv.WandB")
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
        require("mlflow", "qv.MLflow")
        self._experiment, self._uri, self._params = experiment, tracking_uri, params
        self._client: Any = None
        self._run_id = ""

    def _start(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        known = self._client.get_experiment_by_name(self._experiment)
        number = (
            self._client.create_experiment(self._experiment)
            if known is None
            else known.experiment_id
        )
        self._run_id = self._client.create_run(number).info.run_id
        for name, value in self._params.items():
            self._client.log_param(self._run_id, name, value)

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
