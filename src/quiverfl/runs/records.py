"""history.jsonl and rounds.jsonl of a run folder: one line per evaluation, one per round."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.engine.history import History, Record, Recorder
from quiverfl.engine.settings import RunSettings, is_evaluated
from quiverfl.errors import QuiverError
from quiverfl.results.run_files import read_evaluation, read_lines
from quiverfl.types import Metrics

Writing = Callable[[], AbstractContextManager[None]]
"""A context for writing: it explains what the disk refuses."""


@contextmanager
def append_records(folder: Path, writing: Writing, other: Recorder | None) -> Iterator[Recorder]:
    """Give a recorder that appends to both files, and forwards to `other`."""
    # Unbuffered: closing a file does not retry what the disk refused.
    with (
        (folder / "history.jsonl").open("ab", buffering=0) as history,
        (folder / "rounds.jsonl").open("ab", buffering=0) as rounds,
    ):
        yield _Appender(history, rounds, writing, other)


class _Appender:
    def __init__(
        self, history: RawIOBase, rounds: RawIOBase, writing: Writing, other: Recorder | None
    ) -> None:
        self._history, self._rounds, self._writing, self._other = history, rounds, writing, other

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        values = {
            name: [_null_if_nan(value) for value in column.tolist()]
            for name, column in metrics.items()
        }
        self._append(self._history, {"round": round, "stage": stage, "metrics": values})
        if self._other is not None:
            self._other.on_evaluation(round, stage, metrics)

    def on_round_end(self, record: Record) -> None:
        self._append(self._rounds, record)
        if self._other is not None:
            self._other.on_round_end(record)

    def _append(self, file: RawIOBase, line: Mapping[str, Any]) -> None:
        rest = memoryview(to_line(line))
        with self._writing():
            while rest:  # a disk that is almost full takes a part
                rest = rest[file.write(rest) :]


def to_line(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, separators=(",", ":")) + "\n").encode()


def make_history(
    evaluations: Iterable[Mapping[str, Any]], rounds: Iterable[dict[str, Any]]
) -> History:
    """Make the history that the lines record."""
    history = History()
    for line in evaluations:
        history.on_evaluation(*read_evaluation(line))
    for record in rounds:
        history.on_round_end(record)
    return history


def _null_if_nan(value: float) -> float | None:
    """JSON has no NaN."""
    return value if np.isfinite(value) else None


def read_records(folder: Path, round: int) -> dict[str, list[dict[str, Any]]]:
    """Read the lines of both files before a round."""
    return {
        name: [line for line in read_lines(folder / f"{name}.jsonl") if line["round"] < round]
        for name in ("history", "rounds")
    }


def check_records(folder: Path, round: int, settings: RunSettings) -> None:
    """Refuse files with a gap before a round: every line is written before its checkpoint."""
    evaluated = (
        t for t in range(round) if is_evaluated(t, settings.evaluate_every, settings.rounds)
    )
    expected = {"rounds": set(range(round)), "history": set(evaluated)}
    for name, lines in read_records(folder, round).items():
        missing = expected[name] - {line["round"] for line in lines}
        if missing:
            raise QuiverError(
                f"{folder / name}.jsonl lacks round {min(missing) + 1}, which was recorded before "
                f"the checkpoint after round {round}: the file was damaged. Put it back, or delete "
                "the folder and run it again."
            )
