"""Runs with a clock: without waiting, or in rounds with recorded times."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from quiverfl.clock.devices import MICROSECONDS, Devices, microseconds
from quiverfl.clock.player import Player
from quiverfl.clock.push import Push
from quiverfl.clock.rounds import RoundTimer, RoundTimes, choose_kind
from quiverfl.clock.schedule import Pairs, Schedule
from quiverfl.clock.settings import Timing
from quiverfl.data.batches import count_batches
from quiverfl.engine.history import Clock, Recorder
from quiverfl.engine.local.trainer import count_gradients, phase_settings
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shard import Shard
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.methods.contract import Method, SingleStep, Train
from quiverfl.task import Task
from quiverfl.topologies.analysis import graph_from_text
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, count_uploads
from quiverfl.training import Training
from quiverfl.types import Integers, Metrics

Record = Mapping[str, Any]


def count_steps(
    task: Task, method: Method, training: Training, sizes: Integers, settings: RunSettings
) -> Integers:
    """Local steps of every client in a round, before anything is trained."""
    total = np.zeros(len(sizes), dtype=np.int64)
    for phase in method.phases(task):
        if isinstance(phase, SingleStep):
            total += int(phase.needs_gradient)
            continue
        if isinstance(phase, Train) and phase.part == "personal" and not task.personal:
            continue
        epochs = None if phase.epochs is None else np.full(len(sizes), phase.epochs)
        if settings.epochs_per_client is not None and phase.trains_message:
            epochs = np.asarray(settings.epochs_per_client)
        batch = phase_settings(phase, training).batch_size
        steps = (count_batches(epochs, sizes, batch, phase.steps) > 0).sum(axis=1)
        total += steps * count_gradients(phase)
    return total


# Nobody waits.


MOST_JOBS = 5_000_000


def make_player(
    timing: Timing, shard: Shard, topology: Topology, steps: Integers, together: bool = True
) -> Player:
    """The schedule of a run without waiting, and the player that carries it out."""
    clients = topology.clients
    one = np.array([0])
    size = int(shard.payload(shard.outbox(one), one)[0])
    payload = np.full(clients, size, dtype=np.int64)
    devices = timing.devices.check_clients(clients)
    _check_jobs(timing, devices.work(steps))
    schedule: Schedule
    if timing.clock.waits == "pairs":
        schedule = Pairs(devices, steps, payload, shard.context.seed)
    else:
        schedule = Push(devices, steps, payload, topology)
    _warn_of_nothing(timing, schedule.first_end, schedule.fastest_message)
    return Player(shard, schedule, together)


def _check_jobs(timing: Timing, work: Integers) -> None:
    """Warn of too many jobs between two evaluations: they are held in memory."""
    times = timing.clock.times
    expected = float((microseconds(max(np.diff([0.0, *times]))) / work).sum())
    if expected > MOST_JOBS:
        raise QuiverError(
            f"clock.until = {times[-1]:g} means about {expected:.2g} local rounds between two of "
            f"{len(times)} evaluations; {MOST_JOBS:,} is the most. Give fewer seconds, slower "
            "devices (devices.step), or a smaller clock.evaluate_every."
        )


def _warn_of_nothing(timing: Timing, first_end: int, fastest_message: int) -> None:
    """Warn if the run ends before any client has trained or any message has arrived."""
    assert timing.clock.until is not None
    until = microseconds(timing.clock.until)
    words = {
        "no local round ends before that, so nobody trains": first_end,
        "no message arrives before that, so everybody trains alone": first_end + fastest_message,
    }
    for what, earliest in words.items():
        if earliest > until:
            text = (
                f"clock.until = {timing.clock.until:g}: {what}. Give more seconds, or faster "
                "devices and links."
            )
            warnings.warn(text, QuiverWarning, stacklevel=3)
            return


def run_events(
    shard: Shard,
    player: Player,
    timing: Timing,
    recorder: Recorder,
    settings: RunSettings,
    start: int = 0,
    after_round: Callable[[int], None] = lambda _: None,
) -> None:
    """Evaluation `start` to the last. In place of a round there is the time between two of them.

    Stage `local` is each client's last trained model, `mixed` its model after all it has taken.
    """
    times = [microseconds(t) for t in timing.clock.times]
    if start:
        player.replay(times[start - 1])
    schedule = player.schedule
    before = _Totals.of(schedule, times[start - 1] if start else 0)
    for k in range(start, len(times)):
        clock = Clock()
        jobs = player.train_until(times[k])
        clock.lap("train_seconds")
        if k < len(times) - 1 or settings.keep_local:
            # Not of clients that have taken a message since they trained: theirs was kept before.
            kept = list(shard.local.points)
            shard.keep_local_models(~np.isin(np.arange(len(shard.ids)), kept))
        recorder.on_evaluation(k, "local", shard.evaluate(k, "local"))
        clock.lap("evaluate_seconds")
        player.merge_running(times[k])
        clock.lap("mix_seconds")
        recorder.on_evaluation(k, "mixed", shard.evaluate(k, "mixed"))
        state = shard.record(evaluated=True)
        clock.lap("evaluate_seconds")
        after = _Totals.of(schedule, times[k])
        spent = after.record(before)
        held, flying = schedule.mass()
        recorder.on_round_end(
            {
                **{"round": k, **clock.record(), **state, **spent, "jobs": jobs},
                "in_flight": flying / (held + flying),
                "clock_local": times[k] / MICROSECONDS,
                "clock": times[k] / MICROSECONDS,
            }
        )
        before = after
        after_round(k)


@dataclass(frozen=True, eq=False)
class _Totals:
    """Totals of a schedule up to some time, for each client."""

    sent: Integers
    received: Integers
    steps: Integers
    joules: float

    @classmethod
    def of(cls, schedule: Schedule, t: int) -> _Totals:
        lists = (schedule.sent, schedule.received, schedule.trained)
        sent, received, steps = (np.array(one, dtype=np.int64) for one in lists)
        return cls(sent, received, steps, float(schedule.joules(t).sum()))

    def record(self, before: _Totals) -> dict[str, Any]:
        sent, received = self.sent - before.sent, self.received - before.received
        steps = self.steps - before.steps
        return {
            "sent_bytes": sent.tolist(),
            "received_bytes": received.tolist(),
            "busiest_bytes": int((sent + received).max()),
            "network_bytes": int(sent.sum()),
            "active": int((steps > 0).sum()),
            "steps": steps.tolist(),
            "joules": self.joules - before.joules,
        }


# Rounds.


class RoundClock:
    """Adds times to the records of synchronous rounds; removes absent and late clients from graphs.

    With `away = "wait"` and no deadline a round is timed by its record. Otherwise its times decide
    its graph, and are known before it from the steps and bytes that every round takes.
    """

    def __init__(
        self,
        timing: Timing,
        topology: Topology,
        mass: bool,
        predict: Callable[[], tuple[Integers, Integers]],
    ) -> None:
        clock = timing.clock
        self._devices, self._waits = timing.devices.check_clients(topology.clients), clock.waits
        self._topology, self._predict, self._known = topology, predict, list[RoundTimes]()
        self._changes = clock.away == "skip" or clock.deadline is not None
        self._make = partial(
            RoundTimer, skip=clock.away == "skip", deadline=clock.deadline, mass=mass
        )
        self._timer: RoundTimer | None = None
        self._given: tuple[Integers, Integers] | None = None

    @property
    def topology(self) -> Topology:
        """The run's graphs."""
        own = self._topology
        if not self._changes:
            return own
        return Topology(own.name, own.clients, self._draw, own.options)

    def stamp_times(self, recorder: Recorder) -> Recorder:
        return _Stamp(recorder, self)

    def stamp(self, record: Record) -> dict[str, Any]:
        """The record with its times. Records must come in order."""
        round = int(record["round"])
        if self._changes:
            self._draw(round)
        while len(self._known) <= round:
            graph = graph_of_record(record, self._topology)
            self._known.append(advance_by_record(self._find_timer(graph), record, graph))
        return {**record, **self._known[round].record()}

    def _draw(self, round: int) -> Graph:
        while len(self._known) <= round:
            graph = self._topology(len(self._known))
            if self._given is None:
                self._given = self._predict()
            self._known.append(self._find_timer(graph).advance(graph, *self._given))
        return self._known[round].graph

    def _find_timer(self, graph: Graph) -> RoundTimer:
        if self._timer is None:
            self._timer = self._make(self._devices, choose_kind(graph, str(self._waits)))
        return self._timer


