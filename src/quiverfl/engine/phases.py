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
from quiverfl.engine.examples import Examples
from quiverfl.engine.programs import Executor, Gradient, Program
from quiverfl.engine.sgd import Descent
from quiverfl.engine.workers import check, place
from quiverfl.methods.contract import State, Train
from quiverfl.task import Point, Task
from quiverfl.training import Training

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Clients computed together: their rows in the shard and their numbers in the federation."""

    rows: Integers
    ids: Integers


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
    _head_is_last: bool | None = field(default=None, init=False)
    _programs: dict[int, Program] = field(default_factory=dict, init=False)

    @property
    def program(self) -> Program:
        """The worker's own, as a module can be bound to one client at a time."""
        here = place()
        if here not in self._programs:
            self._programs[here] = Program.of(self.task, self.dtype, self.device)
        return self._programs[here]

    def train(
        self, phase: Train, number: int, state: State, group: Group, round: int, epochs: Integers
    ) -> tuple[State, Integers]:
        """The state after the phase, and the steps each client took."""
        training = phase.settings(self.training) if phase.settings else self.training
        sizes = self.examples.sizes[group.rows]
        batches = plan(self.seed, group.ids, round, number, epochs, sizes, training.batch_size)
        size = _size(self.program, phase)
        if size == 0 or not batches.steps.any():
            return state, np.zeros_like(epochs)
        # The busiest clients first: those still training are then always the first k.
        order = np.argsort(-batches.steps, kind="stable")
        ordered = lift_rows(state, order)
        point = self._descend(phase, number, ordered, group, order, batches, round, training)
        back = torch.from_numpy(np.argsort(order, kind="stable"))
        point = Point(*(part[back] for part in point)) if len(order) > 1 else point
        return torch.vmap(phase.absorb)(state, point), batches.steps

    def _descend(
        self,
        phase: Train,
        number: int,
        state: State,
        group: Group,
        order: Integers,
        batches: Plan,
        round: int,
        training: Training,
    ) -> Point:
        start = torch.vmap(phase.point)(state)
        values, point = _workspace(start, phase.part)
        rates = _rates(phase, state, start, training, round)
        descent = Descent.start(values, rates, training)
        rows, ids = group.rows[order], group.ids[order]
        gather, gradient = self._source(phase, point, rows)
        for step in range(int(batches.steps.max())):
            check()
            k = int(np.count_nonzero(batches.steps > step))
            counts = batches.counts[order[:k], step]
            width = int(counts.max())
            samples = batches.samples[order[:k], step, :width]
            keys = None
            if self.examples.augmented:
                epoch = batches.epochs[order[:k], step]
                keys = sample_keys(self.seed, ids[:k, None], round, number, epoch[:, None], samples)
            x, y = gather(rows[:k], samples, keys)
            weights = _weights(counts, width, values)
            slope = gradient(k, x, y, weights)
            if phase.gradient is not None:
                slope = _hooked(phase, slope, point, state, k)
            descent.step(slope)
        return point

    def _source(
        self, phase: Train, point: Point, rows: Integers
    ) -> tuple[Callable[..., tuple[Tensor, Tensor]], Gradient]:
        """Where batches come from, and the gradient on them.

        A head on a frozen body is trained on the body's features, computed once: they cannot
        change during the phase unless inputs are augmented anew at every visit.
        """
        if phase.part == "personal" and not self.examples.augmented:
            features = self._features(point, rows)
            if features is not None and self.task.head is not None:
                head = self.program.head(self.task.head)
                only = Point(point.shared[:, :0], point.personal)
                position = {int(row): place for place, row in enumerate(rows)}

                def gather(some: Integers, samples: Integers, _: object) -> tuple[Tensor, Tensor]:
                    places = torch.tensor([position[int(row)] for row in some])[:, None]
                    return features[0][places, samples], features[1][places, samples]

                return gather, self.executor.bind(head, only, "personal")
        return self.examples.gather, self.executor.bind(self.program, point, phase.part)

    def _features(self, point: Point, rows: Integers) -> tuple[Tensor, Tensor] | None:
        if self.task.head is None or self._head_is_last is False:
            return None
        width = int(self.examples.sizes[rows].max())
        samples = np.minimum(np.arange(width), self.examples.sizes[rows][:, None] - 1)
        parts, targets = [], []
        for begin in range(0, width, FEATURE_BATCH):
            x, y = self.examples.gather(rows, samples[:, begin : begin + FEATURE_BATCH])
            features = self.executor.features(self.program, self.task.head, point, x)
            if features is None:
                self._head_is_last = False
                return None
            parts.append(features)
            targets.append(y)
        return torch.cat(parts, dim=1), torch.cat(targets, dim=1)

    def gradient(self, point: Point, group: Group, round: int, number: int) -> Point:
        """Of the plain loss of one client on the first mini-batch of this phase, for Once steps."""
        size = int(self.examples.sizes[group.rows][0])
        samples = np.arange(size)
        if self.training.batch_size is not None:
            order = batch_order(self.seed, int(group.ids[0]), round, number, 0, size)
            samples = order[: self.training.batch_size]
        x, y = self.examples.gather(group.rows, samples[None, :])
        slope = self.executor.bind(self.program, point, "whole")(1, x, y, None)
        return _halves(slope, point)


FEATURE_BATCH = 512


def lift_rows(state: State, order: Integers) -> State:
    """The same clients in another order; untouched when the order is the given one."""
    if (order == np.arange(len(order))).all():
        return state
    index = torch.from_numpy(order)
    return type(state)(*(leaf[index] for leaf in state))


def _size(program: Program, phase: Train) -> int:
    shared = program.shared.size if phase.part != "personal" else 0
    return shared + (program.personal.size if phase.part != "shared" else 0)


def _workspace(start: Point, part: str) -> tuple[Tensor, Point]:
    """A copy of the trained part to step in place, and the point that looks into it."""
    if part == "shared":
        values = start.shared.clone()
        return values, Point(values, start.personal)
    if part == "personal":
        values = start.personal.clone()
        return values, Point(start.shared, values)
    values = torch.cat(start, dim=1)
    return values, _halves(values, start)


def _halves(values: Tensor, like: Point) -> Point:
    cut = like.shared.shape[1]
    return Point(values[:, :cut], values[:, cut:])


def _rates(
    phase: Train, state: State, start: Point, training: Training, round: int
) -> tuple[tuple[slice, Tensor], ...]:
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


def _weights(counts: Integers, width: int, like: Tensor) -> Tensor | None:
    if (counts == width).all():
        return None
    inside = torch.from_numpy(np.arange(width) < counts[:, None])
    return inside.to(dtype=like.dtype, device=like.device)


def _hooked(phase: Train, slope: Tensor, point: Point, state: Any, k: int) -> Tensor:
    assert phase.gradient is not None
    empty = slope[:, :0]
    if phase.part == "whole":
        slopes = _halves(slope, point)
    else:
        slopes = Point(slope, empty) if phase.part == "shared" else Point(empty, slope)
    first = type(state)(*(leaf[:k] for leaf in state))
    changed = torch.vmap(phase.gradient)(slopes, Point(*(part[:k] for part in point)), first)
    return torch.cat(changed, dim=1)
