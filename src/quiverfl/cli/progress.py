"""How a run is shown while it goes: a bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from quiverfl.engine.history import Metrics, Record, Recorder

SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def progress(label: str, rounds: int, quiet: bool) -> Iterator[Recorder | None]:
    console = Console(stderr=True)
    if quiet:
        yield None
    elif console.is_terminal:
        columns = (
            TextColumn("[bold]{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as display:
            yield _Bar(display, label, rounds)
    else:
        yield _Lines(console, label, rounds)


class _Scores:
    """The newest mean over clients at each stage, in words."""

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}

    def see(self, stage: str, metrics: Metrics) -> None:
        name = "accuracy" if "accuracy" in metrics else "loss"
        with np.errstate(all="ignore"):
            values = metrics[name][~np.isnan(metrics[name])]
        if len(values):
            self._latest[stage] = f"{name} {values.mean():.4f} ({stage})"

    def __str__(self) -> str:
        return ", ".join(self._latest.values())


class _Bar:
    def __init__(self, display: Progress, label: str, rounds: int) -> None:
        self._display, self._scores = display, _Scores()
        self._task = display.add_task(escape(label), total=rounds, score="")

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        self._scores.see(stage, metrics)

    def finished(self, record: Record) -> None:
        done = int(record["round"]) + 1
        self._display.update(self._task, completed=done, score=str(self._scores))


class _Lines:
    def __init__(self, console: Console, label: str, rounds: int) -> None:
        self._console, self._label, self._rounds = console, label, rounds
        self._scores = _Scores()
        self._start = self._last = time.monotonic()
        self._first: int | None = None

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        self._scores.see(stage, metrics)

    def finished(self, record: Record) -> None:
        done, now = int(record["round"]) + 1, time.monotonic()
        self._first = done if self._first is None else self._first
        if now - self._last < SECONDS_BETWEEN_LINES and done != self._rounds:
            return
        self._last = now
        pace = (now - self._start) / (done - self._first + 1)
        left = f", {pace * (self._rounds - done):.0f} s left" if done < self._rounds else ""
        self._console.print(
            f"{self._label}: round {done}/{self._rounds}, {self._scores}{left}",
            markup=False,
            highlight=False,
        )
