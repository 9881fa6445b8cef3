"""What the runs below a folder are doing: `quiver ls`, `quiver show` and `quiver watch`.

Everything comes from their files. A run that is under way is never locked or disturbed.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import pandas as pd

from quiverfl.errors import QuiverError
from quiverfl.results.run_files import RunResult, is_run, read_json, read_run
from quiverfl.results.summary import STAGES, headline_metric, mean_by_round
from quiverfl.support import locks

State: TypeAlias = Literal["running", "finished", "interrupted", "diverged", "failed"]
STATES: tuple[State, ...] = ("running", "finished", "interrupted", "diverged", "failed")
SILENT_SECONDS = 600.0
"""After so long without a new line a run on another machine counts as interrupted."""


@dataclass(frozen=True)
class RunState:
    """One run, or a cell of a sweep that failed before it had one."""

    path: Path
    name: str
    """Its folder, as seen from where the search began."""
    state: State
    error: str = ""
    """Why it failed or diverged."""
    run: RunResult | None = None

    @property
    def metric(self) -> str:
        return (
            ""
            if self.run is None or not len(self.run.history)
            else headline_metric(self.run.history)
        )

    @property
    def seconds(self) -> float:
        """What its rounds took."""
        if self.run is None or "seconds" not in self.run.rounds:
            return 0.0
        return float(pd.to_numeric(self.run.rounds["seconds"], errors="coerce").sum())

    @property
    def seconds_left(self) -> float | None:
        """For the rounds that it still has, as long as those it had; None if nobody knows."""
        if self.run is None or self.state != "running" or not self.run.done_rounds:
            return None
        left = (self.run.planned_rounds or 0) - self.run.done_rounds
        return max(0, left) * self.seconds / self.run.done_rounds

    def score(self, stage: str) -> float | None:
        """The last mean over clients at a stage."""
        if self.run is None or not self.metric:
            return None
        means = mean_by_round(self.run.values(stage, self.metric))
        return float(means.iloc[-1]) if len(means) else None

    def as_dict(self) -> dict[str, object]:
        """For `--json`."""
        run = self.run
        return {
            "folder": str(self.path),
            "state": self.state,
            "method": None if run is None else run.method,
            "seed": None if run is None else run.seed,
            "rounds": 0 if run is None else run.done_rounds,
            "of": None if run is None else run.planned_rounds,
            "metric": self.metric or None,
            **{stage: self.score(stage) for stage in STAGES},
            "seconds": self.seconds,
            "seconds_left": self.seconds_left,
            "error": self.error,
        }


class RunFinder:
    """Reads the runs below a folder; a run whose files are as they were is not read again."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise QuiverError(f"{root} is not a folder: name one with runs in it, such as runs.")
        self.root = root
        self._read: dict[Path, tuple[object, RunResult]] = {}

    def read(self) -> list[RunState]:
        """Every run, in the order of their names; then cells that failed without one."""
        folders = sorted(_list_runs(self.root))
        runs = [self._read_state(folder) for folder in folders]
        known = {folder.name for folder in folders}
        return [*runs, *(one for one in _list_failures(self.root) if one.path.name not in known)]

    def version(self) -> str:
        """Another one once any file of a run has changed."""
        stamps = [str(_stamp(folder)) for folder in sorted(_list_runs(self.root))]
        return str(hash((*stamps, len(list(_failure_files(self.root))))))

    def _read_state(self, folder: Path) -> RunState:
        name = str(folder.relative_to(self.root)) if folder != self.root else folder.name
        try:
            stamp = _stamp(folder)
            if folder not in self._read or self._read[folder][0] != stamp:
                self._read[folder] = stamp, read_run(folder)
            run = self._read[folder][1]
        except QuiverError as error:  # of a damaged file: the others are shown all the same
            return RunState(folder, name, "failed", str(error))
        return RunState(folder, name, find_state(run), _read_error(folder), run)


def find_state(run: RunResult) -> State:
    if run.finished:
        return "finished"
    if run.diverged is not None:
        return "diverged"
    return "running" if _is_written(run.path) else "interrupted"


def _is_written(folder: Path) -> bool:
    """Whether a process is at work there, as its lock says; the lock itself is not touched."""
    try:
        holder = json.loads((folder / locks.NAME).read_text())
        process, host = int(holder["pid"]), holder["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return time.time() - _newest(folder) < SILENT_SECONDS
    return locks.is_alive(process)


def _newest(folder: Path) -> float:
    times = [path.stat().st_mtime for path in folder.iterdir() if path.is_file()]
    return max(times, default=0.0)


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What tells whether a run's files have changed; a lock comes and goes with its process."""
    names = ("config.json", "history.jsonl", "rounds.jsonl", "summary.json", locks.NAME)
    stamps = []
    for name in names:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        stamps.append((name, status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def _list_runs(folder: Path) -> Iterator[Path]:
    if is_run(folder) and _is_ours(folder):
        yield folder
        return
    try:
        children = list(folder.iterdir())
    except OSError:  # removed in the meantime, or somebody else's
        return
    for child in children:
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from _list_runs(child)


def _is_ours(folder: Path) -> bool:
    """Other programs write a config.json, too."""
    try:
        return "quiver" in read_json(folder / "config.json")
    except QuiverError:  # of a run, which is then shown as damaged
        return (folder / "partition.npz").exists() or (folder / "rounds.jsonl").exists()


def _read_error(folder: Path) -> str:
    """Why it diverged, as the run says; or why its cell failed, as the sweep says."""
    for path in (
        folder / "summary.json",
        folder.parent.parent / "failures" / f"{folder.name}.json",
    ):
        try:
            return str(read_json(path).get("error", ""))
        except QuiverError:
            continue
    return ""


def _failure_files(root: Path) -> Iterator[Path]:
    yield from sorted(root.rglob("failures/*.json"))


def _list_failures(root: Path) -> Iterator[RunState]:
    for path in _failure_files(root):
        try:
            written = read_json(path)
        except QuiverError:
            continue
        folder = path.parent.parent / "cells" / path.stem
        name = str(folder.relative_to(root))
        yield RunState(folder, name, "failed", str(written.get("error", "")))


def count_states(runs: Sequence[RunState]) -> dict[State, int]:
    counts = {state: sum(one.state == state for one in runs) for state in STATES}
    return {state: count for state, count in counts.items() if count}
