"""A simulation whose clients are on many ranks: the same loop, and what ranks must agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from quiverfl.data.federated import FederatedData
from quiverfl.distributed.columns import Columns
from quiverfl.distributed.placement import Placement
from quiverfl.distributed.rank_checkpoint import GatheredCheckpoints
from quiverfl.distributed.rank_shard import Federation, RankShard
from quiverfl.distributed.ranks import Ranks
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.examples import Examples
from quiverfl.engine.execution import Measured, measure, room
from quiverfl.engine.fit import check_fit
from quiverfl.engine.history import History, Recorder
from quiverfl.engine.precision import computing
from quiverfl.engine.recorders import Recorders
from quiverfl.engine.rounds import play
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.simulate import Simulation, threads_for
from quiverfl.engine.simulation_run import Run
from quiverfl.engine.transform_checks import check_transforms
from quiverfl.engine.transformed import trained_on, transformed_exchange
from quiverfl.engine.trials import Trial
from quiverfl.errors import QuiverError, Stopped
from quiverfl.methods.contract import Method
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training
from quiverfl.transforms.chosen import PLAIN, Transforms
from quiverfl.transforms.privacy import DPSGD

Integers = npt.NDArray[np.int64]
Kept = Callable[[Callable[[Path], Path]], None]
"""Has a checkpoint written into a folder, and what it replaces removed."""


@dataclass(frozen=True, eq=False)
class RankSimulation:
    """What `Simulation` is in one process; `data` is that of this rank's clients."""

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
        """Play the rounds. On rank 0 `resume` is the checkpoint of all clients and `checkpoint`
        keeps new ones; other ranks have neither, and their history is nobody's concern."""
        ranks, settings = self.ranks, self.settings
        longest, clients = int(self.federation.train.max()), self.placement.clients
        with (
            threads_for(self.task, clients, longest, self.training, settings),
            computing(settings.precision, torch.device(settings.device)),
        ):
            measured, settings = self._agreed(None if resume is None else resume.measured)
            shard = ranks.together(lambda: self._shard(settings, measured))
            exchange = transformed_exchange(
                self.transforms,
                self.method,
                self.topology,
                settings,
                shard.outbox,
                Columns(ranks, self.placement),
                shard.ids,
            )
            checkpoints = GatheredCheckpoints(ranks, self.placement)
            history, start = History(), 0
            if ranks.any(resume is not None):
                part = checkpoints.share(resume)
                ranks.together(lambda: part.apply(shard, exchange))
                shard.share_view()
                history, start = part.history.copy(), part.round

            def after_round(round: int) -> None:
                stopping = round + 1 < settings.rounds and ranks.any(stop())
                if ranks.any(checkpoint is not None) and (stopping or settings.checkpoints(round)):
                    taken = Checkpoint.take(round + 1, shard, exchange, history)
                    self._keep(checkpoints, taken, checkpoint)
                if stopping:
                    raise Stopped(round + 1)

            whole = Simulation(
                self.task,
                self.data,
                self.method,
                self.topology,
                self.training,
                settings,
                self.transforms,
            )
            run = Run(whole, shard, exchange, history)
            told = Recorders([history, *([] if recorder is None else [recorder])], ())
            play(shard, exchange, self.topology, told, settings, start, after_round)
        return run

    def _keep(self, checkpoints: GatheredCheckpoints, taken: Checkpoint, keep: Kept | None) -> None:
        def write(folder: Path) -> Path:
            written = checkpoints.save(taken, folder)
            assert written is not None
            return written

        def work() -> None:
            if keep is None:
                checkpoints.save(taken, None)
            else:
                keep(write)

        self.ranks.together(work)

    def _agreed(self, before: Measured | None) -> tuple[Measured | None, RunSettings]:
        """What is found out before a run, the same on all ranks: they form the same groups."""
        ranks, settings, measured = self.ranks, self.settings, None
        device = torch.device(settings.device)
        if settings.executor == "measure":
            measured = ranks.from_first(before)
            measured = measured or ranks.from_first(ranks.together(self._measured))
        if device.type == "cuda":
            given = (self.task, self.data, self.method, self.training, settings)
            rooms = ranks.objects(ranks.together(lambda: room(*given)))
            settings = replace(settings, chunk=min(rooms))
        return measured, settings

    def _measured(self) -> Measured | None:
        settings, device = self.settings, torch.device(self.settings.device)
        examples = Examples(self.data.train, self.data, settings.dtype, device)
        trial = Trial.of(self.task, examples, settings.dtype, device)
        return measure(self.task, examples, self.training, settings, trial)

    def _shard(self, settings: RunSettings, measured: Measured | None = None) -> RankShard:
        private, here = self.transforms.privacy, self.placement.on(self.ranks.rank)
        return RankShard(
            self.task,
            trained_on(self.transforms, self.data, settings.seed, here, self.placement.clients),
            self.method,
            self.training,
            settings,
            self.federation,
            self.ranks,
            self.topology.looks,
            private if isinstance(private, DPSGD) else None,
            measured,
        )


def federation_of(train: Integers, test: Integers, settings: RunSettings, ranks: int) -> Federation:
    """Clients placed so that every rank has about as many samples to visit."""
    epochs = settings.epochs_per_client
    own = None if epochs is None else np.asarray(epochs, dtype=np.int64)
    return Federation(Placement.balanced(work_of(train, settings), ranks), train, test, own)


def work_of(train: Integers, settings: RunSettings) -> Integers:
    """Samples that each client visits, up to a factor that all have in common."""
    epochs = settings.epochs_per_client
    return train if epochs is None else train * np.maximum(np.asarray(epochs, np.int64), 1)
