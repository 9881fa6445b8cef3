"""A run folder has everything about a run; a kill at any moment loses nothing.

config.json  environment.json  partition.npz  history.jsonl  rounds.jsonl
checkpoints/  and at the end  history.parquet  rounds.parquet  summary.json
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import quiverfl
from quiverfl.data.partition import Partition
from quiverfl.engine.checkpoint import Checkpoint, DamagedCheckpoint, checkpoints, prune_checkpoints
from quiverfl.engine.history import History, Recorder
from quiverfl.errors import CannotWrite, Diverged, QuiverError, QuiverWarning
from quiverfl.identity import (
    SCHEMA,
    Settings,
    flatten_settings,
    hash_settings,
    select_experiment_settings,
    select_run_settings,
)
from quiverfl.methods import METHODS, Method
from quiverfl.methods.contract import Train
from quiverfl.results.run_files import finish_history, read_json
from quiverfl.results.summary import EvaluationProtocol
from quiverfl.runs.config import Config, parse_config
from quiverfl.runs.provenance import describe_environment, describe_start
from quiverfl.runs.records import (
    append_records,
    check_records,
    make_history,
    read_records,
    to_line,
)
from quiverfl.support import durable, locks
from quiverfl.support.output_folders import describe_contents
from quiverfl.topologies.topology import Topology
from quiverfl.transforms.attacks import choose_attackers

PYTHON, PEER = "python", "peer"
"""`source` in config.json of a run made in Python, or recorded by one peer of many."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        durable.check_writable(path)
        self.path = path
        self._checkpoints = path / "checkpoints"
        self._parsed: tuple[bytes, Config] | None = None  # config.json and what it says

    @contextlib.contextmanager
    def lock(self, wait: bool = False) -> Iterator[None]:
        """Let only this process write here; refuse another one, or `wait` for it.

        Reading needs no lock.
        """
        with locks.lock_folder(self.path, wait):
            if self.holds_run():  # or half-written files here belong to another program
                for folder in (self.path, self._checkpoints):
                    durable.remove_partial(folder)
            yield

    def holds_run(self) -> bool:
        return (self.path / "config.json").is_file()

    def has_results(self) -> bool:
        """Whether the run has results that can be resumed or shown."""
        rounds = self.path / "rounds.jsonl"
        lines = rounds.exists() and rounds.stat().st_size > 0
        return self.holds_run() and (lines or self.summary() != {})

    def clear_without_results(self) -> None:
        """Remove the files of a run that ended before its first round."""
        if self.holds_run() and not self.has_results():
            for name in ("config.json", "environment.json", "partition.npz"):
                (self.path / name).unlink(missing_ok=True)

    def is_finished(self) -> bool:
        return bool(self.summary().get("finished"))

    def refuse_unfinished(self) -> None:
        """Refuse to start over an interrupted run: `quiver resume` continues it."""
        if self.holds_run() and not self.is_finished():
            raise QuiverError(
                f"{self.path} holds an interrupted run: `quiver resume {self.path}` continues it; "
                "to start again choose another --out or delete the folder."
            )

    def summary(self) -> dict[str, Any]:
        path = self.path / "summary.json"
        return read_json(path) if path.exists() else {}

    def extend(self, rounds: int) -> Config:
        """Give the run more rounds and return its new configuration.

        The result is that of a longer run from the start, except for methods that plan by the
        number of rounds, as Dis-PFL does: they continue with the new plan.
        """
        if not self.holds_run():
            self.config()  # says what it is not
        with self.lock():
            config = self.config()
            if rounds <= config.run.rounds:
                many = f"{config.run.rounds} round{'s' * (config.run.rounds != 1)}"
                raise QuiverError(f"--rounds {rounds}: {self.path} has {many}; give more.")
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
        """Read the configuration that the run was started with."""
        if not self.holds_run():
            raise QuiverError(f"{self.path}: not a run folder (it has no config.json).")
        path = self.path / "config.json"
        content = path.read_bytes()
        if self._parsed is not None and self._parsed[0] == content:
            return self._parsed[1]
        written = read_json(path)
        if not self.is_finished():
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
        if "schema" not in written:
            raise QuiverError(
                f"{path} was written by Quiver 0.1, whose folders this version does not continue: "
                "use quiverfl 0.1, or start a new run in another folder."
            )
        if written["schema"] != SCHEMA:
            raise QuiverError(
                f"{path} was written by a later version of Quiver ({written.get('quiver')}): "
                "use that one, or start a new run in another folder."
            )
        config = parse_config(written.get("config", {}), str(path))
        if config.identity() != written.get("identity"):
            raise QuiverError(
                f"{path} was changed after the run was started: what is in "
                "the folder does not match it. Put it back, or start a new run in another folder."
            )
        self._parsed = content, config
        return config

    def _check_version(self, theirs: str) -> None:
        """Refuse a folder of a newer version, whose files may mean something else."""
        if _parse_version(theirs) > _parse_version(quiverfl.__version__):
            raise QuiverError(
                f"{self.path} was written by Quiver {theirs}, and this is {quiverfl.__version__}: "
                f"resume it with {theirs} or newer (pip install 'quiverfl>={theirs}'). "
                "`quiver report` can still read it."
            )

    def check_config(self, config: Config) -> None:
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
        dataset: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the files of a new run, or check those of an earlier start.

        `dataset` says of the data what its models need, so that they can be had without it.
        """
        if not self.holds_run():
            self._refuse_foreign("choose another --out")
            adversary = config.transforms().adversary
            attackers: Sequence[int] = ()
            if adversary is not None:
                chosen = choose_attackers(adversary, config.run.seed, topology.clients)
                attackers = chosen.tolist()
            self._write_config(
                config.experiment(),
                config.identity(),
                _describe_method(config.method.name, method),
                config.model_dump(mode="json"),
                {"name": topology.name, **topology.options},
                inputs=dict(inputs),
                **({} if dataset is None else {"dataset": dict(dataset)}),
                **({} if adversary is None else {"attackers": attackers}),
            )
            self._parsed = (self.path / "config.json").read_bytes(), config
        self._check_partition(partition)
        self._write_start(partition.arrays())

    def open_member(
        self,
        config: Config,
        partition: Partition,
        topology: Topology,
        method: Method,
        member: Mapping[str, Any],
    ) -> None:
        """Write the files of what one peer records: `member` is its place in the run.

        Peers are an experiment of their own beside the simulation of the same configuration.
        Earlier records stay, but for a line that a kill has cut off.
        """
        peers = {"mode": member["mode"], "run": member["run"]}
        tree = {**config.model_dump(mode="json", exclude_defaults=True), "peers": peers}
        self._write_config(
            hash_settings(select_experiment_settings(tree)),
            hash_settings(select_run_settings(tree)),
            _describe_method(config.method.name, method),
            {**config.model_dump(mode="json"), "peers": {"mode": member["mode"]}},
            {"name": topology.name, **topology.options},
            source=PEER,
            member=dict(member),
        )
        self._write_start(partition.arrays())
        self._cut(sys.maxsize)

    def open_python_run(
        self,
        tree: Settings,
        partition_arrays: Mapping[str, Any],
        method: Method,
        attackers: Sequence[int] = (),
    ) -> None:
        """Write the files of a run made in Python, which its settings cannot repeat."""
        self._refuse_foreign("choose another folder")
        tree = json.loads(json.dumps(tree, default=str))  # options may be objects
        self._write_config(
            hash_settings(select_experiment_settings(tree)),
            hash_settings(select_run_settings(tree)),
            _describe_method(method.name, method),
            tree,
            tree["topology"],
            source=PYTHON,
            **({"attackers": list(attackers)} if attackers else {}),
        )
        self._write_start(partition_arrays)

    def _write_config(
        self,
        experiment: str,
        identity: str,
        method: Mapping[str, Any],
        config: Mapping[str, Any],
        topology: Mapping[str, Any],
        **more: Any,
    ) -> None:
        record = {
            "quiver": quiverfl.__version__,
            "schema": SCHEMA,
            "experiment": experiment,
            "identity": identity,
            "inputs": {},
            "method": method,
            "config": config,
            "topology": topology,
            **more,
        }
        self._write("config.json", _json(record))

    def _refuse_foreign(self, remedy: str) -> None:
        if any(path.name != locks.NAME for path in self.path.iterdir()):
            contents = describe_contents(self.path) or "empty folders"
            raise QuiverError(
                f"{self.path} is not empty and not a run (it has {contents}): {remedy}."
            )

    def _write_start(self, partition_arrays: Mapping[str, Any]) -> None:
        # An earlier try may have diverged; this one may end otherwise.
        (self.path / "summary.json").unlink(missing_ok=True)
        self._write("environment.json", _json(describe_environment() | self._describe_start()))
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **partition_arrays)
        self._write("partition.npz", buffer.getvalue())

    def _describe_start(self) -> dict[str, Any]:
        """Return the start of the run; a resumed run keeps its first one."""
        try:
            before = read_json(self.path / "environment.json")
        except QuiverError:  # there is none yet, or it cannot be read
            before = {}
        return describe_start() | {k: before[k] for k in ("started", "command") if k in before}

    def _check_partition(self, partition: Partition) -> None:
        """Refuse to resume with a version of Quiver or numpy that partitions the data otherwise."""
        path = self.path / "partition.npz"
        if not path.exists():
            return
        try:
            with np.load(path) as before:
                # Names of clients decide nothing.
                arrays = {k: v for k, v in partition.arrays().items() if k != "names"}
                same = all(np.array_equal(before[k], v) for k, v in arrays.items())
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

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.write_checkpoint(checkpoint.save)

    def write_checkpoint(self, write: Callable[[Path], Path]) -> None:
        """Call `write` with the folder of checkpoints, and remove older ones."""
        with self.explain_errors():
            prune_checkpoints(self._checkpoints, write(self._checkpoints))

    def resume(self) -> Checkpoint | None:
        """Load the newest intact checkpoint and the history up to it; cut off later lines.

        None if there is no checkpoint: the run starts at its first round.
        """
        checkpoint = self._load_newest()
        round = 0 if checkpoint is None else checkpoint.round
        check_records(self.path, round, self.config().run)
        history = self._cut(round)
        return None if checkpoint is None else dataclasses.replace(checkpoint, history=history)

    def _load_newest(self) -> Checkpoint | None:
        damaged: list[str] = []
        for path in reversed(checkpoints(self._checkpoints)):
            try:
                checkpoint = Checkpoint.load(path, History())
            except DamagedCheckpoint as error:
                damaged.append(f"{error.path.name}: {error.why}")
                continue
            if damaged:
                warnings.warn(
                    f"{self._checkpoints}: damaged ({'; '.join(damaged)}); resuming from the one "
                    f"before, after round {checkpoint.round}.",
                    QuiverWarning,
                    stacklevel=2,
                )
            return checkpoint
        if damaged:
            raise QuiverError(
                f"{self._checkpoints}: no checkpoint can be used ({'; '.join(damaged)}). Put the "
                f"files back, or delete the folder {self._checkpoints}: `quiver resume "
                f"{self.path}` then computes the run again from its first round."
            )
        return None

    def load_checkpoint(self) -> Checkpoint:
        """Load the newest intact checkpoint and the history up to it; write nothing."""
        checkpoint = self._load_newest()
        if checkpoint is None:
            raise QuiverError(f"{self.path} has no checkpoint: no models of it were kept.")
        records = read_records(self.path, checkpoint.round)
        history = make_history(records["history"], records["rounds"])
        return dataclasses.replace(checkpoint, history=history)

    def _cut(self, round: int) -> History:
        """Cut off the lines from this round on, which will be computed again; read the others."""
        records = read_records(self.path, round)
        for name, lines in records.items():
            self._write(f"{name}.jsonl", b"".join(map(to_line, lines)))
        return make_history(records["history"], records["rounds"])

    @contextlib.contextmanager
    def record(self, other: Recorder | None) -> Iterator[Recorder]:
        """Give a recorder that appends every evaluation and round; note a divergence."""
        try:
            with append_records(self.path, self.explain_errors, other) as recorder:
                yield recorder
        except Diverged as error:
            text = {"finished": False, "diverged": {"round": error.round, "client": error.client}}
            self._write("summary.json", _json({**text, "error": str(error)}))
            raise

    @contextlib.contextmanager
    def explain_errors(self) -> Iterator[None]:
        """Turn what the disk refuses into one sentence that says how to continue."""
        try:
            yield
        except (OSError, CannotWrite) as problem:
            cause = problem if isinstance(problem, OSError) else problem.__cause__
            reason = getattr(cause, "strerror", None) or str(problem)
            remedy = (
                f"`quiver resume {self.path}` continues from the last checkpoint"
                if self.holds_run()
                else "run the same command again"
            )
            raise CannotWrite.of(self.path, reason, remedy) from problem

    def _write(self, name: str, content: bytes) -> None:
        with self.explain_errors():
            durable.replace_file(self.path / name, content)

    def finish(self, summary: dict[str, Any], adaptation: Train | None) -> dict[str, Any]:
        """Write the tables, then the summary: its presence says that the run is complete."""
        with self.explain_errors():
            finish_history(self.path)
        record = read_json(self.path / "config.json")
        tuned = None if adaptation is None else f"{adaptation.epochs} epochs of fine-tuning"
        protocol = EvaluationProtocol(finetune=tuned)
        text = {
            **summary,
            "topology": record["topology"],
            "clients": len(np.load(self.path / "partition.npz")["train_counts"]),
            "rounds": record["config"]["run"]["rounds"],
            "protocol": protocol.record(),
            "finished": True,
        }
        self._write("summary.json", _json(text))
        return text


def _describe_method(name: str, method: Method) -> dict[str, Any]:
    """Return the name, title and order of the method for reports, which know no methods."""
    order = list(METHODS).index(name) if name in METHODS else None
    return {"name": name, "title": method.title, "order": order}


def _difference(first: Config, second: Config) -> str:
    left, right = (
        flatten_settings(select_run_settings(c.model_dump(mode="json"))) for c in (first, second)
    )
    keys = [
        f"{key}: {left.get(key)!r} there, {right.get(key)!r} here"
        for key in {**left, **right}
        if left.get(key) != right.get(key)
    ]
    return "; ".join(keys[:3]) + ("; …" if len(keys) > 3 else "")


def _parse_version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
