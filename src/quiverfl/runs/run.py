"""Runs: live, as a simulation leaves them, and read from their folders.

`Run.save` writes the folder that the command line writes; `load_run` reads it.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quiverfl.clock.player import Player
from quiverfl.data.examples import ClientExamples
from quiverfl.data.federated import FederatedData, InputTransform
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.evaluation import client_model
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.history import History
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError, suggest
from quiverfl.methods.optional import adaptation_phase
from quiverfl.methods.state import Role, field_roles
from quiverfl.options import python_number, read_options
from quiverfl.results.run_files import RunResult, read_run
from quiverfl.results.summary import summarize_attacked
from quiverfl.runs.folder import RunFolder
from quiverfl.support import durable
from quiverfl.support.cards import ReprCard, format_thousands
from quiverfl.task import InputStyle, Params, call_arguments
from quiverfl.transforms.attacks import choose_attackers
from quiverfl.trees import Tree, tree_map
from quiverfl.types import Stage

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from quiverfl.runs.simulate import Simulation


def format_last_scores(summary: Mapping[str, Any]) -> dict[str, str]:
    """The last mean over clients at each stage, in words."""
    return {
        f"{stage} {summary['metric']}": f"{reports['last']['mean']:.4f}"
        for stage, reports in summary["stages"].items()
    }


class ClientState(dict[str, Any]):
    """A client's state by field; `state.u` and `state["u"]` are the same."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; {suggest(name, self)}") from None


class Prepared(nn.Module):
    """A model that takes inputs as they were in the data, before they were normalised."""

    def __init__(
        self, model: nn.Module, prepare: InputTransform, inputs: InputStyle = "arguments"
    ) -> None:
        super().__init__()
        self.model, self.prepare, self._inputs = model, prepare, inputs

    def forward(self, *several: Tree, **named: Tree) -> Any:
        """Several inputs are arguments of the model, or one dictionary or tuple."""
        x = named or (several[0] if len(several) == 1 else several)
        like = next(self.model.parameters())

        def cast(leaf: Tensor) -> Tensor:
            return leaf.to(like.device, like.dtype if leaf.is_floating_point() else None)

        arguments, keywords = call_arguments(tree_map(cast, self.prepare(x)), self._inputs)
        return self.model(*arguments, **keywords)


class Source(Protocol):
    """The origin of a run, if a run folder can record how to make it again."""

    def open_folder(self, folder: RunFolder) -> None: ...


class AnyRun(ReprCard):
    """Attributes and methods that live runs share with runs read from a folder."""

    method_title: str
    clients: int
    planned_rounds: int | None

    @property
    @abstractmethod
    def done_rounds(self) -> int: ...

    @property
    @abstractmethod
    def history(self) -> pd.DataFrame:
        """round, stage, client, and a column per metric."""

    @property
    @abstractmethod
    def rounds(self) -> pd.DataFrame:
        """One row per round: seconds, bytes, steps, the range of μ, consensus distance."""

    @property
    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """last / best / mean of the last ten, per stage; bytes, steps, seconds."""

    def title(self) -> str:
        return f"Run of {self.method_title}"

    def fields(self) -> dict[str, str]:
        done, planned = self.done_rounds, self.planned_rounds
        of = "" if planned in (None, done) else f" of {format_thousands(planned or 0)}"
        return {
            "clients": format_thousands(self.clients),
            "rounds": f"{format_thousands(done)}{of}",
            **(format_last_scores(self.summary) if len(self.history) else {}),
        }

    def plot(
        self, *files: Path | str, stage: Stage | None = None, metric: str | None = None
    ) -> Figure:
        """Learning curves: the mean over clients at both stages or one, and their quartiles.

        Files end in .pdf, .svg or .png.
        """
        from quiverfl.results.figures import plot_run, save_figure
        from quiverfl.results.tables import ResultFiles

        places = [Path(file) for file in files]
        ResultFiles(figures=places).check(("table:", "plot:", "plot:"))
        figure = plot_run(self.history, self.method_title, metric, stage)
        for place in places:
            save_figure(figure, place)
        return figure


