"""Ending a run when it does not get better."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from quiverfl.engine.history import Metrics
from quiverfl.engine.recorders import Callback
from quiverfl.errors import QuiverError, nearest
from quiverfl.results.summary import higher_is_better

Stage = Literal["local", "mixed"]


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
        if isinstance(self.patience, bool) or not isinstance(self.patience, int):
            raise QuiverError(
                f"EarlyStopping: patience = {self.patience!r}: it must be a whole number."
            )
        if self.patience < 1:
            raise QuiverError(f"EarlyStopping: patience = {self.patience}: it must be at least 1.")
        if self.stage not in get_args(Stage):
            known = nearest(str(self.stage), get_args(Stage))
            raise QuiverError(f"EarlyStopping: stage = {self.stage!r}: {known}")
        if not self.margin >= 0:
            raise QuiverError(f"EarlyStopping: margin = {self.margin!r}: it must be 0 or more.")

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        if stage != self.stage:
            return
        if self.metric not in metrics:
            raise QuiverError(
                f"EarlyStopping: no metric {self.metric!r}; {nearest(self.metric, metrics)}"
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

    def enough(self) -> bool:
        return self._waited >= self.patience
