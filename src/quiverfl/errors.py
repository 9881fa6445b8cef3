"""What Quiver says when something cannot be done: the thing, the value, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class QuiverError(Exception):
    """A mistake a person can act on; the command line prints it without a traceback."""


class QuiverWarning(UserWarning):
    """Something a person should know, though it stops nothing; the command line prints a line."""


class CannotWrite(QuiverError):
    """The disk did not take what was to be written in `place`, for this `reason`."""

    place: object = ""
    reason: str = ""

    @classmethod
    def of(cls, place: object, reason: str, again: str) -> CannotWrite:
        """Add how to continue, in the words of the caller."""
        error = cls(
            f"{place} cannot be written: {reason}. Nothing is lost: make room or make it writable, "
            f"then {again}."
        )
        error.place, error.reason = place, reason
        return error


class Stopped(QuiverError):
    """Asked to stop, after this many complete rounds; everything up to there is in a checkpoint."""

    run: Any = None

    def __init__(self, rounds: int) -> None:
        super().__init__(f"stopped after round {rounds}.")
        self.rounds = rounds


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a simulation; `run` has what there was, the sentence says how to continue."""

    def __init__(self, run: Any, sentence: str) -> None:
        super().__init__(sentence)
        self.run = run


class CallbackFailed(QuiverError):
    """A callback of your own raised; `run` has what there was."""

    run: Any = None

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"callback {name} failed: {type(error).__name__}: {error}. The error's `run` has "
            "everything up to there."
        )


class Diverged(QuiverError):
    """Training produced a number that is not finite; `run` has what there was before.

    `round` is counted as in the files, from 0; the sentence counts from 1.
    """

    run: Any = None

    def __init__(self, round: int, client: int, where: str) -> None:
        super().__init__(
            f"round {round + 1}, client {client}: {where} is not finite; training diverged. "
            "Lower training.lr, set or lower training.clip_norm (10 is common) or, for push-sum on "
            "sparse graphs, method.step_floor or method.step. What was recorded before this round "
            "is kept."
        )
        self.round = round
        self.client = client
        self.where = where


def say_leave_out(key: str) -> str:
    """How a key of a configuration is taken out where it does not fit another choice."""
    return f'Leave it out (`--set {key}=`; in a case of a sweep: without = ["{key}"]).'


def suggest(word: object, known: Iterable[str]) -> str:
    """`did you mean …?` for an unknown word, with everything known behind it.

    It continues a sentence, after a semicolon or a colon. Small and capital letters are alike.
    """
    names = sorted(filter(None, known))
    if not names:
        return "there are none."
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(str(word).lower(), sorted(by_lower), n=1, cutoff=0.6)
    guess = f"did you mean {by_lower[close[0]]!r}? Known" if close else "known"
    return f"{guess} are {', '.join(names)}."
