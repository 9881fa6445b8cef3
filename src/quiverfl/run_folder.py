"""A run folder: the whole truth of a run, written so that a kill at any moment loses nothing.

config.json  environment.json  partition.npz  history.jsonl  rounds.jsonl
checkpoints/  and at the end  history.parquet  rounds.parquet  summary.json
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

import quiverfl
from quiverfl.config import Config, parse
from quiverfl.data.partition import Partition
from quiverfl.engine.checkpoint import Checkpoint, checkpoints, prune
from quiverfl.engine.history import History, Metrics, Record, Recorder, evaluates
from quiverfl.errors import Diverged, QuiverError
from quiverfl.experiment_keys import SCHEMA, first_identity, flat, run_settings
from quiverfl.methods import METHODS, Method, method_title
from quiverfl.methods.contract import Train
from quiverfl.results.output_files import replace_file
from quiverfl.results.protocol import EvaluationProtocol
from quiverfl.results.run_files import evaluation, finish, read_json, read_lines
from quiverfl.topologies.topology import Topology


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def holds_run(self) -> bool:
        return (self.path / "config.json").is_file()

    def finished(self) -> bool:
        return bool(self.summary().get("finished"))

    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def config(self) -> Config:
        """The configuration the run was started with."""
        if not self.holds_run():
            raise QuiverError(f"{self.path}: not a run folder (it has no config.json).")
        path = self.path / "config.json"
        written = read_json(path)
        schema, tree = written.get("schema", 0), written.get("config", {})
        if schema not in (0, SCHEMA):
            raise QuiverError(
                f"{path} was written by a later version of Quiver ({written.get('quiver')}): "
                "use that one, or start a new run in another folder."
            )
        config = parse(tree, str(path))
        identity = config.identity() if schema else first_identity(tree)
        if identity != written.get("identity"):
            raise QuiverError(
                f"{path} was changed after the run was started: what is in "
                "the folder does not match it. Put it back, or start a new run in another folder."
            )
        return config

    def check(self, config: Config) -> None:
        """Refuse a configuration other than the one the folder was made with."""
        theirs = self.config()
        if theirs.identity() != config.identity():
            raise QuiverError(
                f"{self.path} holds a run of another configuration "
                f"({_difference(theirs, config)}). Choose another --out, or delete the folder if "
                "it is no longer wanted."
            )

    def check_inputs(self, inputs: Mapping[str, str]) -> None:
        """Refuse data or code other than the run was made with, by their digests."""
        theirs = read_json(self.path / "config.json").get("inputs", {}) if self.holds_run() else {}
        for name, digest in inputs.items():
            if theirs.get(name, digest) != digest:
                raise QuiverError(
                    f"{self.path} holds a run with another {name}: it was changed since, though "
                    "not its name. Put it back, choose another --out, or delete the folder if it "
                    "is no longer wanted."
                )

    def open(
        self,
        config: Config,
        inputs: Mapping[str, str],
        partition: Partition,
        topology: Topology,
        method: Method,
    ) -> None:
        """Make the folder and write what is known before the first round."""
        if self.path.exists() and not self.path.is_dir():
            raise QuiverError(f"{self.path} is a file: choose another --out.")
        if not self.holds_run() and self.path.exists() and any(self.path.iterdir()):
            raise QuiverError(f"{self.path} is not empty and not a run: choose another --out.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuiverError(f"{self.path}: cannot be made: {error.strerror}.") from error
        if not self.holds_run():
            text = {
                "quiver": quiverfl.__version__,
                "schema": SCHEMA,
                "experiment": config.experiment(),
                "identity": config.identity(),
                "inputs": dict(inputs),
                "method": _named(config.method.name, method),
                "config": config.model_dump(mode="json"),
                "topology": {"name": topology.name, **topology.options},
            }
            replace_file(self.path / "config.json", _json(text))
        self._check_partition(partition)
        # Of an earlier try that diverged: this one may end otherwise.
        (self.path / "summary.json").unlink(missing_ok=True)
        replace_file(self.path / "environment.json", _json(environment()))
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **partition.arrays())
        replace_file(self.path / "partition.npz", buffer.getvalue())

    def _check_partition(self, partition: Partition) -> None:
        """Another version of Quiver or numpy may share the same data out otherwise."""
        path = self.path / "partition.npz"
        if not path.exists():
            return
        try:
            with np.load(path) as before:
                # Names of clients are not in folders of earlier versions, and decide nothing.
                shares = {k: v for k, v in partition.arrays().items() if k != "names"}
                same = all(np.array_equal(before[k], v) for k, v in shares.items())
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise QuiverError(
                f"{path} is damaged ({type(error).__name__}): put it back, or delete the folder "
                "and run it anew."
            ) from error
        if not same:
            raise QuiverError(
                f"{path} gives clients other examples than this installation would: the run was "
                "begun by another version of Quiver or numpy (environment.json says which). Go on "
                "with that one, or start a new run in another folder."
            )

    def save(self, checkpoint: Checkpoint) -> None:
        checkpoint.save(self.path / "checkpoints")
        prune(self.path / "checkpoints")

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint with the history up to it; later lines are cut off."""
        found = checkpoints(self.path / "checkpoints")
        round = 0 if not found else int(_read_round(found[-1]))
        self._check_lines(round)
        history = self._cut(round)
        return Checkpoint.load(found[-1], history) if found else None

    def _check_lines(self, round: int) -> None:
        """Every round before a checkpoint was written down before it: a gap is damage."""
        config = self.config().run
        wanted = {
            "rounds": set(range(round)),
            "history": {
                t for t in range(round) if evaluates(t, config.evaluate_every, config.rounds)
            },
        }
        for name, rounds in wanted.items():
            path = self.path / f"{name}.jsonl"
            missing = rounds - {line["round"] for line in read_lines(path)}
            if missing:
                raise QuiverError(
                    f"{path} lacks round {min(missing) + 1}, which was recorded before the "
                    f"checkpoint after round {round}: the file was damaged. Put it back, or delete "
                    "the folder and run it anew."
                )

    def _cut(self, round: int) -> History:
        """The history before this round; what came after it will be computed again."""
        history = History()
        for name in ("history", "rounds"):
            path = self.path / f"{name}.jsonl"
            lines = [line for line in read_lines(path) if line["round"] < round]
            replace_file(path, b"".join(_line(line) for line in lines))
            for line in lines:
                if name == "rounds":
                    history.finished(line)
                else:
                    history.evaluated(*evaluation(line))
        return history

    @contextlib.contextmanager
    def recording(self, other: Recorder | None) -> Iterator[Recorder]:
        """Append every evaluation and round as it happens; note a divergence before it ends."""
        try:
            with (
                (self.path / "history.jsonl").open("a") as history,
                (self.path / "rounds.jsonl").open("a") as rounds,
            ):
                yield _Appending(history, rounds, other)
        except Diverged as error:
            text = {"finished": False, "diverged": {"round": error.round, "client": error.client}}
            replace_file(self.path / "summary.json", _json({**text, "error": str(error)}))
            raise

    def close(self, summary: dict[str, Any], adaptation: Train | None) -> dict[str, Any]:
        """Parquet and the summary; its presence says that the run is complete."""
        finish(self.path)
        written = read_json(self.path / "config.json")
        tuned = None if adaptation is None else f"{adaptation.epochs} epochs of fine-tuning"
        protocol = EvaluationProtocol(finetune=tuned)
        text = {
            **summary,
            "topology": written["topology"],
            "clients": len(np.load(self.path / "partition.npz")["train_counts"]),
            "rounds": written["config"]["run"]["rounds"],
            "protocol": protocol.record(),
            "finished": True,
        }
        replace_file(self.path / "summary.json", _json(text))
        return text


