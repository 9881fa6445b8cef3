"""What one peer records of its run: a run folder like a simulation's, `run` in the peer's folder.

Lines are those of a simulation, with the numbers of this client in its place and none for the
others; `quiver report` puts several peers together, and beside their simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.engine.history import Metrics, Recorder
from quiverfl.errors import CannotWrite
from quiverfl.methods.optional import adaptation
from quiverfl.methods.options import options_of
from quiverfl.peer.files import StoreError
from quiverfl.peer.peer_folder import PeerFolder
from quiverfl.peer.setup import PeerParts
from quiverfl.results.run_files import read_lines, read_run
from quiverfl.results.summary import summarize
from quiverfl.run_folder import RunFolder

RUN_FOLDER = "run"
SECONDS = ("seconds", "train_seconds", "evaluate_seconds", "mix_seconds")


class PeerRun:
    """Told of every round by the peer's node, and of the end."""

    def __init__(self, folder: PeerFolder, parts: PeerParts) -> None:
        self._parts, self._peer = parts, folder
        self._folder = RunFolder(folder.path / RUN_FOLDER)
        self._clients, self._number = len(folder.roster.members), folder.number
        self._recorder: Recorder | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        member = {
            "name": self._peer.own.name,
            "number": self._number,
            "run": self._peer.roster.run,
            "mode": self._peer.peers.mode,
        }
        parts = self._parts
        try:
            self._folder.path.mkdir(mode=0o700, exist_ok=True)
            with self._folder.alone():
                self._folder.open_member(
                    parts.config, parts.partition, parts.topology, parts.method, member
                )
                with self._folder.recording(None) as self._recorder:
                    yield
        except CannotWrite as problem:
            raise StoreError(str(problem)) from problem

    def record(self, line: Mapping[str, Any]) -> None:
        """A round as the node tells it."""
        assert self._recorder is not None
        round = int(line["round"])
        for stage in ("local", "mixed"):
            if line.get(stage):
                self._recorder.evaluated(round, stage, self._metrics(line[stage]))
        sent, received = int(line["sent_bytes"]), int(line["received_bytes"])
        self._recorder.finished(
            {
                "round": round,
                **{name: line[name] for name in SECONDS if name in line},
                "sent_bytes": self._placed(sent),
                "received_bytes": self._placed(received),
                "busiest_bytes": sent + received,
                "network_bytes": sent,
                "active": line["active"],
                "steps": self._placed(line.get("steps", 0)),
                "mu_min": line["mass"],
                "mu_max": line["mass"],
                **self._private(line),
            }
        )

    def _private(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return {"epsilon": self._placed(line["epsilon"])} if "epsilon" in line else {}

    def _placed(self, value: float) -> list[float]:
        """This client's number among those of all, of which nothing is known."""
        return [value if client == self._number else 0 for client in range(self._clients)]

    def _metrics(self, values: Mapping[str, float]) -> Metrics:
        found: Metrics = {}
        for name, value in values.items():
            found[name] = np.full(self._clients, np.nan)
            found[name][self._number] = value
        return found

    def close(self) -> None:
        """All rounds are over: the summary says so."""
        parts, seen = self._parts, read_run(self._folder.path)
        method = {"name": parts.method.name, **options_of(parts.method)}
        summary = {"method": method, **summarize(seen.history, seen.rounds)}
        self._folder.close(summary, adaptation(parts.method, parts.task))


def scores_of(folder: Path, metric: str, stage: str = "mixed") -> dict[int, float]:
    """By round, what a peer has recorded of itself."""
    found: dict[int, float] = {}
    for line in read_lines(folder / RUN_FOLDER / "history.jsonl"):
        values = [v for v in line["metrics"].get(metric, ()) if v is not None]
        if line["stage"] == stage and values:
            found[int(line["round"])] = float(values[0])
    return found
