"""Training phases for stacked clients: the loops that methods never see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.batches import ADAPT, BatchPlan, count_batches, plan_batches, sample_key_hashes
from quiverfl.data.examples import ClientExamples
from quiverfl.engine.local.context import ClientGroup, FullGroup, PhaseContext, PhaseIndex
from quiverfl.engine.local.examples import Batch, Examples, pair_halves
from quiverfl.engine.local.features import head_is_last
from quiverfl.engine.local.programs import Program
from quiverfl.engine.local.single_step import SingleSteps
from quiverfl.engine.local.step import Buffers, PhaseSteps, Rates
from quiverfl.engine.local.vmap import select_rows, vmap_clients
from quiverfl.engine.local.workers import stop_if_halted
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Interleaved, Phase, SingleStep, Train, Trained
from quiverfl.support.environment import NO_FLOAT64
from quiverfl.task import Params
from quiverfl.training import Training
from quiverfl.transforms.noise import Noise
from quiverfl.trees import tree_map
from quiverfl.types import Flags, Integers

MODULES = 8
"""Modules a phase may want of a worker: its own and its teachers'."""
FEATURES = 512
"""Samples per client that pass through the body at once."""


def phase_settings(phase: Phase, training: Training) -> Training:
    """The optimizer settings of a phase: the run's, or the method's replacement for them."""
    given = phase.settings if isinstance(phase, Train) else None
    if given is None:
        return training
    try:
        return given(training)
    except (QuiverError, TypeError) as error:
        name = getattr(given, "__qualname__", "settings")
        raise QuiverError(
            f"{name} gives a phase settings that do not work with this run's: {error} "
            "Replace every setting that it must not inherit, such as momentum=0.0."
        ) from error


