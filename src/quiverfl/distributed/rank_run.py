"""A configuration on many ranks → one run folder, written by rank 0 alone."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import quiverfl
from quiverfl.config import Config
from quiverfl.data.federated import federate
from quiverfl.data.partition import Partition
from quiverfl.distributed.rank_environment import attempt
from quiverfl.distributed.rank_simulation import RankSimulation, federation_of
from quiverfl.distributed.ranks import Ranks
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.history import Recorder
from quiverfl.errors import QuiverError, Stopped
from quiverfl.experiment import (
    finished_summary,
    inputs_of,
    load_data,
    make_method,
    make_task,
    settings_of,
    share_out,
    topology_for,
)
from quiverfl.experiment_keys import flat
from quiverfl.methods.optional import adaptation
from quiverfl.run_folder import RunFolder

Stop = Callable[[], bool]


def run_on_ranks(
    ranks: Ranks,
    config: Config,
    path: Path,
    recorder: Recorder | None = None,
    stop: Stop = lambda: False,
    continues: bool = False,
) -> dict[str, Any]:
    """As `experiment.run_in_folder` does it in one process; the summary, on every rank.

    Only rank 0 looks at `path`. What any rank refuses, all refuse. An interrupted run is resumed if
    the command `continues` one, or in a new attempt after a rank was lost.
    """
    check_same(ranks, {"quiverfl": quiverfl.__version__, "torch": str(torch.__version__)}, config)
    folder = RunFolder(path) if ranks.rank == 0 else None
    with _opened(ranks, folder, continues or attempt() > 0):
        done = ranks.together(lambda: folder and finished_summary(config, folder, None))
        done = ranks.from_first(done)
        if done:
            return dict(done)
        made = ranks.together(lambda: _made(config, ranks))
        check_same(ranks, made.digests)
        ranks.together(made.simulation.check)
        resume = ranks.together(lambda: made.open(folder) if folder else None)
        done_rounds = ranks.from_first(0 if resume is None else resume.round)
        if ranks.any(stop()):
            raise Stopped(done_rounds)
        summary = _played(made, folder, recorder, resume, stop)
        return dict(ranks.from_first(summary))


@dataclass(frozen=True, eq=False)
class _Made:
    """Everything a rank needs, made from the configuration."""

    config: Config
    inputs: dict[str, str]
    partition: Partition
    simulation: RankSimulation

    @property
    def digests(self) -> dict[str, str]:
        """What must be the same on every rank beside the configuration."""
        shares = hashlib.sha256()
        for array in self.partition.arrays().values():
            shares.update(np.ascontiguousarray(array).tobytes())
        return {**self.inputs, "partition of the data": shares.hexdigest()}

    def open(self, folder: RunFolder) -> Checkpoint | None:
        made = self.simulation
        folder.check_inputs(self.inputs)
        folder.open(self.config, self.inputs, self.partition, made.topology, made.method)
        return folder.resume()


def _made(config: Config, ranks: Ranks) -> _Made:
    """Each rank reads the examples of its own clients alone."""
    dataset, method = load_data(config), make_method(config)
    shares = share_out(config, dataset)
    settings = settings_of(config, shares.clients)
    train, test = (np.array([len(s) for s in part]) for part in (shares.train, shares.test))
    federation = federation_of(train, test, settings, ranks.size)
    augment = None if config.data.augment == "none" else config.data.augment
    here = _only(shares, federation.placement.on(ranks.rank))
    simulation = RankSimulation(
        ranks,
        federation,
        make_task(config, dataset),
        federate(dataset, here, augment, config.data.mapped),
        method,
        topology_for(config, method, shares.clients),
        config.training.training(),
        settings,
        config.transforms(),
    )
    return _Made(config, inputs_of(config, dataset), shares, simulation)


def _only(shares: Partition, clients: np.ndarray) -> Partition:
    names = tuple(shares.names[client] for client in clients) if shares.names else ()
    return replace(
        shares,
        train=tuple(shares.train[client] for client in clients),
        test=tuple(shares.test[client] for client in clients),
        train_counts=shares.train_counts[clients],
        test_counts=shares.test_counts[clients],
        names=names,
    )


@contextlib.contextmanager
def _opened(ranks: Ranks, folder: RunFolder | None, continues: bool) -> Iterator[None]:
    """Rank 0 holds the folder's lock; an interrupted run there is refused unless it continues."""
    with contextlib.ExitStack() as held:

        def hold() -> None:
            if folder is None:
                return
            held.enter_context(folder.alone())
            if not continues:
                folder.refuse_unfinished()

        ranks.together(hold)
        yield


def _played(
    made: _Made,
    folder: RunFolder | None,
    recorder: Recorder | None,
    resume: Checkpoint | None,
    stop: Stop,
) -> dict[str, Any] | None:
    if folder is None:
        made.simulation.run(stop=stop)
        return None
    with folder.recording(recorder) as both:
        run = made.simulation.run(both, resume, folder.keep, stop)
    return folder.close(run.summary, adaptation(made.simulation.method, made.simulation.task))


def check_same(ranks: Ranks, own: dict[str, str], config: Config | None = None) -> None:
    """Refuse ranks that would compute other things than rank 0: every rank says which and what."""
    if config is not None:
        tree = config.model_dump(mode="json", exclude={"overrides"})
        own = {**own, **{key: repr(value) for key, value in flat(tree).items()}}
        own.pop("data.root", None)  # the same files may lie elsewhere; their digests are compared
    theirs = ranks.objects(own)
    for rank, other in enumerate(theirs):
        for key in {**theirs[0], **other}:
            if theirs[0].get(key) != other.get(key):
                raise QuiverError(
                    f"rank {rank} differs from rank 0 in {key}: {_short(other.get(key))} there, "
                    f"{_short(theirs[0].get(key))} on rank 0. Start every rank with the same "
                    "version, configuration and data."
                )


def _short(value: str | None) -> str:
    return "nothing" if value is None else value if len(value) < 40 else value[:12] + "…"
