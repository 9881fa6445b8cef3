"""The history of a run: evaluations per client and one record per round. Append-only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quiverfl.errors import CallbackFailed, QuiverError
from quiverfl.results.summary import (
    condense_metrics,
    condense_record,
    history_frame,
    rounds_frame,
)
from quiverfl.types import Metrics

if TYPE_CHECKING:
    import pandas as pd


Record = dict[str, Any]
"""A round: seconds, bytes, steps, range of μ, consensus distance."""


class Recorder(Protocol):
    """Receives every evaluation and every round's record as they happen."""

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None: ...
    def on_round_end(self, record: Record) -> None: ...


@dataclass(eq=False)
class History:
    """Everything recorded so far, in memory."""

    evaluations: list[tuple[int, str, Metrics]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        self.evaluations.append((round, stage, metrics))

    def on_round_end(self, record: Record) -> None:
        self.records.append(record)

    def copy(self) -> History:
        """A copy; later records do not appear in it."""
        return History(list(self.evaluations), list(self.records))

    def frame(self) -> pd.DataFrame:
        """round, stage, client, and a column per metric."""
        return history_frame(self.evaluations)

    def rounds(self) -> pd.DataFrame:
        """One row per round; what is recorded per client is summed."""
        return rounds_frame(self.records)


class Clock:
    """Measures the seconds of a round, by what they were spent on."""

    def __init__(self) -> None:
        self._laps: dict[str, float] = {}
        self._begin = self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def record(self) -> dict[str, float]:
        return {"seconds": self._last - self._begin, **self._laps}


# These receive the events of a run: the history, a run folder, and any callbacks.


class Callback:
    """Watches a run, and may end it. Override what you need.

    Rounds count from 0. `metrics` has one number per client for each metric, NaN for a client
    without test data; it is the run's own: look, and change nothing.
    """

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        """Called after local training (`stage` "local") and after communication ("mixed")."""

    def on_round_end(self, record: Record) -> None:
        """Called after every round; `record` has its number, seconds, bytes and steps."""

    def should_stop(self) -> bool:
        """Called after every round but the last. True ends the run, which is returned as it is."""
        return False

    def close(self) -> None:
        """Called when the run is over, however it ended."""


OLD_CALLBACK_NAMES = {
    "evaluated": "on_evaluation",
    "finished": "on_round_end",
    "enough": "should_stop",
}
"""Names of a callback's functions before version 0.3."""


class Recorders:
    """Passes every event to all recorders and callbacks; an error names its callback."""

    def __init__(
        self,
        recorders: Sequence[Recorder],
        callbacks: Sequence[Recorder],
        most: int | None = None,
    ) -> None:
        """Numbers of more than `most` clients are condensed for recorders, never for callbacks."""
        self._recorders, self._callbacks = recorders, check_callbacks(callbacks)
        self._most = most

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        kept = metrics if self._most is None else condense_metrics(metrics, self._most)
        for recorder in self._recorders:
            recorder.on_evaluation(round, stage, kept)
        for callback in self._callbacks:
            with _name_failing_callback(callback):
                callback.on_evaluation(round, stage, metrics)

    def on_round_end(self, record: Record) -> None:
        kept = record if self._most is None else condense_record(record, self._most)
        for recorder in self._recorders:
            recorder.on_round_end(kept)
        for callback in self._callbacks:
            with _name_failing_callback(callback):
                callback.on_round_end(record)

    def should_stop(self) -> bool:
        """Whether a callback wants the run to end. Every callback is asked: each may keep count."""
        answers = []
        for callback in self._callbacks:
            with _name_failing_callback(callback):
                answers.append(bool(_optional(callback, "should_stop")))
        return any(answers)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Every callback is closed at the end, also after an error, also if another one fails."""
        try:
            yield
        except BaseException:
            for callback in self._callbacks:
                try:
                    _optional(callback, "close")
                except Exception as second:  # the first error is the one to report
                    del second
            raise
        for callback in self._callbacks:
            with _name_failing_callback(callback):
                _optional(callback, "close")


def check_callbacks(callbacks: Any) -> list[Recorder]:
    """Refuse what is no list of callbacks. Returns them as a list."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        raise QuiverError(
            f"callbacks is one {type(callbacks).__name__}: give a list of callbacks, such as "
            "callbacks=[qv.EarlyStopping()]."
        )
    listed = list(callbacks)
    for callback in listed:
        _check(callback)
    return listed


def _check(callback: Any) -> None:
    if isinstance(callback, type):
        raise QuiverError(
            f"callback {callback.__name__} is a class: give an object, {callback.__name__}(…)."
        )
    for old, new in OLD_CALLBACK_NAMES.items():
        if callable(getattr(callback, old, None)):
            raise QuiverError(
                f"callback {callback!r} has a function {old!r}, which is now called {new!r}: "
                "rename it."
            )
    for name in ("on_evaluation", "on_round_end"):
        if not callable(getattr(callback, name, None)):
            raise QuiverError(
                f"callback {callback!r} has no function {name!r}: inherit qv.Callback, which has "
                "on_evaluation(round, stage, metrics) and on_round_end(record), and override one."
            )


def _optional(callback: Any, name: str) -> Any:
    function = getattr(callback, name, None)
    return None if function is None else function()


@contextmanager
def _name_failing_callback(callback: object) -> Iterator[None]:
    try:
        yield
    except QuiverError:
        raise
    except Exception as error:
        raise CallbackFailed(type(callback).__name__, error) from error
