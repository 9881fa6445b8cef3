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

from quiverfl.card import Shown, thousands
from quiverfl.data.federated import FederatedData
from quiverfl.data.split import Split
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.simulation_run import ClientState, Run, Stage, last_scores
from quiverfl.errors import QuiverError
from quiverfl.experiment import Experiment, inputs_of, restored
from quiverfl.methods.optional import adaptation
from quiverfl.methods.options import options_of
from quiverfl.results.run_files import RunResult, read_run
from quiverfl.results.summary import summarize_attacked
from quiverfl.run_folder import RunFolder
from quiverfl.run_lines import appending

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
    with folder.alone():
        if folder.holds_run():
            raise QuiverError(f"{path} holds a run already: choose another folder.")
        experiment = run.made_from
        if isinstance(experiment, Experiment):
            folder.open(
                experiment.config,
                inputs_of(experiment.config, experiment.dataset),
                experiment.partition,
                simulation.topology,
                simulation.method,
            )
        else:
            shares = _shares(simulation.data)
            folder.describe(described(run, name), shares, simulation.method, run.attackers)
        with appending(path, folder.writing, None) as lines:
            checkpoint = run.checkpoint()
            for evaluation in checkpoint.history.evaluations:
                lines.evaluated(*evaluation)
            for record in checkpoint.history.records:
                lines.finished(record)
        folder.save(checkpoint)
        if run.complete:
            folder.close(run.summary, adaptation(simulation.method, simulation.task))
    return path


def described(run: Run, name: str | None) -> dict[str, dict[str, Any]]:
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
        "method": {"name": method.name, **options_of(method)},
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


def _counts(split: Split, classes: int | None) -> np.ndarray[Any, Any]:
    labels: Any = split.y
    if classes is None or not isinstance(labels, Tensor) or labels.ndim != 1:
        return np.zeros((split.clients, 0), dtype=np.int64)
    rows = np.split(labels.numpy(), split.offsets[1:-1])
    return np.stack([np.bincount(row, minlength=classes) for row in rows])


def _digest(data: FederatedData) -> str:
    found = hashlib.blake2b(digest_size=8)
    for split in (data.train, data.test):
        found.update(split.offsets.tobytes())
        if split.places is not None:
            found.update(split.places.tobytes())
        for leaf in tree_leaves((split.x, split.y)):
            found.update(repr((tuple(leaf.shape), str(leaf.dtype))).encode())
            found.update(leaf.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def load_run(folder: Path | str) -> SavedRun:
    """A run that the command line or `Run.save` wrote: finished, under way or interrupted."""
    return SavedRun(read_run(Path(folder)))


class SavedRun(Shown):
    """A run folder, read. Models come out of it where its data and code are still to be had."""

    def __init__(self, result: RunResult) -> None:
        self._result = result
        self.path = result.path

    def title(self) -> str:
        return f"Run of {self._result.title}"

    def facts(self) -> dict[str, str]:
        done, planned = self._result.done_rounds, self._result.planned_rounds
        rounds = thousands(done) if done == planned else f"{thousands(done)} of {planned}"
        scores = last_scores(self.summary) if len(self.history) else {}
        where = {"folder": str(self.path)}
        return {"clients": thousands(self._result.clients), "rounds": rounds, **scores, **where}

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
        return RunFolder(self.path).newest()

    def plot(self, metric: str | None = None) -> Figure:
        """Learning curves: the mean over clients at both stages, and their quartiles."""
        from quiverfl.results.learning_curves import plot_run

        return plot_run(self.history, self._result.title, metric)
