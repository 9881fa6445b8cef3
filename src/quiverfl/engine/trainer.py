"""Training phases for stacked clients: the loops that methods never see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.batches import ADAPT, Plan, batch_counts, plan, sample_keys
from quiverfl.engine.context import ClientGroup, PhaseContext, Place
from quiverfl.engine.features import HeadFeatures, head_is_last
from quiverfl.engine.fit import phase_settings
from quiverfl.engine.lifting import lift, lift_point, same_kind
from quiverfl.engine.once import OnceSteps
from quiverfl.engine.optimizer import Buffers, Rates
from quiverfl.engine.programs import Program
from quiverfl.engine.stepper import Batch, Feed, Source, Stepper
from quiverfl.engine.workers import stop_if_halted
from quiverfl.methods.contract import Interleaved, Once, Phase, Train, Trained
from quiverfl.seeds import Hashes
from quiverfl.task import Point
from quiverfl.training import Training
from quiverfl.transforms.noise import Noise

Integers = npt.NDArray[np.int64]

SLOTS = 8
"""Modules a phase may want of a worker: its own and its teachers'."""


@dataclass(eq=False)
class Trainer:
    """Trains groups of clients; knows data and optimizer, knows no method."""

    context: PhaseContext
    once: OnceSteps
    _head_is_last: bool = field(default=False, init=False)

    def prepare(self, phases: Iterable[Phase]) -> None:
        """Tracing a model changes how modules are called everywhere: done before workers begin."""
        task = self.context.task
        if any(isinstance(phase, Train) and _plain_head(phase) for phase in phases):
            self._head_is_last = head_is_last(task.skeleton, task.head)

    def train(
        self,
        phase: Train | Interleaved,
        state: Any,
        group: ClientGroup,
        place: Place,
        epochs: Integers | None = None,
        kept: Buffers | None = None,
    ) -> tuple[Any, Integers, Buffers]:
        """The state after the phase, the steps each client took, and the optimizer's buffers.

        `epochs` are each client's own, where they are not the phase's.
        """
        training, own = self.settings(phase), epochs is not None
        sizes = self.context.examples.sizes[group.rows]
        if epochs is None and phase.epochs is not None:
            epochs = np.full(len(sizes), phase.epochs)
        batches = plan(
            self.context.seed,
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
        among = self._among(phase, group, batches, own)
        way = _Way(self, group, order, batches, among, place)
        ordered = _in_order(state, order)
        if isinstance(phase, Interleaved):
            return _in_order(way.interleaved(phase, ordered), back), steps, {}
        point, buffers = way.descend(phase, ordered, training, _buffers_in_order(kept, order))
        trained = _reached(_in_order(point, back), batches.steps * phase.repeats, training, place)
        after = same_kind(phase.absorb, lift(phase.absorb)(state, trained), state)
        return after, steps, _buffers_in_order(buffers, back) or {}

    def _among(
        self, phase: Train | Interleaved, group: ClientGroup, batches: Plan, own: bool
    ) -> Integers:
        """How many samples each step has of everybody in the group's company.

        `own`: each client has its own number of epochs.
        """
        company, epochs = group.company, None
        if company is None:
            return batches.counts
        if own:
            epochs = company.epochs
        elif phase.epochs is not None:
            epochs = np.full(len(company.train), phase.epochs)
        batch_size = self.settings(phase).batch_size
        return batch_counts(epochs, company.train, batch_size, phase.steps)

    def visits(self, phase: Train | Interleaved, group: ClientGroup, steps: Integers) -> Integers:
        """How often a sample was looked at, at most, in so many steps of a phase."""
        sizes, each = self.context.examples.sizes[group.rows], gradients_of(phase)
        batch = self.settings(phase).batch_size
        epoch = -(-sizes // (sizes if batch is None else np.minimum(batch, sizes)))
        found: Integers = each * -(-(steps // each) // epoch)
        return found

    def settings(self, phase: Train | Interleaved) -> Training:
        return phase_settings(phase, self.context.training)

    def _trains(self, phase: Train | Interleaved) -> bool:
        """Whether the phase has any parameter to train."""
        if isinstance(phase, Interleaved):
            return True
        task = self.context.task
        shared = task.shared_layout.size if phase.part != "personal" else 0
        return shared + (task.personal_layout.size if phase.part != "shared" else 0) > 0

    def trains_on_features(self, phase: Train) -> bool:
        """Whether a head is trained on a body that stands still, and nothing else looks at it."""
        # With augmentation or dropout the body sees something else at every visit.
        still = not self.context.examples.augmented and not self.context.draws
        return still and self._head_is_last and _plain_head(phase)


@dataclass(frozen=True, eq=False)
class _Way:
    """Clients on their way through the batches of a phase, the busiest first."""

    trainer: Trainer
    group: ClientGroup
    order: Integers
    batches: Plan
    among: Integers
    place: Place

    @property
    def rows(self) -> Integers:
        return self.group.rows[self.order]

    def each_batch(self) -> Iterator[Batch]:
        """Step by step, the samples of those who still have batches: the first k."""
        context, steps = self.trainer.context, np.arange(int(self.batches.steps.max()))
        draws = context.draws  # what is not needed is not asked for at every step
        clients = np.count_nonzero(self.batches.steps[:, None] > steps, axis=0).tolist()
        widths = self.among.max(axis=0).tolist()
        counts, samples = self.batches.counts[self.order], self.batches.samples[self.order]
        keys, samples = (_wide(each, max(widths)) for each in (self._keys(samples), samples))
        # Others of the company may take more steps than those here.
        for step, (k, width) in enumerate(zip(clients, widths, strict=False)):
            some, among = self.order[:k], self.among[:, step]
            yield Batch(
                samples[:k, step, :width],
                counts[:k, step],
                None if keys is None else keys[:k, step, :width],
                among if len(among) == 1 else among[among > 0],
                context.draw_keys(self.group.ids[some], self.place, step) if draws else None,
                None if context.private is None else self._noise(some, step),
            )

    def _noise(self, some: Integers, step: int) -> Noise | None:
        """What is sent is private, not what a model is tuned by before it is evaluated."""
        context, place = self.trainer.context, self.place
        if context.private is None or place.number == ADAPT:
            return None
        purpose = f"dp_sgd {place.number} {step}"
        return Noise(context.seed, purpose, place.round, self.group.ids[some], context.secret)

    def _keys(self, samples: Integers) -> Hashes | None:
        """What augmentation draws from, for every visit of the phase; at once, as it is cheaper."""
        context, place = self.trainer.context, self.place
        if not context.examples.augmented:
            return None
        epochs = self.batches.epochs[self.order][:, :, None]
        ids = self.group.ids[self.order][:, None, None]
        return sample_keys(context.seed, ids, place.round, place.number, epochs, samples)

    def descend(
        self, phase: Train, state: Any, training: Training, kept: Buffers | None
    ) -> tuple[Point, Buffers]:
        """Where the phase gets to, and its optimizer's buffers."""
        context = self.trainer.context
        start = moving = lift_point(phase.point)(state)
        source: Source = context.examples
        programs: Callable[[int], Program] = context.program
        if self.trainer.trains_on_features(phase):
            program = context.program()
            most = None if self.group.company is None else int(self.group.company.train.max())
            source = HeadFeatures.of(
                context.executor, program, context.examples, start, self.rows, most
            )
            head = program.head_alone()
            programs, moving = (lambda _: head), Point(start.shared[:, :0], start.personal)
        rates = _rates(phase, state, start, training, self.place.round)
        stepper = Stepper(
            phase,
            context.executor,
            programs,
            source,
            moving,
            state,
            rates,
            training,
            kept,
            private=context.private,
            by_sample=context.by_sample,
        )
        for feed in stepper.feeds(self.rows, self.each_batch()):
            stop_if_halted()
            stepper.step(feed)
        shared = stepper.point.shared if moving is start else start.shared
        return Point(shared, stepper.point.personal), stepper.buffers

    def interleaved(self, phase: Interleaved, state: Any) -> Any:
        """The state after phases that take turns on every batch."""
        steppers = [
            self._waiting(inner, state, slot) if isinstance(inner, Train) else None
            for slot, inner in enumerate(phase.phases)
        ]
        batches = list(self.each_batch())
        feeds = [None if s is None else s.feeds(self.rows, batches) for s in steppers]
        for batch in batches:
            stop_if_halted()
            some = type(state)(*(leaf[: len(batch.counts)] for leaf in state))
            for inner, stepper, feed in zip(phase.phases, steppers, feeds, strict=True):
                if isinstance(inner, Once):
                    some = self.trainer.once.step(inner, some, self.place, {})
                elif stepper is not None and feed is not None:
                    some = self._turn(stepper, inner, some, next(feed))
            state = _first_replaced(state, some)
        return state

    def _waiting(self, phase: Train, state: Any, slot: int) -> Stepper:
        """Each phase has modules of its own, as it stays bound to its own model."""
        context, training = self.trainer.context, self.trainer.settings(phase)
        start = lift_point(phase.point)(state)

        def programs(number: int) -> Program:
            return context.program(SLOTS * slot + number)

        return Stepper(
            phase,
            context.executor,
            programs,
            context.examples,
            start,
            state,
            _rates(phase, state, start, training, self.place.round),
            training,
            loaded=True,
            private=context.private,
            by_sample=context.by_sample,
            slot=slot,
        )

    def _turn(self, stepper: Stepper, phase: Train, state: Any, feed: Feed) -> Any:
        k = len(feed[0].places)
        stepper.load(lift_point(phase.point)(state), state)
        stepper.step(feed)
        here = Point(*(part[:k].clone() for part in stepper.point))
        training = self.trainer.settings(phase)
        trained = _reached(here, np.full(k, phase.repeats), training, self.place)
        return same_kind(phase.absorb, lift(phase.absorb)(state, trained), state)


def _plain_head(phase: Train) -> bool:
    hooked = phase.loss or phase.at or phase.lookahead or phase.gradient
    return phase.part == "personal" and not hooked


def gradients_of(phase: Train | Interleaved) -> int:
    """How often a batch is passed through the model and back: what a local step costs."""
    if isinstance(phase, Interleaved):
        return sum(gradients_of(inner) for inner in phase.phases if isinstance(inner, Train))
    twice = phase.lookahead is not None and not phase.lookahead.halves
    return phase.repeats * (2 if twice else 1)


def _rates(phase: Train, state: Any, start: Point, training: Training, round: int) -> Rates:
    one = torch.ones(len(start.shared), dtype=torch.float64, device=start.shared.device)
    scale = one if phase.scale is None else lift(phase.scale)(state)
    shared = training.rate(round)
    personal = training.personal_rate(round) if phase.personal_rate else shared

    def column(rate: float) -> Tensor:
        return (rate * scale).to(start.shared.dtype).unsqueeze(1)

    if phase.part == "whole" and personal != shared:
        cut = start.shared.shape[1]
        return (slice(0, cut), column(shared)), (slice(cut, None), column(personal))
    return ((slice(None), column(personal if phase.part == "personal" else shared)),)


def _reached(point: Point, steps: Integers, training: Training, place: Place) -> Trained:
    """The trained models with what a method may want to know of how they were made."""
    like = point.shared
    eta = training.rate(place.round)
    rate, share = (like.new_full(steps.shape, value) for value in (eta, place.share))
    if (steps == steps[0]).all():  # made where it is wanted: between two steps nothing is moved
        reach = like.new_full(steps.shape, eta * training.momentum_sum(int(steps[0])))
        taken = like.new_full(steps.shape, int(steps[0]))
    else:
        sums = [eta * training.momentum_sum(int(count)) for count in steps]
        reach = torch.tensor(sums, dtype=like.dtype, device=like.device)
        taken = torch.from_numpy(steps).to(like)
    return Trained(*point, steps=taken, rate=rate, reach=reach, share=share)


def _wide(samples: Any, width: int) -> Any:
    """At least so wide, padded with the client's first sample, as all padding is."""
    if samples is None or width <= samples.shape[2]:
        return samples
    padded = np.zeros((*samples.shape[:2], width), samples.dtype)  # np.pad takes longer
    padded[:, :, : samples.shape[2]] = samples
    return padded


def _in_order(stacked: Any, order: Integers) -> Any:
    """The same clients in another order; untouched when the order is the given one."""
    if (order == np.arange(len(order))).all():
        return stacked
    index = torch.from_numpy(order)
    return type(stacked)(*(leaf[index] for leaf in stacked))


def _buffers_in_order(buffers: Buffers | None, order: Integers) -> Buffers | None:
    return buffers and {name: leaf[torch.from_numpy(order)] for name, leaf in buffers.items()}


def _first_replaced(state: Any, first: Any) -> Any:
    """The first clients' new states before the others' old ones."""
    k = len(next(iter(first)))
    if k == len(next(iter(state))):
        return first
    pairs = zip(first, state, strict=True)
    return type(state)(*(torch.cat([new, old[k:]]) for new, old in pairs))