class _Stamp:
    """A recorder that adds the times of rounds to their records."""

    def __init__(self, recorder: Recorder, clock: RoundClock) -> None:
        self._recorder, self._clock = recorder, clock

    def on_evaluation(self, round: int, stage: str, metrics: Metrics) -> None:
        self._recorder.on_evaluation(round, stage, metrics)

    def on_round_end(self, record: Record) -> None:
        self._recorder.on_round_end(self._clock.stamp(record))


def advance_by_record(timer: RoundTimer, record: Record, graph: Graph) -> RoundTimes:
    """The times of a round from what was recorded of it."""
    if not isinstance(record["steps"], list):
        raise QuiverError(
            f"round {record['round']} has no record of each client's steps and bytes, so its times "
            'cannot be told: set run.history = "clients".'
        )
    sent, uploads = np.asarray(record["sent_bytes"], dtype=np.int64), count_uploads(graph)
    payload = np.where(uploads > 0, sent // np.maximum(uploads, 1), 0)
    return timer.advance(graph, np.asarray(record["steps"], dtype=np.int64), payload)


def time_records(
    records: Sequence[Record], topology: Topology, devices: Devices, waits: str
) -> list[RoundTimes]:
    """The times of recorded rounds, in order, on these devices."""
    timer: RoundTimer | None = None
    times = []
    for record in records:
        if "jobs" in record:
            raise QuiverError(
                "this run was simulated without waiting for each other: its seconds are its own, "
                "and on other devices it would be another run."
            )
        graph = graph_of_record(record, topology)
        if timer is None:
            timer = RoundTimer(devices, choose_kind(graph, waits))
        times.append(advance_by_record(timer, record, graph))
    return times


def graph_of_record(record: Record, topology: Topology) -> Graph:
    """The graph of a recorded round: as it was recorded, if it depended on the run."""
    if isinstance(record.get("links"), str):
        return graph_from_text(record["links"])
    if topology.reports is not None:
        raise QuiverError(
            f"round {record['round']} has no record of its graph, which depended on the run: its "
            "times cannot be told."
        )
    return topology(int(record["round"]))
