"""Run folders from Python: `save_run` writes what the command line writes, `load_run` reads it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quiverfl.data.examples import ClientExamples
from quiverfl.data.federated import FederatedData
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.run import ClientState, Run, format_last_scores
from quiverfl.errors import QuiverError
from quiverfl.methods.optional import adaptation_phase
from quiverfl.options import read_options
from quiverfl.results.run_files import RunResult, read_run
from quiverfl.results.summary import summarize_attacked
from quiverfl.runs.experiment import Experiment, digest_inputs, restored
from quiverfl.runs.folder import RunFolder
from quiverfl.runs.records import append_records
from quiverfl.support.cards import ReprCard, format_thousands
from quiverfl.types import Stage

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import nn


def save_run(run: Run, path: Path, name: str | None = None) -> Path:
    """A run folder of what there is: complete, or as far as it came.

    What a run was made from that is no configuration is described as far as it can be: names,
    options and sizes, and a digest of the data unless it has a name. Runs are seeds of one
    experiment if all of that is the same but their seeds.
    """
    folder, simulation = RunFolder(path), run.simulation
    with folder.lock():
        if folder.holds_run():
            raise QuiverError(f"{path} holds a run already: choose another folder.")
        experiment = run.made_from
        if isinstance(experiment, Experiment):
            folder.open(
                experiment.config,
                digest_inputs(experiment.config, experiment.dataset),
                experiment.partition,
                simulation.topology,
                simulation.method,
            )
        else:
            shares = _shares(simulation.data)
            folder.open_python_run(
                describe_run(run, name), shares, simulation.method, run.attackers
            )
        with append_records(path, folder.explain_errors, None) as lines:
            checkpoint = run.checkpoint()
            for evaluation in checkpoint.history.evaluations:
                lines.evaluated(*evaluation)
            for record in checkpoint.history.records:
                lines.finished(record)
        folder.save_checkpoint(checkpoint)
        if run.complete:
            folder.finish(run.summary, adaptation_phase(simulation.method, simulation.task))
    return path


def describe_run(run: Run, name: str | None) -> dict[str, dict[str, Any]]:
    """A run's settings in the sections of a configuration, in values that JSON has."""
    simulation = run.simulation
    task, data, method = simulation.task, simulation.data, simulation.method
    settings = {
        field: str(value).removeprefix("torch.")
        if isinstance(value, torch.dtype | torch.device)
        else value
        for field, value in asdict(simulation.settings).items()
    }
    source = dict(data.origin)
    if name is not None:
        source["name"] = name
    elif not source:
        source = {"name": "own arrays", "partition": "given", "digest": _digest(data)}
    loss = getattr(task.loss, "__name__", type(task.loss).__name__)
    size = task.shared_layout.size + task.personal_layout.size
    return {
        "data": {**source, "clients": data.clients},
        "model": {
            "name": type(task.skeleton).__name__,
            "personal": list(task.personal),
            "parameters": size,
            "loss": loss,
        },
        "method": {"name": method.name, **read_options(method)},
        "topology": {"name": simulation.topology.name, **simulation.topology.options},
        "training": asdict(simulation.training),
        **simulation.transforms.record(),
        "run": settings,
    }


def _shares(data: FederatedData) -> dict[str, np.ndarray[Any, Any]]:
    """What partition.npz holds of it: counts per class, where there are classes."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for part, split in (("train", data.train), ("test", data.test)):
        arrays[f"{part}_counts"] = _counts(split, data.classes)
        arrays[f"{part}_offsets"] = split.offsets
    if data.names:
        arrays["names"] = np.array(data.names, dtype=np.str_)
    return arrays


def _counts(split: ClientExamples, classes: int | None) -> np.ndarray[Any, Any]:
    labels: Any = split.y
    if classes is None or not isinstance(labels, Tensor) or labels.ndim != 1:
        return np.zeros((split.clients, 0), dtype=np.int64)
    rows = np.split(labels.numpy(), split.offsets[1:-1])
    return np.stack([np.bincount(row, minlength=classes) for row in rows])


def _digest(data: FederatedData) -> str:
    found = hashlib.blake2b(digest_size=8)
    for split in (data.train, data.test):
        found.update(split.offsets.tobytes())
        if split.rows is not None:
            found.update(split.rows.tobytes())
        for leaf in tree_leaves((split.x, split.y)):
            found.update(repr((tuple(leaf.shape), str(leaf.dtype))).encode())
            found.update(leaf.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def load_run(folder: Path | str) -> SavedRun:
    """A run that the command line or `Run.save` wrote: finished, under way or interrupted."""
    return SavedRun(read_run(Path(folder)))


class SavedRun(ReprCard):
    """A run folder, read. Models come out of it where its data and code are still to be had."""

    def __init__(self, result: RunResult) -> None:
        self._result = result
        self.path = result.path

    def title(self) -> str:
        return f"Run of {self._result.title}"

    def fields(self) -> dict[str, str]:
        done, planned = self._result.done_rounds, self._result.planned_rounds
        rounds = (
            format_thousands(done) if done == planned else f"{format_thousands(done)} of {planned}"
        )
        scores = format_last_scores(self.summary) if len(self.history) else {}
        where = {"folder": str(self.path)}
        return {
            "clients": format_thousands(self._result.clients),
            "rounds": rounds,
            **scores,
            **where,
        }

    @property
    def history(self) -> pd.DataFrame:
        """round, stage, client, and a column per metric."""
        return self._result.history

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round: seconds, bytes, steps, the range of μ, consensus distance."""
        return self._result.rounds

    @property
    def config(self) -> dict[str, Any]:
        """Its settings by section; where it was made in Python, as far as they can be told."""
        return dict(self._result.config)

    @property
    def complete(self) -> bool:
        return self._result.finished

    @cached_property
    def summary(self) -> dict[str, Any]:
        """As summary.json has it, or made of what there is so far."""
        if self._result.finished:
            return RunFolder(self.path).summary()
        return {
            "method": dict(self._result.method_options),
            **summarize_attacked(self.history, self.rounds, self._result.attackers),
            "finished": False,
        }

    @cached_property
    def run(self) -> Run:
        """The run itself, from its newest checkpoint and its data."""
        return restored(RunFolder(self.path))

    def personal(self, client: int, stage: Stage = "mixed") -> nn.Module:
        """The client's own model, as `Run.personal` gives it."""
        return self.run.personal(client, stage)

    def state(self, client: int) -> ClientState:
        return self.run.state(client)

    def checkpoint(self) -> Checkpoint:
        """Its newest checkpoint, with the history up to it: for `simulate(resume=…)`."""
        return RunFolder(self.path).load_checkpoint()

    def plot(self, metric: str | None = None, stage: Stage | None = None) -> Figure:
        """Learning curves: the mean over clients at both stages or one, and their quartiles."""
        from quiverfl.results.figures import plot_run

        return plot_run(self.history, self._result.title, metric, stage)
