"""A configuration on many ranks → one run folder, which rank 0 alone writes."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quiverfl
from quiverfl.data.dataset import describe_dataset
from quiverfl.data.federated import make_federated
from quiverfl.data.partition import Partition
from quiverfl.distributed.processes import restart_count
from quiverfl.distributed.ranks import Ranks
from quiverfl.distributed.simulation import RankSimulation, federation_of
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.history import Recorder, Recorders
from quiverfl.errors import QuiverError, Stopped
from quiverfl.identity import flatten_settings
from quiverfl.methods.optional import adaptation_phase
from quiverfl.runs.callbacks import make_trackers
from quiverfl.runs.config import Config
from quiverfl.runs.experiment import (
    digest_inputs,
    load_data,
    make_method,
    make_run_topology,
    make_task,
    partition_data,
    read_finished_summary,
)
from quiverfl.runs.folder import RunFolder

Stop = Callable[[], bool]


def run_on_ranks(
    ranks: Ranks,
    config: Config,
    path: Path,
    recorder: Recorder | None = None,
    stop: Stop = lambda: False,
    continues: bool = False,
) -> dict[str, Any]:
    """Run a configuration, as `run_in_folder` does in one process, and return its summary.

    Only rank 0 reads and writes `path`. What one rank refuses, all refuse. An interrupted run is
    resumed if the command `continues` one, or in a new attempt after a rank was lost.
    """
    if config.run.patience is not None:
        raise QuiverError(
            f"run.patience = {config.run.patience}: a run on several ranks does not end early; "
            "leave it out, or run it in one process."
        )
    check_same(ranks, {"quiverfl": quiverfl.__version__, "torch": str(torch.__version__)}, config)
    folder = RunFolder(path) if ranks.rank == 0 else None
    with _lock_folder(ranks, folder, continues or restart_count() > 0):
        finished = ranks.run_on_all(lambda: folder and read_finished_summary(config, folder, None))
        finished = ranks.from_first(finished)
        if finished:
            return dict(finished)
        prepared = ranks.run_on_all(lambda: _prepare(config, ranks))
        check_same(ranks, prepared.digests)
        ranks.run_on_all(prepared.simulation.check)
        resume = ranks.run_on_all(lambda: prepared.open(folder) if folder else None)
        done_rounds = ranks.from_first(0 if resume is None else resume.round)
        if ranks.any(stop()):
            raise Stopped(done_rounds)
        trackers = make_trackers(config, path) if folder else []
        summary = _run_rounds(prepared, folder, recorder, trackers, resume, stop)
        return dict(ranks.from_first(summary))


@dataclass(frozen=True, eq=False)
class _PreparedRun:
    """What a rank needs for a run."""

    config: Config
    inputs: dict[str, str]
    described: dict[str, Any]
    partition: Partition
    simulation: RankSimulation

    @property
    def digests(self) -> dict[str, str]:
        """What must be the same on every rank apart from the configuration."""
        digest = hashlib.sha256()
        for array in self.partition.arrays().values():
            digest.update(np.ascontiguousarray(array).tobytes())
        return {**self.inputs, "partition of the data": digest.hexdigest()}

    def open(self, folder: RunFolder) -> Checkpoint | None:
        simulation = self.simulation
        folder.check_inputs(self.inputs)
        folder.open(
            self.config,
            self.inputs,
            self.partition,
            simulation.topology,
            simulation.method,
            self.described,
        )
        return folder.resume()


def _prepare(config: Config, ranks: Ranks) -> _PreparedRun:
    """Everything from the configuration. A rank reads the examples of its own clients alone."""
    if config.data.unseen is not None:
        raise QuiverError(
            "data.unseen on several ranks: clients that nobody has seen are tested in one process; "
            "run it without --ranks, or leave data.unseen out."
        )
    if config.data.changes_members:
        raise QuiverError(
            "data.joins and data.leaves on several ranks: a newcomer is given a model from another "
            "client, in one process; run it without --ranks, or leave them out."
        )
    if config.task.labels == "own":
        raise QuiverError(
            'task.labels = "own" on several ranks: clients with models of their own are computed '
            "in one process; run it without --ranks, or leave task.labels out."
        )
    if config.clock.waits is not None:
        raise QuiverError(
            f'clock.waits = "{config.clock.waits}" on several ranks: a run with a clock is made in '
            "one process. Run it without --ranks, or time it afterwards: quiver report --devices."
        )
    dataset, method = load_data(config), make_method(config)
    partition = partition_data(config, dataset)
    settings = config.run.for_clients(partition.clients)
    train, test = (np.array([len(s) for s in part]) for part in (partition.train, partition.test))
    federation = federation_of(train, test, settings, ranks.size)
    augment = None if config.data.augment == "none" else config.data.augment
    local_partition = partition.select(federation.placement.clients_of(ranks.rank).tolist())
    simulation = RankSimulation(
        ranks,
        federation,
        make_task(config, dataset),
        make_federated(dataset, local_partition, augment, config.data.mapped),
        method,
        make_run_topology(config, method, partition.clients),
        config.training,
        settings,
        config.transforms(),
    )
    digests, described = digest_inputs(config, dataset), describe_dataset(dataset)
    return _PreparedRun(config, digests, described, partition, simulation)


@contextlib.contextmanager
def _lock_folder(ranks: Ranks, folder: RunFolder | None, continues: bool) -> Iterator[None]:
    """Lock the folder on rank 0. Refuse an interrupted run that the command does not continue."""
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            if folder is None:
                return
            stack.enter_context(folder.lock())
            if not continues:
                folder.refuse_unfinished()

        ranks.run_on_all(lock)
        yield


def _run_rounds(
    prepared: _PreparedRun,
    folder: RunFolder | None,
    recorder: Recorder | None,
    trackers: Sequence[Recorder],
    resume: Checkpoint | None,
    stop: Stop,
) -> dict[str, Any] | None:
    if folder is None:
        prepared.simulation.run(stop=stop)
        return None
    listeners = Recorders([] if recorder is None else [recorder], trackers)
    with listeners.closing(), folder.record(listeners) as recorders:
        run = prepared.simulation.run(recorders, resume, folder.write_checkpoint, stop)
    simulation = prepared.simulation
    return folder.finish(run.summary, adaptation_phase(simulation.method, simulation.task))


def check_same(ranks: Ranks, own: dict[str, str], config: Config | None = None) -> None:
    """Refuse ranks that differ from rank 0. Every rank names the key and both values."""
    if config is not None:
        tree = config.model_dump(mode="json", exclude={"overrides"})
        own = {**own, **{key: repr(value) for key, value in flatten_settings(tree).items()}}
        own.pop("data.root", None)  # files may be elsewhere; their digests are compared
    theirs = ranks.objects(own)
    for rank, other in enumerate(theirs):
        for key in {**theirs[0], **other}:
            if theirs[0].get(key) != other.get(key):
                raise QuiverError(
                    f"rank {rank} differs from rank 0 in {key}: {_shorten(other.get(key))} there, "
                    f"{_shorten(theirs[0].get(key))} on rank 0. Start every rank with the same "
                    "version, configuration and data."
                )


def _shorten(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) < 40 else value[:12] + "…"
