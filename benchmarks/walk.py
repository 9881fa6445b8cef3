"""How far a reader has to walk: the files and functions that a round and a share enter.

    python -m benchmarks.walk

carries out `quiver run` on the quick start for two rounds, writes down every call into the package
and prints, for each round, how many files and functions it enters and how often the next call is
into another file. Then two sync peers exchange a share each, over gRPC in this process. What is
counted is the code of `peer/` from the moment both have trained until both shares are absorbed and
acknowledged. Tests hold these numbers (tests/engine/test_walk.py, tests/peer/test_walk.py).
"""

from __future__ import annotations

import asyncio
import dis
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import quiverfl
from quiverfl.peer.api import Peer
from quiverfl.peer.demo import make_swarm
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
        call = _name_call(frame)
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


class ShareRecorder:
    """Writes down the calls into `peer/` while two peers exchange their shares of a round.

    What a peer does in its rounds counts from its push to the end of its merge, what its links and
    its store do until both peers have merged and both know that their share has arrived.
    """

    PUSH, ABSORB = ("peer/rounds.py", "_push"), ("peer/node.py", "Node.absorb")
    ACKNOWLEDGED = ("peer/link/link.py", "Sender._conclude")

    def __init__(self, round: int) -> None:
        self.calls: list[Call] = []
        self._round, self._begun, self._acknowledged = round, False, 0
        self._merged: set[int] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        call = _name_call(frame)
        if call == self.PUSH and frame.f_locals["t"] == self._round:
            self._begun = True
        if not self._begun or (len(self._merged) == 2 and self._acknowledged >= 2):
            return
        if event == "call":
            name, argument = _instruction(frame)
            goes_on = name == "RESUME" and argument > 0  # a coroutine, counted when it began
            named = call[0].startswith("peer/") and "<" not in code.co_name
            if named and not goes_on and self._concerns_share(frame):
                self.calls.append(call)
        elif _instruction(frame)[0] == "RETURN_VALUE":  # not a coroutine that only waits
            self._acknowledged += call == self.ACKNOWLEDGED
            if call == self.ABSORB:
                self._merged.add(id(frame.f_locals["self"]))

    def _concerns_share(self, frame: FrameType) -> bool:
        """Whether a call of a peer's own rounds comes between its push and the end of its merge."""
        caller: FrameType | None = frame
        while caller is not None:
            call = _name_call(caller)
            if call == ("peer/rounds.py", "_run_round"):
                mine = caller.f_locals["t"] == self._round
                return mine and id(caller.f_locals["node"]) not in self._merged
            if call == ("peer/rounds.py", "run_rounds"):
                return False
            caller = caller.f_back
        return True


def _name_call(frame: FrameType) -> Call:
    return frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_qualname


def _instruction(frame: FrameType) -> tuple[str, int]:
    """The instruction at which a frame stands, and its argument."""
    code, at = frame.f_code.co_code, max(0, frame.f_lasti)
    return dis.opname[code[at]], code[at + 1]


def trace_share(round: int = 1) -> Walk:
    """The way of the shares of a round between two peers: trained, pushed, absorbed, known."""
    recorder = ShareRecorder(round)

    async def run_peers(folders: list[Path]) -> list[Any]:
        return await asyncio.gather(*(Peer.open(folder).run() for folder in folders))

    with tempfile.TemporaryDirectory() as root:
        folders = [one.path for one in make_swarm(Path(root) / "swarm", 2, 3, "sync").values()]
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        try:
            outcomes = asyncio.run(run_peers(folders))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert all(outcome.finished for outcome in outcomes), outcomes
    return Walk.of(recorder.calls)


def main() -> None:
    for number, walk in enumerate(trace_rounds()):
        print(
            f"round {number}: {len(walk.files)} files, {walk.changes} changes of file, "
            f"{walk.functions} functions, {walk.calls} calls"
        )
        print("   " + " ".join(walk.files))
    share = trace_share()
    print(f"share: {len(share.files)} files, {share.functions} functions of peer/")
    print("   " + " ".join(share.files))


if __name__ == "__main__":
    main()
