"""Running one phase for stacked clients: the loops that methods never see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.batches import Plan, batch_order, plan, sample_keys
from quiverfl.engine.descent import Buffers, Rates
from quiverfl.engine.examples import Examples
from quiverfl.engine.features import HeadFeatures, head_is_last
from quiverfl.engine.programs import Executor, Program
from quiverfl.engine.stepper import Batch, Source, Stepper, weights_of
from quiverfl.engine.workers import stop_if_halted, worker_place
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Interleaved, Message, Moment, Once, Train, Trained
from quiverfl.seeds import stream
from quiverfl.task import Point, Task
from quiverfl.training import Training

Integers = npt.NDArray[np.int64]

SLOTS = 8
"""Modules a phase may want of a worker: its own and its teachers'."""
SLAB = 512
"""Samples per client that pass through the model at once, where all of them do."""


@dataclass(frozen=True)
class Group:
    """Clients computed together: their rows in the shard and their numbers in the federation."""

    rows: Integers
    ids: Integers


@dataclass(frozen=True)
class Place:
    """Which phase of which round it is, and which share of all clients trains in that round."""

    round: int
    number: int
    share: float = 1.0


@dataclass(eq=False)
class Trainer:
    """Trains groups of clients; knows data and optimizer, knows no method."""

    task: Task
    examples: Examples
    training: Training
    executor: Executor
    dtype: torch.dtype
    device: torch.device
    seed: int
    rounds: int = 0
    rate_was_read: bool = field(default=False, init=False)
    """By a Once step: a rate that nobody reads would change nothing."""
    _head_is_last: bool | None = field(default=None, init=False)
    _programs: dict[tuple[int, int], Program] = field(default_factory=dict, init=False)

    def program(self, slot: int = 0) -> Program:
        """The worker's own, as a module can be bound to one model at a time."""
        here = (worker_place(), slot)
        if here not in self._programs:
            first = next(iter(self._programs.values()), None)
            self._programs[here] = (
                Program.of(self.task, self.dtype, self.device) if first is None else first.another()
            )
        return self._programs[here]

    def train(
        self,
        phase: Train | Interleaved,
        state: Any,
        group: Group,
        place: Place,
        epochs: Integers | None = None,
        kept: Buffers | None = None,
    ) -> tuple[Any, Integers, Buffers]:
        """The state after the phase, the steps each client took, and the optimizer's buffers.

        `epochs` are each client's own, where they are not the phase's.
        """
        training = self.settings(phase)
        sizes = self.examples.sizes[group.rows]
        if epochs is None and phase.epochs is not None:
            epochs = np.full(len(sizes), phase.epochs)
        batches = plan(
            self.seed,
            group.ids,
            place.round,
            place.number,
            epochs,
            sizes,
            training.batch_size,
            phase.steps,
        )
        steps = batches.steps * gradients_of(phase)
        if not batches.steps.any() or not self._trains(phase):
            return state, np.zeros_like(steps), kept or {}
        # The busiest clients first: those still training are then always the first k.
        order = np.argsort(-batches.steps, kind="stable")
        back = np.argsort(order, kind="stable")
        way = _Way(self, group.rows[order], group.ids[order], order, batches, place)
        ordered = in_order(state, order)
        if isinstance(phase, Interleaved):
            return in_order(way.interleaved(phase, ordered), back), steps, {}
        point, buffers = way.descend(phase, ordered, training, buffers_in_order(kept, order))
        trained = reached(in_order(point, back), batches.steps * phase.repeats, training, place)
        after = torch.vmap(phase.absorb)(state, trained)
        return after, steps, buffers_in_order(buffers, back) or {}

    def settings(self, phase: Train | Interleaved) -> Training:
        given = phase.settings if isinstance(phase, Train) else None
        return self.training if given is None else given(self.training)

    def _trains(self, phase: Train | Interleaved) -> bool:
        """Whether the phase has any parameter to train."""
        if isinstance(phase, Interleaved):
            return True
        program = self.program()
        shared = program.shared.size if phase.part != "personal" else 0
        return shared + (program.personal.size if phase.part != "shared" else 0) > 0

    def trains_on_features(self, phase: Train, point: Point, rows: Integers) -> bool:
        """Whether a head is trained on a body that stands still, and nothing else looks at it."""
        hooked = phase.loss or phase.at or phase.lookahead or phase.gradient
        if phase.part != "personal" or hooked or self.examples.augmented:
            return False
        if self._head_is_last is None:
            x, _ = self.examples.gather(rows[:1], np.zeros((1, 1), dtype=np.int64))
            one = Point(*(part[0] for part in point))
            self._head_is_last = head_is_last(self.program(), one, x[0])
        return self._head_is_last

    def once(
        self, phase: Once, personal: Callable[[Any], Point], state: Any, group: Group, place: Place
    ) -> tuple[Any, Integers]:
        """The state after one step of every client, and how many gradients it took."""
        asked: dict[str, Any] = {}
        if phase.gradient or phase.statistics is not None:
            point = torch.vmap(phase.at or personal)(state)
        if phase.gradient:
            asked["gradient"] = self._first_gradient(point, group, place)
        if phase.statistics is not None:
            asked["statistics"] = self._statistics(phase, point, state, group)
        if phase.noise:
            asked["noise"] = self._noise(group, place)
        steps = np.full(len(group.rows), int(phase.gradient), dtype=np.int64)
        return self.stepped(phase, state, asked, place), steps

    def stepped(self, phase: Once, state: Any, asked: dict[str, Any], place: Place) -> Any:
        def step(state: Any, asked: dict[str, Any]) -> Any:
            moment = _WatchedMoment(
                place.round, self.rounds, self.training, place.share, **asked, owner=self
            )
            return phase.step(state, moment)

        if phase.one_by_one:
            return _one_by_one(step, state, asked)
        try:
            return torch.vmap(step)(state, asked)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise QuiverError(
                f"a Once step cannot be computed for all clients together ({first}) Use tensor "
                "operations only, such as torch.where in place of if, or Once(…, one_by_one=True)."
            ) from error

    def _first_gradient(self, point: Point, group: Group, place: Place) -> Point:
        """Of the plain loss on the first batch of this phase."""
        sizes, batch = self.examples.sizes[group.rows], self.training.batch_size
        counts = sizes if batch is None else np.minimum(batch, sizes)
        samples = np.zeros((len(sizes), int(counts.max())), dtype=np.int64)
        for row, (client, size) in enumerate(zip(group.ids, sizes, strict=True)):
            order = np.arange(size)
            if batch is not None:
                order = batch_order(self.seed, int(client), place.round, place.number, 0, int(size))
            samples[row, : counts[row]] = order[: counts[row]]
        x, y = self.examples.gather(group.rows, samples)
        weights = weights_of(counts, samples.shape[1], point.shared)
        slope = self.executor.bind(self.program(), point, "whole")(len(sizes), x, y, weights)
        cut = point.shared.shape[1]
        return Point(slope[:, :cut], slope[:, cut:])

    def _statistics(self, phase: Once, point: Point, state: Any, group: Group) -> Message:
        """Sums over all training samples, as they are."""
        assert phase.statistics is not None
        sizes = self.examples.sizes[group.rows]
        total: Message = {}
        for begin in range(0, int(sizes.max()), SLAB):
            places = np.arange(begin, min(begin + SLAB, int(sizes.max())))
            inside = torch.from_numpy(places < sizes[:, None]).to(point.shared)
            x, y = self.examples.gather(group.rows, np.minimum(places, sizes[:, None] - 1))
            seen = self.executor.see(self.program(), point, x, features=self.task.head is not None)
            found: Message = torch.vmap(phase.statistics)(seen, y, inside, state)
            for name, leaf in found.items():
                total[name] = leaf if name not in total else total[name] + leaf
        return total

    def _noise(self, group: Group, place: Place) -> Tensor:
        """Uniform numbers, one per parameter. Every phase draws its own; number 1 has the key it
        had when phases had none."""
        size = self.program().shared.size + self.program().personal.size
        key = (place.round,) if place.number == 1 else (place.round, place.number)
        drawn = [stream(self.seed, "noise", int(c), *key).random(size) for c in group.ids]
        return torch.from_numpy(np.stack(drawn)).to(self.device)