@dataclass(eq=False)
class Trainer:
    """Trains groups of clients; knows data and optimizer, knows no method."""

    context: PhaseContext
    personal: Callable[[Any], Params]
    """The model that a client would use, through which a SingleStep looks unless it says."""
    _head_is_last: bool = field(default=False, init=False)

    @classmethod
    def prepare(
        cls, context: PhaseContext, personal: Callable[[Any], Params], phases: Iterable[Phase]
    ) -> Trainer:
        """Trace the model once: tracing changes how modules are called, also in other threads."""
        trainer, task = cls(context, personal), context.task
        if task.one_by_one is not None:  # BatchNorm sees another batch; other heads were not traced
            return trainer
        if any(isinstance(phase, Train) and _trains_head_only(phase) for phase in phases):
            trainer._head_is_last = head_is_last(task.skeleton, task.head)
        return trainer

    def train(
        self,
        phase: Phase,
        state: Any,
        group: ClientGroup,
        index: PhaseIndex,
        epochs: Integers | None = None,
        buffers: Buffers | None = None,
    ) -> tuple[Any, Integers, Buffers]:
        """The state after the phase, the steps each client took, and the optimizer's buffers.

        `epochs` are the epochs per client, if they differ from the phase's.
        """
        if isinstance(phase, SingleStep):
            steps_of = SingleSteps(self.context)
            return *steps_of.run(phase, self.personal, state, group, index), {}
        context, training = self.context, phase_settings(phase, self.context.training)
        unequal, sizes = epochs is not None, context.examples.sizes[group.rows]
        if epochs is None and phase.epochs is not None:
            epochs = np.full(len(sizes), phase.epochs)
        trains, each = self._trains(phase), count_gradients(phase)
        round = index.round if isinstance(index.round, int) else index.round[group.ids]
        when = (group.ids, round, index.number, epochs, sizes)
        plan = plan_batches(context.seed, *when, training.batch_size, phase.steps)
        steps = plan.steps * each
        if not plan.steps.any() or not trains:
            return state, np.zeros_like(steps), buffers or {}
        # The busiest clients first: those still training are then always the first k.
        order = np.argsort(-plan.steps, kind="stable")
        back = np.argsort(order, kind="stable")
        counts = plan.counts
        if group.full_group is not None:
            counts = self._group_counts(phase, group.full_group, unequal, training)
        ordered = ClientGroup(group.rows[order], group.ids[order], group.full_group)
        work = _PhaseWork(self, ordered, plan.arrange(order, counts), index)
        first = _take_rows(state, order)
        if isinstance(phase, Interleaved):
            return _take_rows(work.run_interleaved(phase, first), back), steps, {}
        params, buffers = work.run(phase, first, training, _take_buffers(buffers, order))
        reached = _take_rows(params, back)
        trained = _describe_trained(reached, plan.steps * phase.repeats, training, index, round)
        after = vmap_clients(phase.update)(state, trained)
        after = _keep_idle(after, state, plan.steps == 0)
        return after, steps, _take_buffers(buffers, back) or {}

    def _group_counts(
        self,
        phase: Train | Interleaved,
        full_group: FullGroup,
        unequal: bool,
        training: Training,
    ) -> Integers:
        """Number of samples per step, for every client of the whole group.

        `unequal`: each client has its own number of epochs.
        """
        epochs = full_group.epochs if unequal else None
        if not unequal and phase.epochs is not None:
            epochs = np.full(len(full_group.train), phase.epochs)
        return count_batches(epochs, full_group.train, training.batch_size, phase.steps)

    def count_visits(
        self, phase: Train | Interleaved, group: ClientGroup, steps: Integers
    ) -> Integers:
        """Largest number of times that a sample was visited in so many steps of a phase."""
        sizes, each = self.context.examples.sizes[group.rows], count_gradients(phase)
        batch = phase_settings(phase, self.context.training).batch_size
        epoch = -(-sizes // (sizes if batch is None else np.minimum(batch, sizes)))
        visits: Integers = each * -(-(steps // each) // epoch)
        return visits

    def _trains(self, phase: Train | Interleaved) -> bool:
        """Whether the phase has any parameter to train."""
        if isinstance(phase, Interleaved) or phase.part != "personal":
            return True  # every model has a shared part
        return bool(self.context.task.personal_layout.names)

    def trains_on_features(self, phase: Train) -> bool:
        """Whether a head is trained on a body that stands still, and nothing else looks at it."""
        # With augmentation or dropout the body sees something else at every visit.
        still = not self.context.examples.augmented and not self.context.draws
        return still and self._head_is_last and _trains_head_only(phase)


@dataclass(frozen=True, eq=False)
class _PhaseWork:
    """One phase of one group of clients, the busiest first."""

    trainer: Trainer
    group: ClientGroup
    plan: BatchPlan
    index: PhaseIndex

    def run(
        self, phase: Train, state: Any, training: Training, buffers: Buffers | None
    ) -> tuple[Params, Buffers]:
        """The parameters after the phase, and its optimizer's buffers."""
        context = self.trainer.context
        start = params = vmap_clients(phase.params)(state)
        examples, rows = context.examples, self.group.rows
        programs: Callable[[int], Program] = context.program
        if phase.model:
            programs = partial(context.program, model=phase.model)
        if self.trainer.trains_on_features(phase):
            program = context.program()
            examples, rows = self._compute_features(program, start), np.arange(len(rows))
            head = program.head_alone()
            programs, params = (lambda _: head), Params(start.shared[:, :0], start.personal)
        rates = _client_rates(phase, state, start, training, self._round)
        steps = PhaseSteps(phase, context, programs, params, state, rates, training, buffers)
        steps.run(self._batches(phase, examples, rows))
        shared = steps.params.shared if params is start else start.shared
        return Params(shared, steps.params.personal), steps.buffers

    def run_interleaved(self, phase: Interleaved, state: Any) -> Any:
        """The state after phases that take turns on every batch."""
        context, rows = self.trainer.context, self.group.rows
        turns: list[tuple[Any, Any, Any]] = []
        for turn, inner in enumerate(phase.phases):
            if isinstance(inner, SingleStep):
                turns.append((inner, None, None))
            else:
                batches = self._batches(inner, context.examples, rows)
                turns.append((inner, self._loaded_steps(inner, state, turn), batches))
        for k in self.plan.clients:
            stop_if_halted()
            first = type(state)(*(leaf[:k] for leaf in state))
            for inner, steps, batches in turns:
                if isinstance(inner, SingleStep):
                    first = SingleSteps(context).step(inner, first, self.index, {})
                else:
                    first = self._take_turn(steps, inner, first, next(batches))
            state = _replace_first(state, first)
        return state

    def _batches(self, phase: Train, examples: Examples, rows: Integers) -> Iterator[Batch]:
        """The batches of a phase, one per step."""
        if phase.lookahead is None or not phase.lookahead.split_batch:
            return self._load(examples, rows, self.plan)
        halves = (self._load(examples, rows, plan) for plan in self.plan.split_in_halves())
        return pair_halves(*halves)

    def _load(self, examples: Examples, rows: Integers, plan: BatchPlan) -> Iterator[Batch]:
        context, index, ids = self.trainer.context, self.index, self.group.ids
        hashes = keys = None
        if examples.augmented:  # for every visit of the phase at once, as it is cheaper
            epochs, clients = plan.epochs[:, :, None], ids[:, None, None]
            round = index.round if isinstance(index.round, int) else index.round[clients]
            when = (clients, round, index.number, epochs, plan.samples)
            hashes = sample_key_hashes(context.seed, *when)
        if context.draws:
            keys = context.draw_keys(ids[:, None], index, np.arange(plan.samples.shape[1]))
        # What is sent is private, not what a model is tuned by before it is evaluated.
        private = context.private is not None and index.number != ADAPT
        return examples.batches(rows, plan, hashes, keys, self._make_noise if private else None)

    def _make_noise(self, clients: int, step: int) -> Noise:
        context, index = self.trainer.context, self.index
        purpose = f"dp_sgd {index.number} {step}"
        assert isinstance(index.round, int)  # a clock refuses DP-SGD where rounds are not in step
        return Noise(context.seed, purpose, index.round, self.group.ids[:clients], context.secret)

    def _compute_features(self, program: Program, params: Params) -> Examples:
        """The body's features of all training samples, in place of the samples."""
        context, rows, full_group = self.trainer.context, self.group.rows, self.group.full_group
        sizes = context.examples.sizes[rows]
        width = int((sizes if full_group is None else full_group.train).max())
        samples = np.minimum(np.arange(width), sizes[:, None] - 1)
        parts, targets = [], []
        for begin in range(0, width, FEATURES):
            x, y = context.examples.gather(rows, samples[:, begin : begin + FEATURES])
            parts.append(context.executor.forward(program, params, x, features=True).features)
            targets.append(y)
        if isinstance(targets[0], Tensor):
            y = torch.cat(targets, dim=1).flatten(0, 1)
        else:
            y = tree_map(lambda *slabs: torch.cat(slabs, dim=1).flatten(0, 1), *targets)
        offsets = np.arange(len(rows) + 1) * width
        split = ClientExamples(torch.cat(parts, dim=1).flatten(0, 1), y, offsets)
        return Examples(split, None, context.dtype, context.device)

    def _loaded_steps(self, phase: Train, state: Any, turn: int) -> PhaseSteps:
        """Steps of a phase that takes turns, on its own modules: it stays bound to its model."""
        context = self.trainer.context
        training = phase_settings(phase, context.training)
        start = vmap_clients(phase.params)(state)

        def programs(number: int) -> Program:
            return context.program(MODULES * turn + number, phase.model)

        rates = _client_rates(phase, state, start, training, self._round)
        return PhaseSteps(phase, context, programs, start, state, rates, training, turn=turn)

    def _take_turn(self, steps: PhaseSteps, phase: Train, state: Any, batch: Batch) -> Any:
        k = batch.clients
        steps.load(vmap_clients(phase.params)(state), state)
        steps.step(batch)
        reached = Params(*(part[:k].clone() for part in steps.params))
        training = phase_settings(phase, self.trainer.context.training)
        round = self._round if isinstance(self._round, int) else self._round[:k]
        taken = np.full(k, phase.repeats)
        trained = _describe_trained(reached, taken, training, self.index, round)
        return vmap_clients(phase.update)(state, trained)

    @property
    def _round(self) -> int | Integers:
        """The round, or every client's own."""
        round = self.index.round
        return round if isinstance(round, int) else round[self.group.ids]


def _trains_head_only(phase: Train) -> bool:
    hooked = phase.loss or phase.gradient_at or phase.lookahead or phase.gradient
    return phase.part == "personal" and not hooked


def count_gradients(phase: Train | Interleaved) -> int:
    """Number of forward and backward passes per batch: the cost of a local step."""
    if isinstance(phase, Interleaved):
        return sum(count_gradients(inner) for inner in phase.phases if isinstance(inner, Train))
    twice = phase.lookahead is not None and not phase.lookahead.split_batch
    return phase.repeats * (2 if twice else 1)


def _client_rates(
    phase: Train, state: Any, start: Params, training: Training, round: int | Integers
) -> Rates:
    device = start.shared.device
    exact = torch.float64 if device.type not in NO_FLOAT64 else torch.float32
    one = torch.ones(len(start.shared), dtype=exact, device=device)
    scale = one if phase.lr_scale is None else vmap_clients(phase.lr_scale)(state)
    shared: float | Tensor
    personal: float | Tensor
    if isinstance(round, int):
        shared = training.lr_at(round)
        personal = training.personal_lr_at(round) if phase.use_personal_lr else shared
        same = personal == shared
    else:
        shared = _own_rates(training.lr_at, round, one)
        personal = shared
        if phase.use_personal_lr:
            personal = _own_rates(training.personal_lr_at, round, one)
        same = torch.equal(personal, shared)

    def column(rate: float | Tensor) -> Tensor:
        return (rate * scale).to(start.shared.dtype).unsqueeze(1)

    if phase.part == "whole" and not same:
        cut = start.shared.shape[1]
        return (slice(0, cut), column(shared)), (slice(cut, None), column(personal))
    return ((slice(None), column(personal if phase.part == "personal" else shared)),)


def _own_rates(rate_at: Callable[[int], float], rounds: Integers, like: Tensor) -> Tensor:
    """The learning rate of each client's current round."""
    return like.new_tensor([rate_at(own) for own in rounds.tolist()])


def _describe_trained(
    params: Params, steps: Integers, training: Training, index: PhaseIndex, round: int | Integers
) -> Trained:
    """The trained models with the steps and rates of their training, for the method."""
    like = params.shared
    if not isinstance(round, int):
        return _describe_own_rounds(params, steps, training, index.active_fraction, round)
    eta = training.lr_at(round)
    rate, fraction = (like.new_full(steps.shape, value) for value in (eta, index.active_fraction))
    if (steps == steps[0]).all():  # made where it is wanted: between two steps nothing is moved
        reach = like.new_full(steps.shape, eta * training.momentum_sum(int(steps[0])))
        taken = like.new_full(steps.shape, int(steps[0]))
    else:
        sums = [eta * training.momentum_sum(int(count)) for count in steps]
        reach = torch.tensor(sums, dtype=like.dtype, device=like.device)
        taken = torch.from_numpy(steps).to(like)
    return Trained(*params, steps=taken, lr=rate, effective_lr_sum=reach, active_fraction=fraction)


def _describe_own_rounds(
    params: Params, steps: Integers, training: Training, fraction: float, rounds: Integers
) -> Trained:
    """The same, if each client counts its own rounds."""
    like, etas = params.shared, [training.lr_at(own) for own in rounds.tolist()]
    reach = [eta * training.momentum_sum(n) for eta, n in zip(etas, steps.tolist(), strict=True)]
    return Trained(
        *params,
        steps=torch.from_numpy(steps).to(like),
        lr=torch.tensor(etas, dtype=like.dtype, device=like.device),
        effective_lr_sum=torch.tensor(reach, dtype=like.dtype, device=like.device),
        active_fraction=like.new_full(steps.shape, fraction),
    )


def _keep_idle(after: Any, before: Any, idle: Flags) -> Any:
    """A client that takes no step has no update, even if others of its group train."""
    if not idle.any():
        return after
    pairs = zip(before, after, strict=True)
    return type(after)(*(select_rows(idle, old, new) for old, new in pairs))


def _take_rows(stacked: Any, order: Integers) -> Any:
    """The same clients in another order; untouched when the order is the given one."""
    if (order == np.arange(len(order))).all():
        return stacked
    index = torch.from_numpy(order)
    return type(stacked)(*(leaf[index] for leaf in stacked))


def _take_buffers(buffers: Buffers | None, order: Integers) -> Buffers | None:
    return buffers and {name: leaf[torch.from_numpy(order)] for name, leaf in buffers.items()}


def _replace_first(state: Any, first: Any) -> Any:
    """The new states of the first clients, followed by the old states of the rest."""
    k = len(next(iter(first)))
    if k == len(next(iter(state))):
        return first
    pairs = zip(first, state, strict=True)
    return type(state)(*(torch.cat([new, old[k:]]) for new, old in pairs))
