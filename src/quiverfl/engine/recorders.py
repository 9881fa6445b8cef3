"""Who is told about a run as it goes: the history, a run folder, and any callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quiverfl.engine.history import Metrics, Record, Recorder
from quiverfl.errors import CallbackFailed, QuiverError


class Callback:
    """Something that watches a run, and may end it. Override what is needed.

    Rounds count from 0. `metrics` has one number per client for each metric, NaN for a client
    without test data; it is the run's own: look, and change nothing.
    """

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        """After local training ("local") and after communication ("mixed")."""

    def finished(self, record: Record) -> None:
        """After every round: its number, seconds, bytes, steps."""

    def enough(self) -> bool:
        """Asked after every round but the last: true ends the run, which is returned as it is."""
        return False

    def close(self) -> None:
        """The run is over, however it ended."""


class Recorders:
    """Tells every recorder in turn; what a callback raises is named after it."""

    def __init__(self, recorders: Sequence[Recorder], callbacks: Sequence[Recorder]) -> None:
        for callback in callbacks:
            _check(callback)
        self._recorders, self._callbacks = recorders, callbacks

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        for recorder in self._recorders:
            recorder.evaluated(round, stage, metrics)
        for callback in self._callbacks:
            with _named(callback):
                callback.evaluated(round, stage, metrics)

    def finished(self, record: Record) -> None:
        for recorder in self._recorders:
            recorder.finished(record)
        for callback in self._callbacks:
            with _named(callback):
                callback.finished(record)

    def enough(self) -> bool:
        """Whether a callback wants the run to end. All are asked: each may keep count."""
        answers = []
        for callback in self._callbacks:
            with _named(callback):
                answers.append(bool(_optional(callback, "enough")))
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
                except Exception as second:  # the first error is the one to be told
                    del second
            raise
        for callback in self._callbacks:
            with _named(callback):
                _optional(callback, "close")


def _check(callback: Any) -> None:
    if isinstance(callback, type):
        raise QuiverError(
            f"callback {callback.__name__} is a class: give an object, {callback.__name__}(…)."
        )
    for name in ("evaluated", "finished"):
        if not callable(getattr(callback, name, None)):
            raise QuiverError(
                f"callback {callback!r} has no function {name!r}: inherit qv.Callback, which has "
                "evaluated(round, stage, metrics) and finished(record), and override one."
            )


def _optional(callback: Any, name: str) -> Any:
    function = getattr(callback, name, None)
    return None if function is None else function()


@contextmanager
def _named(callback: object) -> Iterator[None]:
    try:
        yield
    except QuiverError:
        raise
    except Exception as error:
        raise CallbackFailed(type(callback).__name__, error) from error
