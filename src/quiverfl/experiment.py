"""A configuration → objects → a run in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quiverfl.callbacks.progress import progress as shown
from quiverfl.card import Shown, thousands
from quiverfl.config import Config, load_config, parse
from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import FederatedData, federate
from quiverfl.data.partition import Partition, make_partition
from quiverfl.data.sources import load_dataset
from quiverfl.engine.fit import declared
from quiverfl.engine.history import Recorder
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.simulate import Simulation
from quiverfl.engine.simulation_run import Run
from quiverfl.errors import QuiverError, Stopped
from quiverfl.methods import find_method
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import adaptation
from quiverfl.models import MODELS, make_model
from quiverfl.references import is_reference, source_digest
from quiverfl.run_folder import RunFolder
from quiverfl.task import Task
from quiverfl.topologies import Topology, make_topology, topology_options

TOPOLOGY_OPTIONS = {
    "isolated": (),
    "star": ("sampled", "link_failure"),  # which it refuses
    "random_regular": ("neighbors", "participation", "link_failure"),
    "random_push": ("neighbors", "participation", "link_failure"),
}
"""Which of the options that "auto" takes each of them has a use for."""


@dataclass(frozen=True, eq=False, repr=False)
class Experiment(Shown):
    """Everything a run needs, made from its configuration."""

    config: Config
    dataset: Dataset
    task: Task
    data: FederatedData
    partition: Partition
    method: Method
    topology: Topology

    @classmethod
    def of(
        cls, config: Config | Mapping[str, Any] | None = None, dataset: Dataset | None = None
    ) -> Experiment:
        """From a configuration, or a dictionary of its sections; what is left out has its default.

        `dataset` is used in place of the one that [data] names.
        """
        if not isinstance(config, Config):
            config = _parsed({} if config is None else config, dataset)
        method = make_method(config)
        found = load_data(config) if dataset is None else dataset
        shares = share_out(config, found)
        augment = None if config.data.augment == "none" else config.data.augment
        data = federate(found, shares, augment, config.data.mapped)
        topology = topology_for(config, method, data.clients)
        return cls(config, found, make_task(config, found), data, shares, method, topology)

    @classmethod
    def from_toml(cls, path: Path | str, **settings: Any) -> Experiment:
        """From a TOML file, or a configuration that comes with Quiver by its name.

        `settings` win over it: whole sections, run={"rounds": 5}, or keys, **{"run.rounds": 5}.
        """
        return cls.of(load_config(Path(path)).with_values(_keys(settings)))

    def title(self) -> str:
        return f"Experiment with {self.method.title}"

    def facts(self) -> dict[str, str]:
        config = self.config
        return {
            "data": f"{config.data.name}, {config.data.partition}",
            "clients": thousands(self.data.clients),
            "model": config.model.name,
            "topology": self.topology.name,
            "rounds": thousands(config.run.rounds),
            "seed": str(config.run.seed),
        }

    def run(
        self,
        folder: Path | str | None = None,
        callbacks: Sequence[Recorder] = (),
        progress: bool = False,
    ) -> Run:
        """Run it: in memory, or into a folder, as `quiver run` and `quiver resume` do.

        What a folder holds of this experiment already is not computed again. A run that a callback
        ends is returned as it is; its folder holds an unfinished run then.
        """
        label = self.method.title
        with shown(label, self.config.run.rounds, quiet=not progress) as bar:
            told = [*callbacks, *([] if bar is None else [bar])]
            if folder is None:
                self.simulation.check()
                run = self.simulation.run(callbacks=told)
            else:
                run = _run_here(self, RunFolder(Path(folder)), told)
        return _marked(run, self)

    @cached_property
    def simulation(self) -> Simulation:
        return Simulation(
            self.task,
            self.data,
            self.method,
            self.topology,
            self.config.training.training(),
            settings_of(self.config, self.data.clients),
            self.config.transforms(),
        )


def _parsed(tree: Mapping[str, Any], dataset: Dataset | None) -> Config:
    if not isinstance(tree, Mapping):
        raise QuiverError(
            f"an experiment is made of a dictionary of sections, such as {{'run': {{'rounds': 5}}}}"
            f", not of a {type(tree).__name__}; a file: qv.Experiment.from_toml."
        )
    sections = {name: dict(v) if isinstance(v, Mapping) else v for name, v in tree.items()}
    if dataset is not None and isinstance(sections.get("data", {}), dict):
        sections["data"] = {"name": dataset.name, **sections.get("data", {})}
    return parse(sections, "experiment")


def _keys(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Sections and keys as keys; a method's name first, since it takes the options before it."""
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and "." not in name:
            pairs += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            pairs.append((name, value))
    return sorted(pairs, key=lambda pair: pair[0] != "method.name")


