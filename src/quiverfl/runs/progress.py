"""Progress of a run while it goes: a bar on a terminal or in a notebook, plain lines elsewhere,
or nothing."""

from __future__ import annotations

import contextlib
import html
import time
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from quiverfl.engine.history import Record, Recorder
from quiverfl.types import Metrics

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_UPDATES = 0.2
WIDTH_FOR_A_BAR = 120


@contextlib.contextmanager
def progress(label: str, rounds: int, quiet: bool) -> Iterator[Recorder | None]:
    console = Console(emoji=False, stderr=True)
    if quiet:
        yield None
    elif console.is_jupyter:
        yield _Notebook(label, rounds)
    elif console.is_terminal:
        with Progress(*_columns(console.width), console=console) as display:
            yield _Bar(display, label, rounds)
    else:
        yield _Lines(console, label, rounds)


def _columns(width: int) -> list[ProgressColumn]:
    """Rounds and times first, whole at any width; the score takes what is left, a bar if much."""
    bar: list[ProgressColumn] = [BarColumn()] if width >= WIDTH_FOR_A_BAR else []
    return [
        *bar,
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("[bold]{task.description:<10}", table_column=Column(no_wrap=True)),
        _ScoreColumn(),
    ]


class _ScoreColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["score"]), no_wrap=True, overflow="ellipsis")


class _Scores:
    """The newest mean over clients at each stage, in words."""

    def __init__(self) -> None:
        self._name = ""
        self._latest: dict[str, float] = {}

    def update(self, stage: str, metrics: Metrics) -> None:
        self._name = next(iter(metrics))  # the first is what results are judged by
        with np.errstate(all="ignore"):
            values = metrics[self._name][~np.isnan(metrics[self._name])]
        if len(values):
            self._latest[stage] = float(values.mean())

    def __str__(self) -> str:
        return f"{self._name} " + ", ".join(f"{v:.4f} {s}" for s, v in self._latest.items())


class _Bar:
    def __init__(self, display: Progress, label: str, rounds: int) -> None:
        self._display, self._scores = display, _Scores()
        self._task = display.add_task(escape(label), total=rounds, score="")

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        self._scores.update(stage, metrics)

    def on_round_end(self, record: Record) -> None:
        done = int(record["round"]) + 1
        self._display.update(self._task, completed=done, score=str(self._scores))


class _Notebook:
    """One output of the cell, replaced as the run goes; it needs no widgets."""

    def __init__(self, label: str, rounds: int) -> None:
        from IPython.display import display

        self._label, self._rounds, self._scores = label, rounds, _Scores()
        self._start = self._last = time.monotonic()
        self._handle = display({"text/html": self._bar(0)}, raw=True, display_id=True)

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        self._scores.update(stage, metrics)

    def on_round_end(self, record: Record) -> None:
        done, now = int(record["round"]) + 1, time.monotonic()
        if now - self._last < SECONDS_BETWEEN_UPDATES and done != self._rounds:
            return
        self._last = now
        if self._handle is not None:
            self._handle.update({"text/html": self._bar(done)}, raw=True)

    def _bar(self, done: int) -> str:
        words = html.escape(f"{self._label}: round {done}/{self._rounds}")
        scores = html.escape(str(self._scores))
        seconds = time.monotonic() - self._start
        return (
            f'{words} <progress value="{done}" max="{self._rounds}"></progress> '
            f"{seconds:.0f} s, {scores}"
        )


class _Lines:
    def __init__(self, console: Console, label: str, rounds: int) -> None:
        self._console, self._label, self._rounds = console, label, rounds
        self._scores = _Scores()
        self._start = self._last = time.monotonic()
        self._first: int | None = None

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        self._scores.update(stage, metrics)

    def on_round_end(self, record: Record) -> None:
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
