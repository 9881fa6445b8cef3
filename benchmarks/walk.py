"""How far a reader has to walk: the files and functions that one round enters.

    python -m benchmarks.walk

carries out `quiver run` on the quick start for two rounds, writes down every call into the package
and prints, for each round, how many files and functions it enters and how often the next call is
into another file. A test holds these numbers (tests/engine/test_walk.py).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import quiverfl
from quiverfl.runs.config_files import load_config
from quiverfl.runs.experiment import run_in_folder

PACKAGE = str(Path(quiverfl.__file__).parent) + os.sep
ROUNDS = 2
LOOP = ("engine/rounds.py", "run_rounds")
FIRST = ("engine/shard.py", "Shard.train")
"""The first thing a round does."""

Call = tuple[str, str]
"""File, below the package, and qualified name of a function that was called."""


class Walk(NamedTuple):
    """What one round entered."""

    calls: int
    functions: int
    files: tuple[str, ...]
    changes: int
    """How often a call was into another file than the call before."""

    @classmethod
    def of(cls, calls: list[Call]) -> Walk:
        files = [file for file, _ in calls]
        changes = sum(one != other for one, other in pairwise(files))
        return cls(len(calls), len(set(calls)), tuple(sorted(set(files))), changes)


class CallRecorder:
    """Writes down the calls of every round, while the round loop is at work."""

    def __init__(self) -> None:
        self.rounds: list[list[Call]] = []
        self._looping = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        call = (code.co_filename.removeprefix(PACKAGE), code.co_qualname)
        if call == LOOP:
            self._looping = event == "call"
        elif self._looping and event == "call" and "<" not in code.co_name:
            if call == FIRST:
                self.rounds.append([])
            if self.rounds:
                self.rounds[-1].append(call)


@contextmanager
def recording_calls() -> Iterator[CallRecorder]:
    recorder = CallRecorder()
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(None)


def trace_rounds(config: str = "quickstart", *settings: str) -> list[Walk]:
    """One walk per round."""
    parsed = load_config(Path(config), [f"run.rounds={ROUNDS}", "run.threads=1", *settings])
    with tempfile.TemporaryDirectory() as folder, recording_calls() as recorder:
        run_in_folder(parsed, Path(folder) / "run")
    return [Walk.of(calls) for calls in recorder.rounds]


def main() -> None:
    for number, walk in enumerate(trace_rounds()):
        print(
            f"round {number}: {len(walk.files)} files, {walk.changes} changes of file, "
            f"{walk.functions} functions, {walk.calls} calls"
        )
        print("   " + " ".join(walk.files))


if __name__ == "__main__":
    main()