def _marked(run: Run, experiment: Experiment) -> Run:
    run.made_from = experiment
    run.config = experiment.config.model_dump(mode="json")
    return run


def _run_here(experiment: Experiment, folder: RunFolder, callbacks: Sequence[Recorder]) -> Run:
    """A new run in a folder, or what is there and, if it is not finished, the rest of it."""
    with folder.alone():
        if folder.started():
            folder.check(experiment.config)
        else:
            folder.clear_unstarted()
        folder.check_inputs(inputs_of(experiment.config, experiment.dataset))
        if folder.finished():
            return restored(folder, experiment)
        return _carry_out(experiment, folder, callbacks=callbacks)


def _carry_out(
    experiment: Experiment,
    folder: RunFolder,
    recorder: Recorder | None = None,
    stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Recorder] = (),
) -> Run:
    """Run it, or the rest of it, in a folder that is this process's alone."""
    config, simulation = experiment.config, experiment.simulation
    simulation.check()
    inputs = inputs_of(config, experiment.dataset)
    folder.open(config, inputs, experiment.partition, experiment.topology, experiment.method)
    resume = folder.resume()
    if stop():
        raise Stopped(0 if resume is None else resume.round)
    with folder.recording(recorder) as both:
        run = simulation.run(both, resume, folder.save, stop, callbacks)
    if run.complete:
        folder.close(run.summary, adaptation(experiment.method, experiment.task))
    return run


def restored(folder: RunFolder, experiment: Experiment | None = None) -> Run:
    """The run of a folder at its newest checkpoint, with its data and models."""
    if experiment is None:
        config = folder.config()
        dataset = load_data(config)
        folder.check_inputs(inputs_of(config, dataset))
        experiment = Experiment.of(config, dataset)
    checkpoint, simulation = folder.newest(), experiment.simulation
    shard = simulation.shard()
    exchange = simulation.exchange(shard)
    checkpoint.apply(shard, exchange)
    return _marked(Run(simulation, shard, exchange, checkpoint.history), experiment)


def run_in_folder(
    config: Config,
    path: Path,
    recorder: Recorder | None = None,
    dataset: Dataset | None = None,
    stop: Callable[[], bool] = lambda: False,
    wait: bool = False,
) -> dict[str, Any]:
    """Start a run in a new folder, or resume what is there; its summary.

    A folder that holds a run of another configuration, or of other data under the same name, is
    refused. A finished run is not repeated; its data may be gone. A folder that another process
    writes to is refused, or with `wait` waited for. Once `stop()` is true the run ends with
    `Stopped` after the round it is in, and a checkpoint of it.
    """
    folder = RunFolder(path)
    summary = finished_summary(config, folder, dataset)
    if summary is not None:
        return summary
    with folder.alone(wait):
        summary = finished_summary(config, folder, dataset)  # by whoever was waited for
        if summary is not None:
            return summary
        folder.clear_unstarted()
        found = load_data(config) if dataset is None else dataset
        folder.check_inputs(inputs_of(config, found))
        _carry_out(Experiment.of(config, found), folder, recorder, stop)
        return folder.summary()


def finished_summary(
    config: Config, folder: RunFolder, dataset: Dataset | None
) -> dict[str, Any] | None:
    """The summary of a run that is over, if it is the one that is asked for."""
    if not folder.started():
        return None
    folder.check(config)
    if not folder.finished():
        return None
    there = inputs_there(config, DataShelf()) if dataset is None else inputs_of(config, dataset)
    folder.check_inputs(there)
    return folder.summary()


def make_method(config: Config) -> Method:
    try:
        return find_method(config.method.name)(**config.method.options())
    except TypeError as error:
        raise QuiverError(f"method {config.method.name!r}: {error}.") from error


def load_data(config: Config) -> Dataset:
    return load_dataset(config.data.name, config.data.root, **config.data.options)


