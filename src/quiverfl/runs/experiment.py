"""A configuration → objects → a run in its folder."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.clock.formats import hash_file
from quiverfl.data.dataset import Dataset, describe_dataset
from quiverfl.data.federated import FederatedData, federate, number_own_labels
from quiverfl.data.partition import Partition, check_partition, make_partition
from quiverfl.data.sources import load_dataset
from quiverfl.engine.checks.method import check_method_parts
from quiverfl.engine.history import Recorder, check_callbacks
from quiverfl.errors import Interrupted, QuiverError, Stopped
from quiverfl.methods import METHODS
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import adaptation_phase, split_task
from quiverfl.methods.push_sum import offers_step
from quiverfl.models import MODELS, PRETRAINED, make_model
from quiverfl.models.pretrained import hash_weights
from quiverfl.runs.callbacks import make_trackers
from quiverfl.runs.config import Config, TrackConfig, parse_config
from quiverfl.runs.config_files import load_config
from quiverfl.runs.folder import RunFolder
from quiverfl.runs.progress import progress as shown
from quiverfl.runs.run import Run
from quiverfl.runs.simulate import Simulation, make_seeded_topology, make_usual_topology
from quiverfl.support.cards import ReprCard, format_thousands
from quiverfl.support.references import hash_source, is_reference
from quiverfl.task import Task
from quiverfl.topologies import Membership, Topology, make_topology, with_members

# Ctrl-C in a run that writes to a folder: the round it is in is finished and saved.


@contextlib.contextmanager
def stopping_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C was pressed; a second Ctrl-C ends at once.

    If other code handles Ctrl-C, or this is not the main thread, nothing is changed.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(RuntimeError):  # it came while something else was being printed
            words = "interrupted: the run ends after this round; Ctrl-C again ends it at once."
            print(words, file=sys.stderr, flush=True)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True, eq=False, repr=False)
class Experiment(ReprCard):
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
            config = _parse_sections({} if config is None else config, dataset)
        method = make_method(config)
        loaded = load_data(config) if dataset is None else normalize_inputs(config, dataset)
        partition = partition_data(config, loaded)
        augment = None if config.data.augment == "none" else config.data.augment
        tests = config.data.unseen_options()
        data = federate(loaded, partition, augment, config.data.mapped, tests)
        topology = make_run_topology(config, method, data.clients)
        own = None
        if config.task.labels == "own":
            data, classes = number_own_labels(data)
            own = [max(1, len(known)) for known in classes]
        return cls(
            config, loaded, make_task(config, loaded, own), data, partition, method, topology
        )

    @classmethod
    def from_toml(cls, path: Path | str, **settings: Any) -> Experiment:
        """From a TOML file, or a configuration that comes with Quiver by its name.

        `settings` win over it: whole sections, run={"rounds": 5}, or keys, **{"run.rounds": 5}.
        """
        return cls.of(load_config(Path(path)).with_values(_keys(settings)))

    def own_classes(self, client: int) -> tuple[str, ...] | None:
        """The names of the classes that this client's model tells apart; None for all of them."""
        if self.config.task.labels == "common":
            return None
        counts = self.partition.train_counts[client] + self.partition.test_counts[client]
        return tuple(self.dataset.class_names[number] for number in np.flatnonzero(counts))

    def title(self) -> str:
        return f"Experiment with {self.method.title}"

    def fields(self) -> dict[str, str]:
        config = self.config
        return {
            "data": f"{config.data.name}, {config.data.partition}",
            "clients": format_thousands(self.data.clients),
            "model": config.model.name,
            "topology": self.topology.name,
            "rounds": format_thousands(config.run.rounds),
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
        ends is returned as it is; its folder holds an unfinished run then. With a folder Ctrl-C
        ends the run after the round it is in, with a checkpoint, and a second one at once; both
        raise `Interrupted`, which says how to continue.
        """
        label = self.method.title
        with shown(label, self.config.run.rounds, quiet=not progress) as bar:
            recorders = [*check_callbacks(callbacks), *([] if bar is None else [bar])]
            if folder is None:
                if self.config.track != TrackConfig():
                    raise QuiverError(
                        "[track] writes beside a run: give a folder, or callbacks such as "
                        "callbacks=[qv.TensorBoard(folder)]."
                    )
                self.simulation.check()
                run = self.simulation.run(callbacks=recorders)
            else:
                run = _run_until_interrupted(self, RunFolder(Path(folder)), recorders)
        return _mark_run(run, self)

    def open_folder(self, folder: RunFolder) -> None:
        """Write the files of a new run of it, or check those of an earlier start."""
        inputs = digest_inputs(self.config, self.dataset)
        described = describe_dataset(self.dataset)
        folder.open(self.config, inputs, self.partition, self.topology, self.method, described)

    @cached_property
    def simulation(self) -> Simulation:
        return Simulation(
            self.task,
            self.data,
            self.method,
            self.topology,
            self.config.training,
            self.config.run.for_clients(self.data.clients),
            self.config.transforms(),
            timing=self.config.timing(self.data.clients),
        )


def _parse_sections(tree: Mapping[str, Any], dataset: Dataset | None) -> Config:
    if not isinstance(tree, Mapping):
        raise QuiverError(
            f"an experiment is made of a dictionary of sections, such as {{'run': {{'rounds': 5}}}}"
            f", not of a {type(tree).__name__}; a file: qv.Experiment.from_toml."
        )
    sections = {name: dict(v) if isinstance(v, Mapping) else v for name, v in tree.items()}
    if dataset is not None and isinstance(sections.get("data", {}), dict):
        sections["data"] = {"name": dataset.name, **sections.get("data", {})}
    return parse_config(sections, "experiment")


def _keys(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Sections and keys as keys; a method's name first, since it takes the options before it."""
    pairs: list[tuple[str, Any]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and "." not in name:
            pairs += [(f"{name}.{key}", inner) for key, inner in value.items()]
        else:
            pairs.append((name, value))
    return sorted(pairs, key=lambda pair: pair[0] != "method.name")


def _mark_run(run: Run, experiment: Experiment) -> Run:
    run.made_from = experiment
    run.config = experiment.config.model_dump(mode="json")
    return run


def _run_until_interrupted(
    experiment: Experiment, folder: RunFolder, callbacks: Sequence[Recorder]
) -> Run:
    """Run it in a folder; Ctrl-C ends in a sentence that says how to continue."""
    again = f"the same call, or `quiver resume {folder.path}`, continues"
    with stopping_on_interrupt() as stop:
        try:
            run = _run_here(experiment, folder, callbacks, stop)
        except Stopped as stopped:
            place = f"after round {stopped.rounds}, which is saved" if stopped.rounds else "at once"
            raise Interrupted(stopped.run, f"interrupted {place}; {again}.") from None
        except Interrupted as error:
            raise Interrupted(
                error.run,
                f"{error} From the last checkpoint {again}."
                if folder.has_results()
                else f"{error} Nothing was saved yet: the same call starts again.",
            ) from None
        if stop():  # in the last round, or while a callback ended it
            raise Interrupted(run, f"interrupted; what was computed is in {folder.path}.")
    return run


def _run_here(
    experiment: Experiment,
    folder: RunFolder,
    callbacks: Sequence[Recorder],
    stop: Callable[[], bool] = lambda: False,
) -> Run:
    """A new run in a folder, or what is there and, if it is not finished, the rest of it."""
    with folder.lock():
        if folder.has_results():
            folder.check_config(experiment.config)
        else:
            folder.clear_without_results()
        folder.check_inputs(digest_inputs(experiment.config, experiment.dataset))
        if folder.is_finished():
            return restore_run(folder, experiment)
        return _carry_out(experiment, folder, stop=stop, callbacks=callbacks)


def _carry_out(
    experiment: Experiment,
    folder: RunFolder,
    recorder: Recorder | None = None,
    stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Recorder] = (),
) -> Run:
    """Run the experiment, or the rest of it, in a folder that this process has locked."""
    simulation = experiment.simulation
    simulation.check()
    experiment.open_folder(folder)
    resume = folder.resume()
    if stop():
        raise Stopped(0 if resume is None else resume.round)
    recorders = [*callbacks, *make_trackers(experiment.config, folder.path)]
    with folder.record(recorder) as both:
        run = simulation.run(both, resume, folder.save_checkpoint, stop, recorders)
    if run.complete:
        folder.finish(run.summary, adaptation_phase(experiment.method, experiment.task))
    return run


def restore_run(folder: RunFolder, experiment: Experiment | None = None) -> Run:
    """The run of a folder at its newest checkpoint, with its data and models."""
    if experiment is None:
        config = folder.config()
        dataset = load_data(config)
        folder.check_inputs(digest_inputs(config, dataset))
        experiment = Experiment.of(config, dataset)
    checkpoint, simulation = folder.load_checkpoint(), experiment.simulation
    shard = simulation.shard()
    exchange = simulation.exchange(shard)
    checkpoint.apply(shard, exchange)
    return _mark_run(Run(simulation, shard, exchange, checkpoint.history), experiment)


def run_in_folder(
    config: Config,
    path: Path,
    recorder: Recorder | None = None,
    dataset: Dataset | None = None,
    stop: Callable[[], bool] = lambda: False,
    wait: bool = False,
) -> dict[str, Any]:
    """Start a run in a new folder, or resume the run that is there. Returns its summary.

    A folder that holds a run of another configuration, or of other data under the same name, is
    refused. A finished run is not repeated; its data may be gone. A folder that another process
    writes to is refused, or with `wait` waited for. Once `stop()` is true the run ends with
    `Stopped` after the round it is in, and a checkpoint of it.
    """
    folder = RunFolder(path)
    summary = read_finished_summary(config, folder, dataset)
    if summary is not None:
        return summary
    with folder.lock(wait):
        summary = read_finished_summary(config, folder, dataset)  # by the lock's last holder
        if summary is not None:
            return summary
        folder.clear_without_results()
        loaded = load_data(config) if dataset is None else dataset
        folder.check_inputs(digest_inputs(config, loaded))
        _carry_out(Experiment.of(config, loaded), folder, recorder, stop)
        return folder.summary()


def read_finished_summary(
    config: Config, folder: RunFolder, dataset: Dataset | None
) -> dict[str, Any] | None:
    """The summary of a run that is over, if it is the one that is asked for."""
    if not folder.has_results():
        return None
    folder.check_config(config)
    if not folder.is_finished():
        return None
    digests = (
        digest_available_inputs(config, DatasetCache())
        if dataset is None
        else digest_inputs(config, dataset)
    )
    folder.check_inputs(digests)
    return folder.summary()


def make_method(config: Config) -> Method:
    """The configured method; without waiting, push-sum methods take the debiased step by default.

    Mass gathers at slow clients there, and the paper's η/μ moves fast ones by many times η.
    """
    kind, options = METHODS.find(config.method.name), config.method.options()
    named = {"step", "step_floor"} & options.keys()
    if config.clock.asynchronous and not named and offers_step(kind):
        options["step"] = "debiased"
    try:
        method = kind(**options)
    except TypeError as error:
        raise QuiverError(f"method {config.method.name!r}: {error}.") from error
    if not callable(getattr(method, "phases", None)):
        raise QuiverError(
            f"method.name = {config.method.name!r} gives a {type(method).__name__}, which is no "
            "method: name a class with phases, module:Class (docs/how-to/own-method.md)."
        )
    return method


def load_data(config: Config) -> Dataset:
    return normalize_inputs(config, _load_source(config))


def _load_source(config: Config) -> Dataset:
    return load_dataset(config.data.name, config.data.root, **config.data.options)


def normalize_inputs(config: Config, dataset: Dataset) -> Dataset:
    """The data as the weights of a pretrained network want it; else as it is standardised."""
    if config.model.name != PRETRAINED:
        return dataset
    statistics = getattr(make_task(config, dataset).skeleton, "input_statistics", None)
    return dataset if statistics is None else dataset.with_normalization(*statistics)


def digest_inputs(config: Config, dataset: Dataset) -> dict[str, str]:
    """Digests of what a run is made from beside its configuration: its data and your own code."""
    own = [config.data.name, config.model.name, config.method.name, config.topology.name]
    own += [config.task.loss, *(config.task.metrics or ())]
    options = config.model.options() if config.model.name == PRETRAINED else {}
    own += [name for name in (options.get("source"),) if isinstance(name, str)]
    code = {f"code of {name}": hash_source(name) for name in own if is_reference(name)}
    weights = {}
    if options.get("weights"):
        weights["weights of the model"] = hash_weights(Path(options["weights"]).expanduser())
    files = (config.devices.file, config.devices.traces)
    timed = {f"devices {name}": hash_file(Path(name)) for name in files if name is not None}
    return {f"data {config.data.name}": dataset.digest, **code, **weights, **timed}


def digest_available_inputs(config: Config, shelf: DatasetCache) -> dict[str, str]:
    """The same, or nothing if the data or code is gone: results outlive them."""
    try:
        return digest_inputs(config, shelf.take(config))
    except Exception:
        # Also whatever a function of your own raises: a run that has to be made will say it.
        return {}


class DatasetCache:
    """Data sets that several runs have in common, each loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Dataset] = {}

    def take(self, config: Config) -> Dataset:
        data = config.data
        key = json.dumps([data.name, data.root, data.options], default=str)
        if key not in self._loaded:
            self._loaded[key] = _load_source(config)
        return normalize_inputs(config, self._loaded[key])


def partition_data(config: Config, dataset: Dataset) -> Partition:
    """The partition of the data; refused if no client has test data."""
    data = config.data
    seed = config.run.seed if data.seed is None else data.seed
    partition = make_partition(
        dataset,
        data.partition,
        data.clients,
        seed,
        samples_per_client=data.samples_per_client,
        test_per_client=data.test_per_client,
        validation=data.validation,
        **data.partition_options(),
    )
    if data.unseen is not None:
        partition = partition.hold_out(data.unseen, seed)
    check_partition(dataset, partition)
    return partition


def make_task(config: Config, dataset: Dataset, own: Sequence[int] | None = None) -> Task:
    """The configured task; `own` are the classes of every client, where each has its own."""
    options = config.model.options()
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}
    name, shape, outputs = config.model.name, dataset.input_shape, dataset.outputs
    for what, said in (("inputs", shape), ("targets", outputs)):
        if isinstance(said, dict) and name in MODELS:
            raise QuiverError(
                f"model {name!r} cannot be made for several {what} ({', '.join(said)}): name a "
                "model of your own, module:function."
            )
    models = {
        classes: partial(make_model, name, shape, classes, **options) for classes in set(own or ())
    }
    task = Task(
        model=lambda: make_model(name, shape, outputs, **options),
        own_models=tuple(models[classes] for classes in own or ()),
        personal=config.model.personal,
        loss=config.task.loss,
        metrics=config.task.metrics,
        inputs=config.task.inputs,
        buffers=config.task.buffers,
    )
    return split_task(make_method(config), task)


def make_run_topology(config: Config, method: Method, clients: int) -> Topology:
    """The configured topology, or the usual one of the method; members may join it and leave."""
    data = config.data
    if not data.changes_members:
        return _make_topology(config, method, clients)
    membership = Membership(
        clients, data.joins or (), data.leaves or (), data.join_mass, config.run.seed
    )
    make = partial(_make_topology, config, method)
    return with_members(make, membership, gives_mass=method.mass is not None)


def _make_topology(config: Config, method: Method, clients: int) -> Topology:
    name, options = config.topology.name, config.topology.options()
    if name == "auto":
        if config.clock.waits == "pairs" and method.topology not in ("isolated", "star"):
            return make_topology("full", clients)  # any two clients that are ready exchange
        return make_usual_topology(method, clients, config.run.seed, options)
    check_method_parts(method)
    return make_seeded_topology(name, clients, config.run.seed, options)
