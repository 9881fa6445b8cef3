"""A simulation on many ranks: the same rounds, after ranks agree on what they must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from quiverfl.data.federated import FederatedData
from quiverfl.distributed.checkpoint import GatheredCheckpoints
from quiverfl.distributed.ranks import Placement, Ranks
from quiverfl.distributed.world import Federation, RankWorld
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.checks.messages import check_transforms
from quiverfl.engine.checks.method import check_fit
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.execution import Measurement, choose_chunk, measure_executors
from quiverfl.engine.history import Recorder
from quiverfl.engine.local.examples import Examples
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.runs.run import Run
from quiverfl.runs.simulate import Simulation
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training
from quiverfl.transforms import PLAIN, Transforms
from quiverfl.types import Integers

Kept = Callable[[Callable[[Path], Path]], None]
"""Has a checkpoint written into a folder, and what it replaces removed."""


@dataclass(frozen=True, eq=False)
class RankSimulation:
    """A `Simulation` with its clients on many ranks; `data` is that of this rank's clients."""

    ranks: Ranks
    federation: Federation
    task: Task
    data: FederatedData
    method: Method
    topology: Topology
    training: Training
    settings: RunSettings
    transforms: Transforms = PLAIN

    @property
    def placement(self) -> Placement:
        return self.federation.placement

    def check(self) -> None:
        """Refuse what cannot work together, before anything is computed or written."""
        if self.settings.arithmetic == "peers":
            raise QuiverError(
                'run.arithmetic = "peers" is computed by one process: leave it out, or leave '
                "--ranks out."
            )
        check_fit(
            self.task,
            self.data,
            self.method,
            self.topology,
            self.training,
            self.settings,
            self.placement.clients,
        )
        check_transforms(
            self.transforms, self.task, self.data, self.method, self.topology, self.settings
        )

    def run(
        self,
        recorder: Recorder | None = None,
        resume: Checkpoint | None = None,
        checkpoint: Kept | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Run:
        """Run the rounds. Rank 0 gives `resume`, a checkpoint of all clients, and `checkpoint`,
        which keeps new ones. Other ranks give neither, and nobody uses their history."""
        ranks, settings = self.ranks, self.settings
        checkpoints = GatheredCheckpoints(ranks, self.placement)
        simulation = self._simulation(settings)
        with simulation.compute_settings():
            measured, settings = self._agree(None if resume is None else resume.measured)
        part = checkpoints.scatter(resume) if ranks.any(resume is not None) else None
        saves = ranks.any(checkpoint is not None)
        save = partial(self._save, checkpoints, checkpoint) if saves else None
        simulation = self._simulation(settings)
        return simulation.run(recorder, part, save, lambda: ranks.any(stop()), measured=measured)

    def _simulation(self, settings: RunSettings) -> Simulation:
        world = RankWorld(self.ranks, self.federation)
        return Simulation(
            self.task,
            self.data,
            self.method,
            self.topology,
            self.training,
            settings,
            self.transforms,
            world,
        )

    def _save(self, checkpoints: GatheredCheckpoints, keep: Kept | None, taken: Checkpoint) -> None:
        """Write a checkpoint of all clients, which rank 0 keeps in its folder."""

        def write(folder: Path) -> Path:
            written = checkpoints.save(taken, folder)
            assert written is not None
            return written

        def work() -> None:
            if keep is None:
                checkpoints.save(taken, None)
            else:
                keep(write)

        self.ranks.run_on_all(work)

    def _agree(self, before: Measurement | None) -> tuple[Measurement | None, RunSettings]:
        """Choices of a trial, and chunk: the same on all ranks, which then form the same groups."""
        ranks, settings, measured = self.ranks, self.settings, None
        device = torch.device(settings.device)
        if settings.has_trial:
            measured = ranks.from_first(before)
            if measured is None or not measured.matches(settings):
                measured = ranks.from_first(ranks.run_on_all(self._measure))
        if device.type == "cuda":
            given = (self.task, self.data, self.method, self.training, settings)
            rooms = ranks.objects(ranks.run_on_all(lambda: choose_chunk(*given)))
            settings = replace(settings, chunk=min(rooms))
        return measured, settings

    def _measure(self) -> Measurement | None:
        settings, device = self.settings, torch.device(self.settings.device)
        examples = Examples(self.data.train, self.data, settings.dtype, device)
        trial = ModelProbe.of(self.task, examples, settings.dtype, device)
        return measure_executors(self.task, examples, self.training, settings, trial)


def federation_of(train: Integers, test: Integers, settings: RunSettings, ranks: int) -> Federation:
    """Clients placed so that every rank has about as many samples to visit."""
    epochs = settings.epochs_per_client
    own = None if epochs is None else np.asarray(epochs, dtype=np.int64)
    return Federation(Placement.balance(work_of(train, settings), ranks), train, test, own)


def work_of(train: Integers, settings: RunSettings) -> Integers:
    """Samples that each client visits, up to a factor that all have in common."""
    epochs = settings.epochs_per_client
    return train if epochs is None else train * np.maximum(np.asarray(epochs, np.int64), 1)