def inputs_of(config: Config, dataset: Dataset) -> dict[str, str]:
    """Digests of what a run is made from beside its configuration: its data and your own code."""
    own = [config.data.name, config.model.name, config.method.name, config.topology.name]
    own += [config.task.loss, *(config.task.metrics or ())]
    code = {f"code of {name}": source_digest(name) for name in own if is_reference(name)}
    return {f"data {config.data.name}": dataset.digest, **code}


def inputs_there(config: Config, shelf: DataShelf) -> dict[str, str]:
    """The same, or nothing where the data or code is not to be had: results outlive them."""
    try:
        return inputs_of(config, shelf.take(config))
    except Exception:
        # Also whatever a function of your own raises: a run that has to be made will say it.
        return {}


class DataShelf:
    """Data sets that several runs have in common, each loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Dataset] = {}

    def take(self, config: Config) -> Dataset:
        data = config.data
        key = json.dumps([data.name, data.root, data.options], default=str)
        if key not in self._loaded:
            self._loaded[key] = load_data(config)
        return self._loaded[key]


def share_out(config: Config, dataset: Dataset) -> Partition:
    data = config.data
    return make_partition(
        dataset,
        data.partition,
        data.clients,
        config.run.seed if data.seed is None else data.seed,
        samples_per_client=data.samples_per_client,
        test_per_client=data.test_per_client,
        validation=data.validation,
        **data.partition_options(),
    )


def make_task(config: Config, dataset: Dataset) -> Task:
    options = config.model.options()
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    name, shape, outputs = config.model.name, dataset.input_shape, dataset.outputs
    for what, said in (("inputs", shape), ("targets", outputs)):
        if isinstance(said, dict) and name in MODELS:
            raise QuiverError(
                f"model {name!r} cannot be made for several {what} ({', '.join(said)}): name a "
                "model of your own, module:function."
            )
    return Task(
        model=lambda: make_model(name, shape, outputs, **options),
        personal=config.model.personal,
        loss=config.task.loss,
        metrics=config.task.metrics,
        inputs=config.task.inputs,
    )


def topology_for(config: Config, method: Method, clients: int) -> Topology:
    """The configured topology, or the usual one of the method."""
    declared(method)
    options = config.topology.options()
    name = config.topology.name
    if name == "auto":
        name = method.topology
        known = {"seed", *(key for keys in TOPOLOGY_OPTIONS.values() for key in keys)}
        for key in options:
            if key not in known:
                raise QuiverError(
                    f'topology.{key}: with name = "auto" the options are '
                    f"{', '.join(sorted(known))}; name a topology to give others."
                )
        wanted = (*TOPOLOGY_OPTIONS.get(name, ()), "seed")
        options = {key: value for key, value in options.items() if key in wanted}
        if "sampled" in wanted:
            options.setdefault("sampled", max(1, clients // 10))
        if "neighbors" in wanted:
            options.setdefault("neighbors", min(10, clients - 1))
    if "seed" in _parameters(name):
        options.setdefault("seed", config.run.seed)
    else:
        options.pop("seed", None)
    return make_topology(name, clients, **options)


def _parameters(name: str) -> Sequence[str]:
    return topology_options(name)


def settings_of(config: Config, clients: int) -> RunSettings:
    """[run] as the engine takes it."""
    run = config.run
    return RunSettings(
        rounds=run.rounds,
        seed=run.seed,
        dtype=getattr(torch, run.dtype),
        device=run.device,
        threads=run.threads,
        executor=run.executor,
        arithmetic=run.arithmetic,
        common_init=run.common_init,
        epochs_per_client=epochs_per_client(config, clients),
        evaluate_every=run.evaluate_every,
        keep_local=run.keep_local,
        gradients=run.gradients,
        checkpoint_every=run.checkpoint_every,
        precision=run.precision,
        compile=run.compile,
        states=run.states,
    )


def epochs_per_client(config: Config, clients: int) -> tuple[int, ...] | None:
    """A list as given, or equal groups of clients with their own number of epochs each."""
    if config.run.epochs_per_client is not None and config.run.epoch_groups is not None:
        raise QuiverError("run.epochs_per_client and run.epoch_groups: give one of them.")
    if config.run.epochs_per_client is not None:
        return config.run.epochs_per_client
    if config.run.epoch_groups is None:
        return None
    groups = config.run.epoch_groups
    return tuple(groups[client * len(groups) // clients] for client in range(clients))