class Run(AnyRun):
    """History, states and models of a simulation."""

    config: dict[str, Any] | None = None
    """The configuration that it was made from, if there was one."""
    ended_early: bool = False
    """Whether `run.patience` ended it."""
    made_from: Source | None = None
    """The Experiment it was made from, where there was one."""

    def __init__(
        self, simulation: Simulation, shard: Shard, exchange: Exchange | Player, history: History
    ) -> None:
        self.simulation = simulation
        self._task, self._data = simulation.task, simulation.data
        self._shard, self._exchange, self._history = shard, exchange, history
        self.method_title, self.clients = shard.method.title, len(shard.ids)
        self.planned_rounds = simulation.settings.rounds

    @property
    def done_rounds(self) -> int:
        return len(self._history.records)

    @property
    def complete(self) -> bool:
        """Whether the run is over: not if a callback stopped it, it was interrupted or diverged."""
        return self.ended_early or self.done_rounds >= self.simulation.settings.rounds

    @property
    def history(self) -> pd.DataFrame:
        """round, stage, client, and a column per metric."""
        return self._history.frame()

    @property
    def rounds(self) -> pd.DataFrame:
        """One row per round: seconds, bytes, steps, the range of μ, consensus distance."""
        return self._history.rounds()

    @property
    def summary(self) -> dict[str, Any]:
        """last / best / mean of the last ten, per stage; bytes, steps, seconds."""
        method = self._shard.method
        return {
            "method": {"name": method.name, **read_options(method)},
            **summarize_attacked(self.history, self.rounds, self.attackers),
            "carried_out": self._shard.execution.record,
        }

    @property
    def attackers(self) -> list[int]:
        """Clients that were made to attack: reported means leave them out."""
        made = self.simulation
        attackers = choose_attackers(
            made.transforms.adversary, made.settings.seed, made.topology.clients
        )
        return [int(client) for client in attackers]

    def personal(self, client: int, stage: Stage = "mixed") -> nn.Module:
        """The client's own model, ready to use: after the last communication, or before it.

        It takes inputs as they are in the data. Where the data were normalised for training the
        model does that itself (`.prepare`), and the bare model is its `.model`.
        """
        params, statistics = self._client_model(client, stage)
        model = self._task.of_client(client).make_module(params, statistics)
        normalize = self._data.normalize or self._data.prepare
        return model if normalize is None else Prepared(model, normalize, self._task.inputs).eval()

    def state(self, client: int) -> ClientState:
        """The client's state; parts like u and v as named tensors. Without push-sum, mu is 1."""
        row = self._row(client)
        state = self._shard.state
        kinds = field_roles(type(state))
        fields = {
            name: self._name_leaves(client, role, getattr(state, name)[row].clone())
            for name, role in kinds.items()
        }
        return ClientState({"mu": torch.ones((), dtype=torch.float64), **fields})

    def parameters(self, client: int, stage: Stage = "mixed") -> dict[str, Tensor]:
        """The trained parameters of the client's model, by name; running statistics with them."""
        params, statistics = self._client_model(client, stage)
        named = self._task.of_client(client).named_params(params)
        if statistics is not None:
            named |= self._task.statistics_layout.split(statistics)
        return named

    def _client_model(self, client: int, stage: Stage) -> tuple[Params, Tensor | None]:
        if stage not in ("mixed", "local"):
            raise QuiverError(f"stage {stage!r}: {suggest(stage, ('mixed', 'local'))}")
        row = self._row(client)
        rounds = self.done_rounds
        if stage == "local" and row not in self._shard.local.points and rounds:
            early = rounds < self.simulation.settings.rounds
            why = "the run ended early." if early else "pass keep_local=True."
            raise QuiverError(f"the models before the last communication were not kept: {why}")
        return client_model(self._shard, row, stage)

    def checkpoint(self) -> Checkpoint:
        """The whole state as it is, a copy: `simulate(resume=…)` with the same arguments continues
        from it, or, after the last round, gives the same Run back without computing anything."""
        taken = Checkpoint.take(self.done_rounds, self._shard, self._exchange, self._history)
        return taken.copy()

    def save(self, folder: Path | str, name: str | None = None) -> Path:
        """Write a run folder, as the command line does: complete, or as far as it came.

        `quiver report` and `load_run` read it. `name` says what the data is called there, if no
        configuration says it. What is no configuration is described as far as it can be: names,
        options and sizes, and a digest of the data unless it has a name. Runs are seeds of one
        experiment if all of that is the same but their seeds.
        """
        place = durable.to_path(folder, "save: folder")
        target, simulation = RunFolder(place), self.simulation
        with target.lock():
            if target.holds_run():
                raise QuiverError(f"{folder} holds a run already: choose another folder.")
            if self.made_from is not None:
                self.made_from.open_folder(target)
            else:
                target.open_python_run(
                    _describe_run(self, name),
                    _count_classes(simulation.data),
                    simulation.method,
                    self.attackers,
                )
            checkpoint = self.checkpoint()
            with target.record(None) as lines:
                for evaluation in checkpoint.history.evaluations:
                    lines.on_evaluation(*evaluation)
                for record in checkpoint.history.records:
                    lines.on_round_end(record)
            target.save_checkpoint(checkpoint)
            if self.complete:
                target.finish(self.summary, adaptation_phase(simulation.method, simulation.task))
        return target.path

    def _name_leaves(self, client: int, role: Role, leaf: Tensor) -> Any:
        task = self._task.of_client(client)
        layouts = {"shared": task.shared_layout, "personal": task.personal_layout}
        return leaf if role not in layouts else layouts[role].split(leaf)

    def _row(self, client: int) -> int:
        count = len(self._shard.ids)
        number = python_number(client)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise QuiverError(f"client {client!r}: there are {count} clients, 0 … {count - 1}.")
        return number


