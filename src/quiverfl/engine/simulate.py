"""All clients in one process: `simulate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.exchange import Exchange
from quiverfl.engine.execution import Measured
from quiverfl.engine.fit import check_fit
from quiverfl.engine.history import History, Recorder
from quiverfl.engine.precision import computing
from quiverfl.engine.programs import is_convolutional
from quiverfl.engine.recorders import Recorders
from quiverfl.engine.rounds import play
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.engine.simulation_run import Run
from quiverfl.engine.splitting import seen_alone, splitting
from quiverfl.engine.transform_checks import check_transforms
from quiverfl.engine.transformed import trained_on, transformed_exchange
from quiverfl.errors import CallbackFailed, Diverged, Interrupted, Stopped
from quiverfl.methods.contract import Method
from quiverfl.task import Task
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training
from quiverfl.transforms.adversary import Adversary
from quiverfl.transforms.chosen import PLAIN, Transforms
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.privacy import DPSGD, UpdatePrivacy
from quiverfl.transforms.robustness import Robustness

SMALL_WORK = 50_000_000
"""Products in a step of all clients together below which threads wait more than they work."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """Everything a run in one process needs, ready to be checked and carried out."""

    task: Task
    data: FederatedData
    method: Method
    topology: Topology
    training: Training
    settings: RunSettings
    transforms: Transforms = PLAIN

    def check(self) -> None:
        """Refuse what cannot work together, before anything is computed or written."""
        check_fit(self.task, self.data, self.method, self.topology, self.training, self.settings)
        if self.settings.arithmetic == "peers":
            splitting(self.method, self.topology, self.settings.rounds)
        check_transforms(
            self.transforms, self.task, self.data, self.method, self.topology, self.settings
        )

    def shard(self, measured: Measured | None = None) -> Shard:
        """All clients, at the start."""
        private = self.transforms.privacy
        return Shard(
            self.task,
            trained_on(self.transforms, self.data, self.settings.seed),
            self.method,
            self.training,
            self.settings,
            looks=self.topology.looks,
            private=private if isinstance(private, DPSGD) else None,
            measured=measured,
        )

    @property
    def _graphs(self) -> Topology:
        """Where clients look, peers know no more than each was told itself."""
        peers = self.settings.arithmetic == "peers"
        return seen_alone(self.topology) if peers else self.topology

    def exchange(self, shard: Shard) -> Exchange:
        return transformed_exchange(
            self.transforms, self.method, self.topology, self.settings, shard.outbox
        )

    def run(
        self,
        recorder: Recorder | None = None,
        resume: Checkpoint | None = None,
        checkpoint: Callable[[Checkpoint], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
        callbacks: Sequence[Recorder] = (),
    ) -> Run:
        """As `simulate` says, but unchecked, and a checkpoint is the run's own memory: `checkpoint`
        must write it, or copy it, before it returns."""
        settings = self.settings
        data = self.data
        longest, device = data.train.longest, torch.device(settings.device)
        with (
            threads_for(self.task, data.clients, longest, self.training, settings),
            computing(settings.precision, device),
        ):
            measured = None if resume is None else resume.measured
            shard = self.shard(measured)
            exchange, history, start = self.exchange(shard), History(), 0
            if resume is not None:
                resume.apply(shard, exchange)
                history, start = resume.history.copy(), resume.round

            told = Recorders([history, *([] if recorder is None else [recorder])], callbacks)

            def after_round(round: int) -> None:
                more = round + 1 < settings.rounds
                stopping, enough = more and stop(), more and told.enough()
                if checkpoint is not None and (stopping or enough or settings.checkpoints(round)):
                    checkpoint(Checkpoint.take(round + 1, shard, exchange, history))
                if stopping:
                    raise Stopped(round + 1)
                if enough:
                    raise _Enough

            run = Run(self, shard, exchange, history)
            try:
                with told.closing(), contextlib.suppress(_Enough):
                    play(shard, exchange, self._graphs, told, settings, start, after_round)
            except (CallbackFailed, Diverged) as error:
                error.run = run
                raise
            except KeyboardInterrupt as error:
                raise Interrupted(run) from error
        return run


def simulate(
    task: Task,
    data: FederatedData,
    *,
    method: Method,
    topology: Topology,
    training: Training,
    compression: Compression | None = None,
    privacy: UpdatePrivacy | DPSGD | None = None,
    robustness: Robustness | None = None,
    adversary: Adversary | None = None,
    settings: RunSettings | None = None,
    recorder: Recorder | None = None,
    resume: Checkpoint | None = None,
    checkpoint: Callable[[Checkpoint], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[Recorder] = (),
    progress: bool = False,
    **options: Any,
) -> Run:
    """Run a method on federated data over a topology and return its history and models.

    `options` are fields of RunSettings (rounds, seed, dtype, threads, executor, …), or `settings`
    has them all. `recorder` is told of every evaluation and round as it happens. `checkpoint` is
    given the whole state every `checkpoint_every` rounds and at the end, and `resume` takes it
    back: the result is that of an uninterrupted run. `stop` is asked after every round but the
    last; once it is true, the state is given to `checkpoint` and `Stopped` raised.

    `callbacks` are told what `recorder` is told, and may end the run (qv.EarlyStopping), which is
    then returned as it is. `progress` shows how far it is, on a terminal or in a notebook.

    `compression` is what is sent in place of the messages (qv.Quantize(bits=4)), `privacy`
    how they are blurred (qv.UpdatePrivacy()), `robustness` which part of them is taken
    (qv.Balance()), `adversary` who forges them (qv.SignFlip()).

    A run that diverges or is interrupted raises; the error's `run` has what there was.
    """
    if settings is None:
        settings = RunSettings.of(options)
    elif options:
        raise TypeError(f"give settings or {', '.join(options)}, not both")
    transforms = Transforms(compression, privacy, robustness, adversary)
    simulation = Simulation(task, data, method, topology, training, settings, transforms)
    simulation.check()
    keep = None if checkpoint is None else (lambda taken: checkpoint(taken.copy()))
    with _shown(progress, method, settings) as bar:
        return simulation.run(recorder, resume, keep, stop, [*callbacks, *bar])


class _Enough(Exception):
    """A callback has seen enough."""


@contextlib.contextmanager
def _shown(progress: bool, method: Method, settings: RunSettings) -> Iterator[list[Recorder]]:
    if not progress:
        yield []
        return
    from quiverfl.callbacks.progress import progress as shown

    with shown(method.title, settings.rounds, quiet=False) as bar:
        yield [] if bar is None else [bar]


def _useful_threads(task: Task, clients: int, longest: int, training: Training) -> int:
    """As many as torch has, unless the work is so small that they would wait for each other.

    Threads that wait do so busily, which beside other processes costs ten times what they gain.
    """
    samples = min(training.batch_size or longest, longest)
    together = min(clients, 25)
    weights = task.shared_layout.size + task.personal_layout.size
    small = weights * samples * together < SMALL_WORK and not is_convolutional(task)
    return 1 if small else torch.get_num_threads()


@contextlib.contextmanager
def threads_for(
    task: Task, clients: int, longest: int, training: Training, settings: RunSettings
) -> Iterator[None]:
    """As many as the settings say, or as are of use; `longest` is the largest client's size."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(settings.threads or _useful_threads(task, clients, longest, training))
        yield
    finally:
        torch.set_num_threads(before)