class _Appending:
    def __init__(self, history: TextIO, rounds: TextIO, other: Recorder | None) -> None:
        self._history, self._rounds, self._other = history, rounds, other

    def evaluated(self, round: int, stage: str, metrics: Metrics) -> None:
        values = {name: [_null(v) for v in column.tolist()] for name, column in metrics.items()}
        self._history.write(_line({"round": round, "stage": stage, "metrics": values}).decode())
        self._history.flush()
        if self._other is not None:
            self._other.evaluated(round, stage, metrics)

    def finished(self, record: Record) -> None:
        self._rounds.write(_line(record).decode())
        self._rounds.flush()
        if self._other is not None:
            self._other.finished(record)


def environment() -> dict[str, Any]:
    """What the numbers were made with."""
    return {
        "quiverfl": quiverfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _named(name: str, method: Method) -> dict[str, Any]:
    """What reports call the method and where they put it: they know none of the methods."""
    title = str(getattr(method, "title", method_title(name)))
    order = list(METHODS).index(name) if name in METHODS else None
    return {"name": name, "title": title, "order": order}


def _difference(first: Config, second: Config) -> str:
    left, right = (flat(run_settings(c.model_dump(mode="json"))) for c in (first, second))
    keys = [
        f"{key}: {left.get(key)!r} there, {right.get(key)!r} here"
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    ]
    return "; ".join(keys[:3]) + ("; …" if len(keys) > 3 else "")


def _read_round(path: Path) -> int:
    return int(path.stem.removeprefix("round-"))


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, separators=(",", ":")) + "\n").encode()


def _null(value: float) -> float | None:
    return value if np.isfinite(value) else None
