"""All clients in one process: `simulate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from quiverfl.clock.checks import check_timing, warn_of_step
from quiverfl.clock.player import Player
from quiverfl.clock.run import RoundClock, count_steps, make_player, run_events
from quiverfl.clock.settings import Timing, choose_rounds
from quiverfl.data.federated import FederatedData
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.checks.messages import check_transforms
from quiverfl.engine.checks.method import check_fit, check_method_parts, graph_needs
from quiverfl.engine.checks.peers import choose_message_split, seen_alone
from quiverfl.engine.collective import LocalWorld, World
from quiverfl.engine.exchange.build import build_exchange, poison_training_data
from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.execution import Measurement, set_precision
from quiverfl.engine.history import (
    Callback,
    History,
    Record,
    Recorder,
    Recorders,
    check_callbacks,
)
from quiverfl.engine.local.programs import is_convolutional
from quiverfl.engine.members import check_members
from quiverfl.engine.rounds import run_rounds
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.engine.unseen import UnseenClients, check_unseen
from quiverfl.errors import CallbackFailed, Diverged, Interrupted, QuiverError, Stopped
from quiverfl.methods.contract import Method
from quiverfl.methods.optional import split_task
from quiverfl.results.summary import CROWD, HUNDRED
from quiverfl.runs.run import Run
from quiverfl.task import Task
from quiverfl.topologies import make_topology, topology_options
from quiverfl.topologies.topology import Topology
from quiverfl.training import Training
from quiverfl.transforms import PLAIN, Transforms
from quiverfl.transforms.attacks import Adversary, choose_attackers
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.privacy import DPSGD, UpdatePrivacy
from quiverfl.transforms.robustness import Robustness
from quiverfl.types import Integers

SMALL_WORK = 50_000_000
"""Multiplications in a step of all clients below which several threads do not pay."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """Everything a run needs, ready to be checked and carried out.

    `data` is that of the clients here. `world` is given where some clients are elsewhere.
    """

    task: Task
    data: FederatedData
    method: Method
    topology: Topology
    training: Training
    settings: RunSettings
    transforms: Transforms = PLAIN
    world: World | None = None
    timing: Timing | None = None

    def __post_init__(self) -> None:
        if isinstance(self.task, Task):  # or check() says what it is
            object.__setattr__(self, "task", split_task(self.method, self.task))

    def check(self) -> None:
        """Refuse what cannot work together, before anything is computed or written."""
        check_fit(self.task, self.data, self.method, self.topology, self.training, self.settings)
        if self.settings.history == "hundredths" and self.transforms.adversary is not None:
            raise QuiverError(
                'run.history = "hundredths" with an adversary: results of attackers stand apart, '
                'which takes every client\'s numbers; set run.history = "clients".'
            )
        if self.settings.history == "hundredths" and self._times_rounds:
            raise QuiverError(
                'run.history = "hundredths" with a clock of rounds: their seconds go by every '
                'client\'s steps and bytes; set run.history = "clients".'
            )
        if self.settings.arithmetic == "peers":
            choose_message_split(self.method, self.topology, self.settings.rounds)
        check_transforms(
            self.transforms, self.task, self.data, self.method, self.topology, self.settings
        )
        if self.timing is not None:
            check_timing(self.timing, self.task, self.method, self.topology, self.transforms)
            if self.timing.clock.asynchronous and self.data.unseen is not None:
                raise QuiverError(
                    f'clock.waits = "{self.timing.clock.waits}" with data.unseen: clients that '
                    "nobody has seen are tested in rounds; leave one of them out."
                )
        if self.topology.membership is not None:
            check_members(
                self.topology.membership,
                self.topology,
                self.transforms,
                self.settings,
                world=self.world,
                timed=self.timing is not None,
                unseen=self.data.unseen is not None,
                delay=graph_needs(self.method).delay,
            )
        if self.data.unseen is not None:
            fits = (self.task, self.data, self.method, self.training)
            check_unseen(self.data.unseen, *fits, self.transforms, self.settings)

    def shard(self, measured: Measurement | None = None) -> Shard:
        """The clients here, at the start."""
        private, settings, world = self.transforms.privacy, self.settings, self.world
        ids, epochs = None if world is None else world.ids, settings.epochs_per_client
        if ids is not None and epochs is not None:
            settings = replace(settings, epochs_per_client=tuple(epochs[client] for client in ids))
        clients = self.topology.clients
        return Shard(
            self.task,
            poison_training_data(self.transforms, self.data, settings.seed, ids, clients),
            self.method,
            self.training,
            settings,
            clients=None if ids is None else ids.tolist(),
            report_spec=self.topology.reports,
            membership=self.topology.membership,
            private=private if isinstance(private, DPSGD) else None,
            measured=measured,
            world=world,
        )

    @contextlib.contextmanager
    def compute_settings(self) -> Iterator[None]:
        """Set the run's threads and precision; restore them afterwards."""
        clients, settings = self.topology.clients, self.settings
        longest = self.data.train.longest if self.world is None else self.world.longest
        with (
            use_threads(self.task, clients, longest, self.training, settings),
            set_precision(settings.precision, torch.device(settings.device)),
        ):
            yield

    @property
    def _graphs(self) -> Topology:
        """The graphs of the run. A peer knows only the reports that reached it."""
        peers = self.settings.arithmetic == "peers"
        topology = seen_alone(self.topology) if peers else self.topology
        return topology.with_check(graph_needs(self.method))

    def _make_unseen(self, shard: Shard) -> UnseenClients | None:
        """The held-out clients. They meet honest clients only."""
        if self.data.unseen is None:
            return None
        adversary, clients = self.transforms.adversary, self.topology.clients
        attackers = choose_attackers(adversary, self.settings.seed, clients)
        honest = np.setdiff1d(np.arange(clients), attackers)
        return UnseenClients(shard, self.data.unseen, self._graphs, self.settings, honest)

    def _most_recorded(self) -> int | None:
        """Number of clients above which the history is condensed; None: never."""
        if self.settings.history == "hundredths":
            return HUNDRED
        # Attackers' numbers are reported apart, so each client's numbers are kept.
        # A clock that goes on with rounds after a stop reads each client's steps and bytes.
        attacked = self.transforms.adversary is not None
        crowd = self.settings.history == "auto" and self.topology.clients > CROWD
        return CROWD if crowd and not (attacked or self._times_rounds) else None

    @property
    def _times_rounds(self) -> bool:
        return self.timing is not None and not self.timing.clock.asynchronous

    def exchange(self, shard: Shard) -> Exchange | Player:
        """The exchange; for a run without waiting, the player of its schedule."""
        if self.timing is not None and self.timing.clock.asynchronous:
            return make_player(self.timing, shard, self._graphs, self._steps)
        return build_exchange(
            self.transforms, self.method, self.topology, self.settings, shard.outbox, shard.world
        )

    @property
    def _steps(self) -> Integers:
        sizes = self.data.train.sizes
        return count_steps(self.task, self.method, self.training, sizes, self.settings)

    def _round_clock(self, shard: Shard, exchange: Exchange, records: list[Record]) -> RoundClock:
        """The clock of rounds, continued from the end of the recorded rounds."""

        def predict() -> tuple[Integers, Integers]:
            messages = shard.outbox()
            return self._steps, exchange.coded_sizes(messages, shard.payload(messages))

        assert self.timing is not None
        clock = RoundClock(self.timing, self._graphs, self.method.mass is not None, predict)
        for record in records:
            clock.stamp(record)
        return clock

    def run(
        self,
        recorder: Recorder | None = None,
        resume: Checkpoint | None = None,
        checkpoint: Callable[[Checkpoint], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
        callbacks: Sequence[Recorder] = (),
        measured: Measurement | None = None,
    ) -> Run:
        """Run like `simulate`, without its checks. Checkpoints are the run's own memory: the
        function `checkpoint` must write or copy them before it returns. All ranks are given the
        same kinds of arguments, and the same `measured`."""
        settings = self.settings
        with self.compute_settings():
            if measured is None and resume is not None:
                measured = resume.measured
            run_on_all = LocalWorld.run_on_all if self.world is None else self.world.run_on_all
            shard: Shard = run_on_all(lambda: self.shard(measured))
            exchange, history, start = self.exchange(shard), History(), 0
            if resume is not None:
                run_on_all(lambda: resume.apply(shard, exchange))
                if shard.reports is not None:
                    shard.reports.share(shard.world)
                history, start = resume.history.copy(), resume.round

            newcomers, patience = self._make_unseen(shard), self._patience(history)
            recorders = [history, *([] if recorder is None else [recorder])]
            listeners = Recorders(recorders, [*callbacks, *patience], self._most_recorded())

            def after_round(round: int) -> None:
                more = round + 1 < settings.rounds
                due = not more or (round + 1) % settings.checkpoint_every == 0
                stopping, enough = more and stop(), more and listeners.should_stop()
                if newcomers is not None and newcomers.due(round, over=enough or not more):
                    newcomers.test(round, listeners)
                if checkpoint is not None and (stopping or enough or due):
                    checkpoint(Checkpoint.take(round + 1, shard, exchange, history))
                if stopping:
                    raise Stopped(round + 1)
                if enough:
                    raise _Enough

            run = Run(self, shard, exchange, history)
            try:
                with listeners.closing(), contextlib.suppress(_Enough):
                    if start and any(one.should_stop() for one in patience):
                        raise _Enough
                    if isinstance(exchange, Player):
                        assert self.timing is not None
                        more = (settings, start, after_round)
                        run_events(shard, exchange, self.timing, listeners, *more)
                    else:
                        graphs, listener = self._graphs, cast(Recorder, listeners)
                        if self.timing is not None:
                            clock = self._round_clock(shard, exchange, history.records)
                            graphs, listener = clock.topology, clock.stamp_times(listeners)
                        more = (settings, start, after_round)
                        run_rounds(shard, exchange, graphs, listener, *more)
            except (CallbackFailed, Diverged, Stopped) as error:
                error.run = run
                raise
            except KeyboardInterrupt as error:
                sentence = (
                    f"interrupted in round {len(history.records) + 1} of {settings.rounds}. The "
                    "error's `run` has what was recorded before it."
                )
                raise Interrupted(run, sentence) from error
            run.ended_early = any(one.should_stop() for one in patience)
        return run

    def _patience(self, history: History) -> list[Callback]:
        """The early stopping of `run.patience`, with a resumed run's earlier evaluations."""
        if self.settings.patience is None:
            return []
        if not self.task.metrics:
            raise QuiverError("run.patience needs a metric to go by: give the task one.")
        if self._most_recorded() is not None:
            raise QuiverError(
                'run.patience goes by every client\'s numbers, which run.history = "hundredths" '
                "does not keep: leave one of them out."
            )
        from quiverfl.runs.callbacks import EarlyStopping

        early = EarlyStopping(next(iter(self.task.metrics)), self.settings.patience)
        for evaluation in history.evaluations:
            early.on_evaluation(*evaluation)
        return [early]


def simulate(
    task: Task,
    data: FederatedData,
    *,
    method: Method,
    topology: Topology | None = None,
    training: Training | None = None,
    compression: Compression | None = None,
    privacy: UpdatePrivacy | DPSGD | None = None,
    robustness: Robustness | None = None,
    adversary: Adversary | None = None,
    timing: Timing | None = None,
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

    Without a topology it is the method's usual one, as in a configuration; without `training`
    that of `Training()`, and without `rounds` there are 20.

    `options` are fields of RunSettings (rounds, seed, dtype, threads, executor, …), or `settings`
    has them all. `recorder` receives every evaluation and round as it happens. `checkpoint` is
    given the whole state every `checkpoint_every` rounds and at the end, and `resume` takes it
    back: the result is that of an uninterrupted run. `stop` is asked after every round but the
    last; once it is true, the state is given to `checkpoint` and `Stopped` raised.

    `callbacks` receive what `recorder` receives, and may end the run (qv.EarlyStopping), which is
    then returned as it is. `progress` shows how far it is, on a terminal or in a notebook.

    `compression` is what is sent in place of the messages (qv.Quantize(bits=4)), `privacy`
    how they are clipped and noised (qv.UpdatePrivacy()), `robustness` which part of them is taken
    (qv.Balance()), `adversary` how attackers forge them (qv.SignFlip()).

    `timing` gives the run devices and a clock (qv.Timing): rounds with their seconds, or a run in
    which nobody waits, which has no rounds: `until` ends it.

    A run that diverges or is interrupted raises; the error's `run` has what there was.
    """
    if timing is not None and not isinstance(timing, Timing):
        raise QuiverError(f"timing is a {type(timing).__name__}: give qv.Timing(devices, …).")
    if timing is not None and timing.clock.asynchronous and settings is None:
        options.update(choose_rounds(timing.clock, options))
    if settings is None:
        settings = RunSettings.of(options)
    elif options:
        raise QuiverError(f"give settings or {', '.join(options)}, not both.")
    if not isinstance(settings, RunSettings):
        raise QuiverError(
            f"settings is a {type(settings).__name__}: give a RunSettings, or its fields, such as "
            "rounds=50."
        )
    if isinstance(data, FederatedData):  # or check() says what it is
        settings = settings.for_clients(data.clients)
        if topology is None and isinstance(getattr(type(method), "topology", None), str):
            topology = make_usual_topology(method, data.clients, settings.seed)
    training = Training() if training is None else training
    _check_resume(resume)
    transforms = Transforms(compression, privacy, robustness, adversary)
    if timing is not None and timing.clock.asynchronous:
        choose_rounds(timing.clock, asdict(settings))
        warn_of_step(method)
    # Without one, data is no FederatedData, which check() says before it looks at a topology.
    simulation = Simulation(
        task,
        data,
        method,
        topology,  # type: ignore[arg-type]
        training,
        settings,
        transforms,
        timing=timing,
    )
    simulation.check()
    keep = None if checkpoint is None else (lambda taken: checkpoint(taken.copy()))
    watchers = check_callbacks(callbacks)
    with _show_progress(progress, method, settings) as bar:
        return simulation.run(recorder, resume, keep, stop, [*watchers, *bar])


def _check_resume(resume: object) -> None:
    if resume is not None and not isinstance(resume, Checkpoint):
        raise QuiverError(
            f"resume is a {type(resume).__name__}: give a checkpoint, such as "
            "resume=qv.load_run(folder).checkpoint()."
        )


TOPOLOGY_OPTIONS = {
    "isolated": (),
    "star": ("sampled", "link_failure"),  # which it refuses
    "random_regular": ("neighbors", "participation", "link_failure"),
    "random_push": ("neighbors", "participation", "link_failure"),
}
"""Options of "auto" that each topology takes."""


def make_usual_topology(
    method: Method, clients: int, seed: int, options: Mapping[str, Any] | None = None
) -> Topology:
    """The method's usual topology, with the options that it takes."""
    check_method_parts(method)
    given = options or {}
    known = {"seed", *(key for keys in TOPOLOGY_OPTIONS.values() for key in keys)}
    for key in given:
        if key not in known:
            raise QuiverError(
                f'topology.{key}: with name = "auto" the options are '
                f"{', '.join(sorted(known))}; name a topology to give others."
            )
    wanted = (*TOPOLOGY_OPTIONS.get(method.topology, ()), "seed")
    used = {key: value for key, value in given.items() if key in wanted}
    if "sampled" in wanted:
        used.setdefault("sampled", max(1, clients // 10))
    if "neighbors" in wanted:
        used.setdefault("neighbors", min(10, clients - 1))
    return make_seeded_topology(method.topology, clients, seed, used)


def make_seeded_topology(
    name: str, clients: int, seed: int, options: Mapping[str, Any]
) -> Topology:
    """A topology with the run's seed, unless it has its own or needs none."""
    used = dict(options)
    if "seed" in topology_options(name):
        used.setdefault("seed", seed)
    else:
        used.pop("seed", None)
    return make_topology(name, clients, **used)


class _Enough(Exception):
    """A callback asked the run to stop."""


@contextlib.contextmanager
def _show_progress(
    progress: bool, method: Method, settings: RunSettings
) -> Iterator[list[Recorder]]:
    if not progress:
        yield []
        return
    from quiverfl.runs.progress import progress as show

    with show(method.title, settings.rounds, quiet=False) as bar:
        yield [] if bar is None else [bar]


def _useful_threads(task: Task, clients: int, longest: int, training: Training) -> int:
    """Torch's number of threads; 1 if the work is so small that they would wait for each other.

    Waiting threads keep their cores busy. Beside other processes that costs ten times the gain.
    """
    samples = min(training.batch_size or longest, longest)
    together = min(clients, 25)
    weights = task.shared_layout.size + task.personal_layout.size
    small = weights * samples * together < SMALL_WORK and not is_convolutional(task)
    return 1 if small else torch.get_num_threads()


@contextlib.contextmanager
def use_threads(
    task: Task, clients: int, longest: int, training: Training, settings: RunSettings
) -> Iterator[None]:
    """Set torch's threads by the settings, or by what is useful.

    `longest` is the largest client's number of examples.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(settings.threads or _useful_threads(task, clients, longest, training))
        yield
    finally:
        torch.set_num_threads(before)
