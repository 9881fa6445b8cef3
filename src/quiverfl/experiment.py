"""A configuration → objects → a run in its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from quiverfl.config import Config
from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import FederatedData, federate
from quiverfl.data.partition import Partition, partition
from quiverfl.data.sources import load_dataset
from quiverfl.engine.history import Recorder
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.simulate import Simulation
from quiverfl.errors import QuiverError, Stopped
from quiverfl.methods import find_method
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import adaptation
from quiverfl.models import make_model
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


@dataclass(frozen=True, eq=False)
class Experiment:
    """Everything a run needs, made from its configuration."""

    config: Config
    task: Task
    data: FederatedData
    partition: Partition
    method: Method
    topology: Topology

    @classmethod
    def of(cls, config: Config, dataset: Dataset | None = None) -> Experiment:
        method = make_method(config)
        found = load_data(config) if dataset is None else dataset
        shares = share_out(config, found)
        data = federate(
            found, shares, None if config.data.augment == "none" else config.data.augment
        )
        topology = topology_for(config, method, data.clients)
        return cls(config, make_task(config, found), data, shares, method, topology)

    @cached_property
    def simulation(self) -> Simulation:
        return Simulation(
            self.task,
            self.data,
            self.method,
            self.topology,
            self.config.training.training(),
            settings_of(self.config, self.data.clients),
        )


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
        inputs = inputs_of(config, found)
        folder.check_inputs(inputs)
        experiment = Experiment.of(config, found)
        experiment.simulation.check()
        folder.open(config, inputs, experiment.partition, experiment.topology, experiment.method)
        resume = folder.resume()
        if stop():
            raise Stopped(0 if resume is None else resume.round)
        with folder.recording(recorder) as both:
            run = experiment.simulation.run(both, resume, folder.save, stop)
        return folder.close(run.summary, adaptation(experiment.method, experiment.task))


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
    """Digests of what a run is made from beside its configuration: its data and one's own code."""
    own = [config.data.name, config.model.name, config.method.name, config.topology.name]
    own += [config.task.loss, *(config.task.metrics or ())]
    code = {f"code of {name}": source_digest(name) for name in own if is_reference(name)}
    return {f"data {config.data.name}": dataset.digest, **code}


def inputs_there(config: Config, shelf: DataShelf) -> dict[str, str]:
    """The same, or nothing where the data or code is not to be had: results outlive them."""
    try:
        return inputs_of(config, shelf.take(config))
    except Exception:
        # Also whatever a function of one's own raises: a run that has to be made will say it.
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
    return partition(
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
    return Task(
        model=lambda: make_model(name, shape, outputs, **options),
        personal=config.model.personal,
        loss=config.task.loss,
        metrics=config.task.metrics,
    )


def topology_for(config: Config, method: Method, clients: int) -> Topology:
    """The configured topology, or the usual one of the method."""
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
        common_init=run.common_init,
        epochs_per_client=epochs_per_client(config, clients),
        evaluate_every=run.evaluate_every,
        keep_local=run.keep_local,
        gradients=run.gradients,
        checkpoint_every=run.checkpoint_every,
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
