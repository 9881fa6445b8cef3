"""A peer from Python: `peer = qv.Peer.open(folder)`, then `await peer.run()`.

`quiver peer run` does the same, and lets SIGTERM and Ctrl-C call `stop`. What a peer records of its
run is a run folder like a simulation's, `run` in the peer's folder: lines have the numbers of this
client in its position and none for all other clients. `quiver report` puts several peers together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quiverfl.engine.history import Recorder
from quiverfl.errors import CannotWrite, QuiverError
from quiverfl.methods.optional import adaptation_phase
from quiverfl.options import read_options
from quiverfl.results.run_files import read_lines, read_run
from quiverfl.results.summary import summarize
from quiverfl.runs.folder import RunFolder
from quiverfl.support import durable
from quiverfl.support.environment import require_package
from quiverfl.types import Metrics

if TYPE_CHECKING:
    from quiverfl.peer.folder import Outcome, PeerFolder
    from quiverfl.peer.node import Node
    from quiverfl.peer.setup import PeerParts


class Peer:
    """One member of a run between machines, as its folder says (`quiver peer init`)."""

    def __init__(self, folder: PeerFolder, join: bool, trust_store: bool) -> None:
        self._folder, self._join, self._trust_store = folder, join, trust_store
        self._parts: PeerParts | None = None
        self._node: Node | None = None
        self._state = "opened"
        self._stopping = False

    @classmethod
    def open(cls, folder: Path | str, *, join: bool = False, trust_store: bool = False) -> Peer:
        """Read a folder, and check the data, model, method and graph it describes.

        With `join` the peer enters a run that is under way, if its folder has no store yet. With
        `trust_store` it goes on although neighbours remember a newer store.
        """
        require_package("peer", "qv.Peer")
        from quiverfl.peer.folder import PeerFolder
        from quiverfl.peer.setup import build_learner

        place = durable.to_path(folder, "Peer.open: folder")
        peer = cls(PeerFolder.read(place), join, trust_store)
        peer._folder.identity()
        peer._parts = build_learner(peer._folder)
        return peer

    @property
    def name(self) -> str:
        return self._folder.own.name

    @property
    def path(self) -> Path:
        return self._folder.path

    def __repr__(self) -> str:
        return f"<Peer {self.name!r} of {self._folder.roster.run!r}: {self._state}>"

    async def run(self) -> Outcome:
        """Run until the rounds are over, the peer has left, or `stop` was called.

        Run it again, or in a new process, and it goes on from its store. Torch uses as many threads
        as the folder's peer.toml says, in the whole process.
        """
        import torch

        from quiverfl.peer.setup import assemble, build_learner

        if self._state == "running":
            raise QuiverError(f"{self.name!r} is running already: await the first run.")
        parts, self._parts = self._parts or build_learner(self._folder), None
        self._state = "running"
        torch.set_num_threads(self._folder.own.threads or 1)
        record = PeerRun(self._folder, parts)
        try:
            with record.recording():
                node = await assemble(
                    self._folder, self._join, self._trust_store, record.record, parts
                )
                self._node = node
                if self._stopping:
                    node.stop()
                try:
                    outcome = await node.run()
                finally:
                    node.store.close()
            if outcome.finished:
                record.close()
        finally:
            self._state, self._stopping = "ended", False
        return outcome

    def status(self) -> dict[str, Any]:
        """Output of `quiver peer status --json`; before the first run only name and state."""
        if self._node is None:
            return {"name": self.name, "state": self._state}
        return self._node.status()

    def stop(self) -> None:
        """End soon, as SIGTERM does. The commit at hand is finished, and nothing is lost."""
        self._stopping = self._state == "running"
        if self._node is not None:
            self._node.stop()

    def leave(self) -> None:
        """Give all mass away and end, as `quiver peer leave` asks of a running peer."""
        if self._node is None or self._state != "running":
            raise QuiverError(f"{self.name!r} does not run: only a running peer can leave.")
        self._node.leave()


RUN_FOLDER = "run"
SECONDS = ("seconds", "train_seconds", "evaluate_seconds", "mix_seconds")


class PeerRun:
    """Records every round of a peer's node, and the end."""

    def __init__(self, folder: PeerFolder, parts: PeerParts) -> None:
        from quiverfl.peer.setup import count_clients

        self._parts, self._peer = parts, folder
        self._folder = RunFolder(folder.path / RUN_FOLDER)
        self._number = folder.number
        self._clients = count_clients(folder, parts.config)
        self._recorder: Recorder | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        from quiverfl.peer.accounts.disk import StoreError

        member = {
            "name": self._peer.own.name,
            "number": self._number,
            "run": self._peer.roster.run,
            "mode": self._peer.peers.mode,
        }
        parts = self._parts
        try:
            self._folder.path.mkdir(mode=0o700, exist_ok=True)
            with self._folder.lock():
                self._folder.open_member(
                    parts.config, parts.partition, parts.topology, parts.method, member
                )
                with self._folder.record(None) as self._recorder:
                    yield
        except CannotWrite as problem:
            raise StoreError(str(problem)) from problem

    def record(self, line: Mapping[str, Any]) -> None:
        """Record a round of the node."""
        assert self._recorder is not None
        round = int(line["round"])
        for stage in ("local", "mixed"):
            if line.get(stage):
                self._recorder.on_evaluation(round, stage, self._metrics(line[stage]))
        sent, received = int(line["sent_bytes"]), int(line["received_bytes"])
        self._recorder.on_round_end(
            {
                "round": round,
                **{name: line[name] for name in SECONDS if name in line},
                "sent_bytes": self._place(sent),
                "received_bytes": self._place(received),
                "busiest_bytes": sent + received,
                "network_bytes": sent,
                "active": line["active"],
                "steps": self._place(line.get("steps", 0)),
                "mu_min": line["mass"],
                "mu_max": line["mass"],
                **self._private(line),
            }
        )

    def _private(self, line: Mapping[str, Any]) -> dict[str, Any]:
        return {"epsilon": self._place(line["epsilon"])} if "epsilon" in line else {}

    def _place(self, value: float) -> list[float]:
        """Put this client's number in its position; NaN for all other clients."""
        return [value if client == self._number else 0 for client in range(self._clients)]

    def _metrics(self, values: Mapping[str, float]) -> Metrics:
        metrics: Metrics = {}
        for name, value in values.items():
            metrics[name] = np.full(self._clients, np.nan)
            metrics[name][self._number] = value
        return metrics

    def close(self) -> None:
        """Write the summary: all rounds are over."""
        parts, run = self._parts, read_run(self._folder.path)
        method = {"name": parts.method.name, **read_options(parts.method)}
        summary = {"method": method, **summarize(run.history, run.rounds)}
        self._folder.finish(summary, adaptation_phase(parts.method, parts.task))


def read_scores(folder: Path, metric: str, stage: str = "mixed") -> dict[int, float]:
    """Read a metric that a peer has recorded of itself, by round."""
    scores: dict[int, float] = {}
    for line in read_lines(folder / RUN_FOLDER / "history.jsonl"):
        values = [v for v in line["metrics"].get(metric, ()) if v is not None]
        if line["stage"] == stage and values:
            scores[int(line["round"])] = float(values[0])
    return scores
