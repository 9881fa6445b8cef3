"""A run folder: the whole truth of a run, written so that a kill at any moment loses nothing.

config.json  environment.json  partition.npz  history.jsonl  rounds.jsonl
checkpoints/  and at the end  history.parquet  rounds.parquet  summary.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import platform
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quiverfl
from quiverfl import durable, locks
from quiverfl.config import Config, parse
from quiverfl.data.partition import Partition
from quiverfl.engine.checkpoint import Checkpoint, DamagedCheckpoint, checkpoints, prune
from quiverfl.engine.history import History, Recorder, evaluates
from quiverfl.errors import CannotWrite, Diverged, QuiverError, QuiverWarning
from quiverfl.experiment_keys import (
    SCHEMA,
    Settings,
    digest,
    experiment_settings,
    first_identity,
    flat,
    run_settings,
)
from quiverfl.methods import METHODS, Method
from quiverfl.methods.contract import Train
from quiverfl.provenance import origin
from quiverfl.results.protocol import EvaluationProtocol
from quiverfl.results.run_files import finish, read_json, read_lines
from quiverfl.run_lines import appending, as_line, history_from
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.adversary import attackers

PYTHON, PEER = "python", "peer"
"""In config.json of a run that was not made from a configuration, or by one peer of many."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._checkpoints = path / "checkpoints"

    @contextlib.contextmanager
    def alone(self, wait: bool = False) -> Iterator[None]:
        """Only this process writes here: another one is refused, or waited for.

        Reading needs no lock.
        """
        with locks.alone(self.path, wait):
            if self.holds_run():  # or what lies here half-written is somebody else's
                for folder in (self.path, self._checkpoints):
                    durable.remove_partial(folder)
            yield

    def holds_run(self) -> bool:
        return (self.path / "config.json").is_file()

    def started(self) -> bool:
        """Whether anything was computed that could be resumed, or be shown."""
        rounds = self.path / "rounds.jsonl"
        lines = rounds.exists() and rounds.stat().st_size > 0
        return self.holds_run() and (lines or self.summary() != {})

    def clear_unstarted(self) -> None:
        """A run that ended before its first round may be replaced by another one."""
        if self.holds_run() and not self.started():
            for name in ("config.json", "environment.json", "partition.npz"):
                (self.path / name).unlink(missing_ok=True)

    def finished(self) -> bool:
        return bool(self.summary().get("finished"))

    def refuse_unfinished(self) -> None:
        """An interrupted run is continued by its own command, not by starting one over it."""
        if self.holds_run() and not self.finished():
            raise QuiverError(
                f"{self.path} holds an interrupted run: `quiver resume {self.path}` continues it; "
                "to start again choose another --out or delete the folder."
            )

    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def extend(self, rounds: int) -> Config:
        """The run's configuration with more rounds, which the folder is of from now on.

        What a longer run would have computed from the start, but for methods that plan by the
        number of rounds, as Dis-PFL does: they continue with the new plan.
        """
        with self.alone():
            config = self.config()
            if rounds <= config.run.rounds:
                raise QuiverError(
                    f"--rounds {rounds}: {self.path} has {config.run.rounds} rounds; give more."
                )
            longer = config.with_values([("run.rounds", rounds)])
            path = self.path / "config.json"
            written = read_json(path)
            written.update(
                schema=SCHEMA,
                experiment=longer.experiment(),
                identity=longer.identity(),
                config=longer.model_dump(mode="json"),
                extended=[*written.get("extended", ()), config.run.rounds],
            )
            self._write("config.json", _json(written))
            for name in ("summary.json", "history.parquet", "rounds.parquet"):
                (self.path / name).unlink(missing_ok=True)
            return longer

    def config(self) -> Config:
        """The configuration the run was started with."""
        if not self.holds_run():
            raise QuiverError(f"{self.path}: not a run folder (it has no config.json).")
        path = self.path / "config.json"
        written = read_json(path)
        if not self.finished():
            self._check_version(str(written.get("quiver", "")))
        if written.get("source") == PYTHON:
            raise QuiverError(
                f"{self.path} was saved from Python, and no configuration can make it again: in "
                "Python, simulate(…, resume=load_run(folder).checkpoint()) with the same arguments "
                "continues it or gives its models. `quiver report` can read it."
            )
        if written.get("source") == PEER:
            raise QuiverError(
                f"{self.path} is what one peer recorded of its run: `quiver peer run "
                f"{self.path.parent}` continues it, `quiver peer export` has its model. "
                "`quiver report` can read it, also beside those of the other peers."
            )
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

    def _check_version(self, theirs: str) -> None:
        """What a newer version meant by its files is not for this one to guess."""
        if _version(theirs) > _version(quiverfl.__version__):
            raise QuiverError(
                f"{self.path} was written by Quiver {theirs}, and this is {quiverfl.__version__}: "
                f"resume it with {theirs} or newer (pip install 'quiverfl>={theirs}'). "
                "`quiver report` can still read it."
            )

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
        for name, found in inputs.items():
            if theirs.get(name, found) != found:
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
        """Write what is known before the first round."""
        if not self.holds_run():
            if any(path.name != locks.NAME for path in self.path.iterdir()):
                raise QuiverError(f"{self.path} is not empty and not a run: choose another --out.")
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
            adversary = config.transforms().adversary
            if adversary is not None:
                found = attackers(adversary, config.run.seed, topology.clients)
                text["attackers"] = found.tolist()
            self._write("config.json", _json(text))
        self._check_partition(partition)
        self._write_beside(partition.arrays())

    def open_member(
        self,
        config: Config,
        partition: Partition,
        topology: Topology,
        method: Method,
        member: Mapping[str, Any],
    ) -> None:
        """The same for what one peer records: which `member` it is, of which run, in which mode.

        Peers are an experiment of their own beside the simulation of the same configuration. What
        was recorded before stays, but for a line that a kill has cut off.
        """
        peers = {"mode": member["mode"], "run": member["run"]}
        seen = {**config.model_dump(mode="json", exclude_defaults=True), "peers": peers}
        text = {
            "quiver": quiverfl.__version__,
            "schema": SCHEMA,
            "source": PEER,
            "member": dict(member),
            "experiment": digest(experiment_settings(seen)),
            "identity": digest(run_settings(seen)),
            "inputs": {},
            "method": _named(config.method.name, method),
            "config": {**config.model_dump(mode="json"), "peers": {"mode": member["mode"]}},
            "topology": {"name": topology.name, **topology.options},
        }
        self._write("config.json", _json(text))
        self._write_beside(partition.arrays())
        self._cut(sys.maxsize)

    def describe(
        self,
        tree: Settings,
        shares: Mapping[str, Any],
        method: Method,
        attackers: Sequence[int] = (),
    ) -> None:
        """The same for a run made in Python, whose settings cannot make it again."""
        if any(path.name != locks.NAME for path in self.path.iterdir()):
            raise QuiverError(f"{self.path} is not empty and not a run: choose another folder.")
        tree = json.loads(json.dumps(tree, default=str))  # whatever an option was
        text = {
            "quiver": quiverfl.__version__,
            "schema": SCHEMA,
            "source": PYTHON,
            "experiment": digest(experiment_settings(tree)),
            "identity": digest(run_settings(tree)),
            "inputs": {},
            "method": _named(method.name, method),
            "config": tree,
            "topology": tree["topology"],
            **({"attackers": list(attackers)} if attackers else {}),
        }
        self._write("config.json", _json(text))
        self._write_beside(shares)

    def _write_beside(self, shares: Mapping[str, Any]) -> None:
        # Of an earlier try that diverged: this one may end otherwise.
        (self.path / "summary.json").unlink(missing_ok=True)
        self._write("environment.json", _json(environment() | self._origin()))
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **shares)
        self._write("partition.npz", buffer.getvalue())

    def _origin(self) -> dict[str, Any]:
        """Where the run comes from; one that is resumed comes from where it was begun."""
        try:
            before = read_json(self.path / "environment.json")
        except QuiverError:  # there is none yet, or it cannot be read
            before = {}
        return origin() | {k: before[k] for k in ("started", "command") if k in before}

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
                "and run it again."
            ) from error
        if not same:
            raise QuiverError(
                f"{path} gives clients other examples than this installation would: the run was "
                "begun by another version of Quiver or numpy (environment.json says which). Resume "
                "it with that one, or start a new run in another folder."
            )

    def save(self, checkpoint: Checkpoint) -> None:
        self.keep(checkpoint.save)

    def keep(self, write: Callable[[Path], Path]) -> None:
        """Have a checkpoint written into the folder for them, and older ones removed."""
        with self.writing():
            prune(self._checkpoints, write(self._checkpoints))

    def resume(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, with the history up to it; later lines are cut off.

        None if there never was one: the run starts at its first round.
        """
        checkpoint = self._newest()
        round = 0 if checkpoint is None else checkpoint.round
        self._check_lines(round)
        history = self._cut(round)
        return None if checkpoint is None else dataclasses.replace(checkpoint, history=history)

    def _newest(self) -> Checkpoint | None:
        damaged: list[str] = []
        for path in reversed(checkpoints(self._checkpoints)):
            try:
                found = Checkpoint.load(path, History())
            except DamagedCheckpoint as error:
                damaged.append(f"{error.path.name}: {error.why}")
                continue
            if damaged:
                warnings.warn(
                    f"{self._checkpoints}: damaged ({'; '.join(damaged)}); resuming from the one "
                    f"before, after round {found.round}.",
                    QuiverWarning,
                    stacklevel=2,
                )
            return found
        if damaged:
            raise QuiverError(
                f"{self._checkpoints}: no checkpoint can be used ({'; '.join(damaged)}). Put the "
                f"files back, or delete the folder {self._checkpoints}: `quiver resume "
                f"{self.path}` then computes the run again from its first round."
            )
        return None

    def newest(self) -> Checkpoint:
        """The newest checkpoint that is whole, with the history up to it; nothing is written."""
        found = self._newest()
        if found is None:
            raise QuiverError(f"{self.path} has no checkpoint: no models of it were kept.")
        kept = [
            [line for line in read_lines(self.path / name) if line["round"] < found.round]
            for name in ("history.jsonl", "rounds.jsonl")
        ]
        return dataclasses.replace(found, history=history_from(kept[0], kept[1]))

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
                    "the folder and run it again."
                )

    def _cut(self, round: int) -> History:
        """The history before this round; what came after it will be computed again."""
        kept = {}
        for name in ("history", "rounds"):
            lines = read_lines(self.path / f"{name}.jsonl")
            kept[name] = [line for line in lines if line["round"] < round]
            self._write(f"{name}.jsonl", b"".join(as_line(line) for line in kept[name]))
        return history_from(kept["history"], kept["rounds"])

    @contextlib.contextmanager
    def recording(self, other: Recorder | None) -> Iterator[Recorder]:
        """Append every evaluation and round as it happens; note a divergence before it ends."""
        try:
            with appending(self.path, self.writing, other) as both:
                yield both
        except Diverged as error:
            text = {"finished": False, "diverged": {"round": error.round, "client": error.client}}
            self._write("summary.json", _json({**text, "error": str(error)}))
            raise

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Whatever the disk refuses is one sentence; what it took before is enough to resume."""
        try:
            yield
        except (OSError, CannotWrite) as problem:
            cause = problem if isinstance(problem, OSError) else problem.__cause__
            reason = getattr(cause, "strerror", None) or str(problem)
            again = (
                f"`quiver resume {self.path}` continues from the last checkpoint"
                if self.holds_run()
                else "run the same command again"
            )
            raise CannotWrite(
                f"{self.path} cannot be written: {reason}. Nothing is lost: make room or make it "
                f"writable, then {again}."
            ) from problem

    def _write(self, name: str, content: bytes) -> None:
        with self.writing():
            durable.replace(self.path / name, content)

    def close(self, summary: dict[str, Any], adaptation: Train | None) -> dict[str, Any]:
        """Parquet and the summary; its presence says that the run is complete."""
        with self.writing():
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
        self._write("summary.json", _json(text))
        return text


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
    order = list(METHODS).index(name) if name in METHODS else None
    return {"name": name, "title": method.title, "order": order}


def _difference(first: Config, second: Config) -> str:
    left, right = (flat(run_settings(c.model_dump(mode="json"))) for c in (first, second))
    keys = [
        f"{key}: {left.get(key)!r} there, {right.get(key)!r} here"
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    ]
    return "; ".join(keys[:3]) + ("; …" if len(keys) > 3 else "")


def _version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