def _describe_run(run: Run, name: str | None) -> dict[str, dict[str, Any]]:
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
        source = {"name": "own arrays", "partition": "given", "digest": _hash_data(data)}
    clients, unseen = data.clients, data.unseen
    if unseen is not None:
        clients += unseen.data.clients
        held_out = list(unseen.data.names) or unseen.data.clients
        source = {"unseen": held_out, **source, **unseen.record()}
    loss = getattr(task.loss, "__name__", type(task.loss).__name__)
    size = task.shared_layout.size + task.personal_layout.size
    return {
        "data": {**source, "clients": clients},
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
        **({} if simulation.timing is None else simulation.timing.record()),
        "run": settings,
    }


def _count_classes(data: FederatedData) -> dict[str, np.ndarray[Any, Any]]:
    """Content of partition.npz: counts per class, if there are classes."""
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


def _hash_data(data: FederatedData) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for split in (data.train, data.test):
        digest.update(split.offsets.tobytes())
        if split.rows is not None:
            digest.update(split.rows.tobytes())
        for leaf in tree_leaves((split.x, split.y)):
            digest.update(repr((tuple(leaf.shape), str(leaf.dtype))).encode())
            digest.update(leaf.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class SavedRun(AnyRun):
    """A run folder, read. Models come out of it where its data and code are still to be had."""

    def __init__(self, result: RunResult) -> None:
        self._result, self.path = result, result.path
        self.method_title, self.clients = result.title, result.clients
        self.planned_rounds = result.planned_rounds

    def fields(self) -> dict[str, str]:
        return {**super().fields(), "folder": str(self.path)}

    @property
    def done_rounds(self) -> int:
        return self._result.done_rounds

    @property
    def history(self) -> pd.DataFrame:
        return self._result.history

    @property
    def rounds(self) -> pd.DataFrame:
        return self._result.rounds

    @property
    def config(self) -> dict[str, Any]:
        """Settings by section; of a run made in Python, as far as they can be written."""
        return dict(self._result.config)

    @property
    def complete(self) -> bool:
        return self._result.finished

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of summary.json, or of what there is so far."""
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
        from quiverfl.runs.experiment import restore_run

        return restore_run(RunFolder(self.path))

    def personal(self, client: int, stage: Stage = "mixed") -> nn.Module:
        """The client's own model, as `Run.personal` gives it."""
        return self.run.personal(client, stage)

    def state(self, client: int) -> ClientState:
        return self.run.state(client)

    def checkpoint(self) -> Checkpoint:
        """Its newest checkpoint, with the history up to it: for `simulate(resume=…)`."""
        return RunFolder(self.path).load_checkpoint()


def load_run(folder: Path | str) -> SavedRun:
    """A run that the command line or `Run.save` wrote: finished, under way or interrupted."""
    return SavedRun(read_run(durable.to_path(folder, "load_run: folder")))
