"""The lines that a run appends to its folder: one per evaluation, one per round."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.engine.history import History, Metrics, Record, Recorder
from quiverfl.results.run_files import evaluation

Writing = Callable[[], AbstractContextManager[None]]
"""What writing happens in: it puts what the disk refuses into words."""


@contextmanager
def appending(folder: Path, writing: Writing, other: Recorder | None) -> Iterator[Recorder]:
    """A recorder that writes to history.jsonl and rounds.jsonl and tells another one, too."""
    # Unbuffered: what the disk refuses is not tried again when the file is closed.
    with (
        (folder / "history.jsonl").open("ab", buffering=0) as history,
        (folder / "rounds.jsonl").open("ab", buffering=0) as rounds,
    ):
        yield _Appending(history, rounds, writing, other)


class _Appending:
    def __init__(
        self, history: RawIOBase, rounds: RawIOBase, writing: Writing, other: Recorder | None
    ) -> None:
        self._history, self._rounds, self._writing, self._other = history, rounds, writing, other

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        values = {name: [_null(v) for v in column.tolist()] for name, column in metrics.items()}
        self._append(self._history, {"round": round, "stage": stage, "metrics": values})
        if self._other is not None:
            self._other.evaluated(round, stage, metrics)

    def finished(self, record: Record) -> None:
        self._append(self._rounds, record)
        if self._other is not None:
            self._other.finished(record)

    def _append(self, file: RawIOBase, line: Mapping[str, Any]) -> None:
        left = memoryview(as_line(line))
        with self._writing():
            while left:  # a disk that is almost full takes a part
                left = left[file.write(left) :]


def as_line(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, separators=(",", ":")) + "\n").encode()


def history_from(
    evaluations: Iterable[Mapping[str, Any]], rounds: Iterable[dict[str, Any]]
) -> History:
    """What the lines say, as it was recorded."""
    history = History()
    for line in evaluations:
        history.evaluated(*evaluation(line))
    for record in rounds:
        history.finished(record)
    return history


def _null(value: float) -> float | None:
    """JSON has no NaN."""
    return value if np.isfinite(value) else None