@dataclass(frozen=True, eq=False)
class _Way:
    """Clients on their way through the batches of a phase, the busiest first."""

    trainer: Trainer
    rows: Integers
    ids: Integers
    order: Integers
    batches: Plan
    place: Place

    def batch(self, step: int) -> Batch:
        """The samples of those who still have batches: the first k."""
        k = int(np.count_nonzero(self.batches.steps > step))
        some = self.order[:k]
        counts = self.batches.counts[some, step]
        samples = self.batches.samples[some, step, : int(counts.max())]
        keys = None
        if self.trainer.examples.augmented:
            epoch = self.batches.epochs[some, step][:, None]
            ids, place = self.ids[:k, None], self.place
            keys = sample_keys(self.trainer.seed, ids, place.round, place.number, epoch, samples)
        return Batch(samples, counts, keys)

    def descend(
        self, phase: Train, state: Any, training: Training, kept: Buffers | None
    ) -> tuple[Point, Buffers]:
        """Where the phase gets to, and its optimizer's buffers."""
        trainer = self.trainer
        start = torch.vmap(phase.point)(state)
        source: Source = trainer.examples
        programs: Callable[[int], Program] = trainer.program
        moving = start
        if trainer.trains_on_features(phase, start, self.rows):
            program = trainer.program()
            source = HeadFeatures.of(trainer.executor, program, trainer.examples, start, self.rows)
            head = program.head_alone()
            programs, moving = (lambda _: head), Point(start.shared[:, :0], start.personal)
        rates = rates_of(phase, state, start, training, self.place.round)
        stepper = Stepper(
            phase, trainer.executor, programs, source, moving, state, rates, training, kept
        )
        for step in range(int(self.batches.steps.max())):
            stop_if_halted()
            batch = self.batch(step)
            stepper.step(self.rows[: len(batch.counts)], batch)
        shared = stepper.point.shared if moving is start else start.shared
        return Point(shared, stepper.point.personal), stepper.buffers

    def interleaved(self, phase: Interleaved, state: Any) -> Any:
        """The state after phases that take turns on every batch."""
        steppers = [
            self._waiting(inner, state, slot) if isinstance(inner, Train) else None
            for slot, inner in enumerate(phase.phases)
        ]
        for step in range(int(self.batches.steps.max())):
            stop_if_halted()
            batch = self.batch(step)
            some = type(state)(*(leaf[: len(batch.counts)] for leaf in state))
            for inner, stepper in zip(phase.phases, steppers, strict=True):
                if isinstance(inner, Once):
                    some = self.trainer.stepped(inner, some, {}, self.place)
                elif stepper is not None:
                    some = self._turn(stepper, inner, some, batch)
            state = _first_replaced(state, some)
        return state

    def _waiting(self, phase: Train, state: Any, slot: int) -> Stepper:
        """Each phase has modules of its own, as it stays bound to its own model."""
        trainer, training = self.trainer, self.trainer.settings(phase)
        start = torch.vmap(phase.point)(state)
        rates = rates_of(phase, state, start, training, self.place.round)

        def programs(number: int) -> Program:
            return trainer.program(SLOTS * slot + number)

        return Stepper(
            phase,
            trainer.executor,
            programs,
            trainer.examples,
            start,
            state,
            rates,
            training,
            loaded=True,
        )

    def _turn(self, stepper: Stepper, phase: Train, state: Any, batch: Batch) -> Any:
        k = len(batch.counts)
        stepper.load(torch.vmap(phase.point)(state), state)
        stepper.step(self.rows[:k], batch)
        here = Point(*(part[:k].clone() for part in stepper.point))
        training = self.trainer.settings(phase)
        trained = reached(here, np.full(k, phase.repeats), training, self.place)
        return torch.vmap(phase.absorb)(state, trained)


@dataclass(frozen=True)
class _WatchedMoment(Moment):
    """Notes that the rate is read: one that nobody reads would change nothing."""

    owner: Trainer | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in ("rate", "personal_rate", "training"):
            object.__getattribute__(self, "owner").rate_was_read = True
        return object.__getattribute__(self, name)


def gradients_of(phase: Train | Interleaved) -> int:
    """How often a batch is passed through the model and back: what a local step costs."""
    if isinstance(phase, Interleaved):
        return sum(gradients_of(inner) for inner in phase.phases if isinstance(inner, Train))
    twice = phase.lookahead is not None and not phase.lookahead.halves
    return phase.repeats * (2 if twice else 1)


def rates_of(phase: Train, state: Any, start: Point, training: Training, round: int) -> Rates:
    one = torch.ones(len(start.shared), dtype=torch.float64, device=start.shared.device)
    scale = one if phase.scale is None else torch.vmap(phase.scale)(state)
    shared = training.rate(round)
    personal = training.personal_rate(round) if phase.personal_rate else shared

    def column(rate: float) -> Tensor:
        return (rate * scale).to(start.shared.dtype).unsqueeze(1)

    if phase.part == "whole" and personal != shared:
        cut = start.shared.shape[1]
        return (slice(0, cut), column(shared)), (slice(cut, None), column(personal))
    return ((slice(None), column(personal if phase.part == "personal" else shared)),)


def reached(point: Point, steps: Integers, training: Training, place: Place) -> Trained:
    """The trained models with what a method may want to know of how they were made."""
    like = point.shared
    taken = torch.from_numpy(steps).to(like)
    rate, share = (like.new_full(taken.shape, v) for v in (training.rate(place.round), place.share))
    return Trained(*point, steps=taken, rate=rate, share=share)


def in_order(stacked: Any, order: Integers) -> Any:
    """The same clients in another order; untouched when the order is the given one."""
    if (order == np.arange(len(order))).all():
        return stacked
    index = torch.from_numpy(order)
    return type(stacked)(*(leaf[index] for leaf in stacked))


def buffers_in_order(buffers: Buffers | None, order: Integers) -> Buffers | None:
    return buffers and {name: leaf[torch.from_numpy(order)] for name, leaf in buffers.items()}


def _first_replaced(state: Any, first: Any) -> Any:
    """The first clients' new states before the others' old ones."""
    k = len(next(iter(first)))
    if k == len(next(iter(state))):
        return first
    pairs = zip(first, state, strict=True)
    return type(state)(*(torch.cat([new, old[k:]]) for new, old in pairs))


def _one_by_one(step: Callable[[Any, Any], Any], state: Any, asked: dict[str, Any]) -> Any:
    found = []
    for place in range(len(next(iter(state)))):
        one = type(state)(*(leaf[place] for leaf in state))
        found.append(step(one, {name: _at(value, place) for name, value in asked.items()}))
    return type(state)(*(torch.stack(leaves) for leaves in zip(*found, strict=True)))


def _at(value: Any, place: int) -> Any:
    if isinstance(value, Tensor):
        return value[place]
    if isinstance(value, dict):
        return {name: leaf[place] for name, leaf in value.items()}
    return type(value)(*(leaf[place] for leaf in value))
