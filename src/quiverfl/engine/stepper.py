"""The steps of one Train phase for stacked clients: where gradients are taken, and what moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.lifting import lift, lift_point
from quiverfl.engine.optimizer import Buffers, Descent, Rates
from quiverfl.engine.picks import Picks, moved, padding
from quiverfl.engine.private_gradients import private_gradient
from quiverfl.engine.programs import Executor, Losses, Program, aligned
from quiverfl.engine.sample_gradients import SampleGradients, bind_samples, samples_at_once
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Loss, Train
from quiverfl.methods.state import State
from quiverfl.seeds import Hashes
from quiverfl.task import Point, Seen
from quiverfl.training import Training
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import DPSGD
from quiverfl.trees import Tree, first_leaf

Integers = npt.NDArray[np.int64]
Feed = tuple[Picks, ...]
"""What one step is taken on: a batch, or its two halves."""


MOST_REPEATS = 1 << 20
"""Of a phase on a batch: phases that take turns on it are blurred by numbers of their own."""


class Source(Protocol):
    """Where batches come from: samples, or a frozen body's features of them."""

    def pick(self, rows: Integers, samples: Integers, keys: Hashes | None = None) -> Picks: ...
    def take(self, picks: Picks) -> tuple[Tree, Tree]: ...


class Batch(NamedTuple):
    """One step's samples [k, width] of the first k clients; `counts` of them count.

    `among` are the counts of everybody in the company who takes this step: the width is the
    largest of them.
    """

    samples: Integers
    counts: Integers
    keys: Hashes | None
    """Of every sample, for augmentation."""
    among: Integers
    draws: Tensor | None = None
    """Of every client, for what its model draws."""
    noise: Noise | None = None
    """What private gradients are blurred with, if they are."""

    def halves(self) -> tuple[Batch, Batch]:
        """The first half of every client's samples, and the rest; a single sample is both."""
        (begin, first), (_, among) = _halved(self.counts), _halved(self.among)
        rest, others = self.counts - begin, self.among - _halved(self.among)[0]
        return self._cut(np.zeros_like(first), first, among), self._cut(begin, rest, others)

    def _cut(self, begin: Integers, counts: Integers, among: Integers) -> Batch:
        width = int(among.max())
        places = np.minimum(begin[:, None] + np.arange(width), self.samples.shape[1] - 1)
        keys = None if self.keys is None else np.take_along_axis(self.keys, places, axis=1)
        samples = np.take_along_axis(self.samples, places, axis=1)
        return Batch(samples, counts, keys, among, self.draws)


def _halved(counts: Integers) -> tuple[Integers, Integers]:
    """Where the second half begins, and how many samples the first has."""
    first = -(-counts // 2)
    return np.where(counts > 1, first, 0), first


class Stepper:
    """One phase at work on stacked clients. `point` is where it is; it moves in place."""

    def __init__(
        self,
        phase: Train,
        executor: Executor,
        programs: Callable[[int], Program],
        source: Source,
        start: Point,
        state: State,
        rates: Rates,
        training: Training,
        kept: Buffers | None = None,
        loaded: bool = False,
        private: DPSGD | None = None,
        slot: int = 0,
        by_sample: bool = False,
    ) -> None:
        """`programs(i)` gives modules of this worker's own; several models want several.

        `loaded` says that points will be loaded: all of the point is then its own memory.
        """
        self._phase, self._executor, self._source = phase, executor, source
        self._programs, self._state = programs, state
        self._values, self.point = workspace(start, phase.part, loaded)
        self._descent = Descent.start(self._values, rates, training, kept)
        features = phase.loss is not None and phase.loss.features
        self._gradient = executor.bind(
            programs(0), self.point, phase.part, self._losses(), features
        )
        self._x: Tree = None
        self._draws: Tensor | None = None
        self._private, self._slot, self._together = private, slot, 1
        self._samples: SampleGradients | None = None
        if private is not None and by_sample:
            self._together = samples_at_once(executor.chunk, self._values)
        if self._together > 1:
            given = (programs(0), self.point, phase.part, self._losses(), features)
            self._samples = bind_samples(*given)
        self._noise: Noise | None = None

    @property
    def buffers(self) -> Buffers:
        return self._descent.buffers

    def load(self, start: Point, state: State) -> None:
        """Continue from the point and state of the first clients; the optimizer remembers."""
        self._state = state
        for here, there in zip(self._here(len(start.shared)), start, strict=True):
            here.copy_(there)

    def feeds(self, rows: Integers, batches: Iterable[Batch]) -> Iterator[Feed]:
        """What the steps of a phase are taken on, for the first of these rows; moved together."""
        lookahead = self._phase.lookahead
        halves = lookahead is not None and lookahead.halves
        parts = (part for batch in batches for part in (batch.halves() if halves else (batch,)))
        picks = iter(moved((self._picked(rows, part) for part in parts), self._values.device))
        return zip(picks, picks, strict=True) if halves else ((one,) for one in picks)

    def _picked(self, rows: Integers, batch: Batch) -> Picks:
        picks = self._source.pick(rows[: len(batch.counts)], batch.samples, batch.keys)
        inside = padding(batch.counts, batch.among)
        return picks._replace(inside=inside, draws=batch.draws, noise=batch.noise)

    def step(self, feed: Feed) -> None:
        """As many steps on this batch as the phase repeats it."""
        taken, draws = [self._gathered(picks) for picks in feed], feed[0].draws
        for repeat in range(self._phase.repeats):
            # Both gradients of a lookahead are of one function: the same numbers are drawn.
            self._draws = None if draws is None else draws + repeat
            noise = feed[0].noise
            self._noise = None if noise is None else noise.again(MOST_REPEATS * self._slot + repeat)
            self._descent.step(self._slope(len(feed[0].places), taken[0], taken[-1]))

    def _gathered(self, picks: Picks) -> tuple[Tree, Tree, Tensor | None]:
        return *self._source.take(picks), picks.weights(self._values.dtype)

    def _slope(self, k: int, first: Any, second: Any) -> Tensor:
        """The gradient that is stepped along, taken where the phase says."""
        phase = self._phase
        before = None
        if phase.at is not None:
            before = self._move(k, lift_point(phase.at)(self._here(k), self._first(k)))
        if phase.lookahead is not None:
            uphill = self._halves(self._taken(k, *first))
            there = lift_point(phase.lookahead.to)(uphill, self._here(k), self._first(k))
            kept = self._move(k, there)
            before = kept if before is None else before
        slope = self._taken(k, *second)
        if before is not None:
            self._move(k, before)
        if phase.gradient is None:
            return slope
        changed = lift_point(phase.gradient)(self._halves(slope), self._here(k), self._first(k))
        return torch.cat(changed, dim=1)

    def _taken(self, k: int, x: Tree, y: Tree, weights: Tensor | None) -> Tensor:
        self._x = x
        if self._private is None or self._noise is None:
            return self._gradient(k, x, y, weights, self._draws)

        def of(some_x: Tree, some_y: Tree) -> Tensor:
            if self._samples is not None:
                return self._samples(k, some_x, some_y)
            return self._gradient(k, some_x, some_y, None, None).unsqueeze(1)

        return private_gradient(self._private, of, self._together, x, y, weights, self._noise)

    def _here(self, k: int) -> Point:
        return Point(*(part[:k] for part in self.point))

    def _first(self, k: int) -> Any:
        return first_rows(self._state, k)

    def _move(self, k: int, there: Point) -> Point:
        """Go there with the part that is trained; where it was, to go back."""
        before = Point(*(part.clone() for part in self._here(k)))
        if self._phase.part != "personal":
            self.point.shared[:k].copy_(there.shared)
        if self._phase.part != "shared":
            self.point.personal[:k].copy_(there.personal)
        return before

    def _halves(self, slope: Tensor) -> Point:
        empty = slope[:, :0]
        if self._phase.part == "whole":
            cut = self.point.shared.shape[1]
            return Point(slope[:, :cut], slope[:, cut:])
        return Point(slope, empty) if self._phase.part == "shared" else Point(empty, slope)

    def _losses(self) -> Losses | None:
        """The phase's own loss for stacked clients."""
        loss = self._phase.loss
        if loss is None:
            return None

        def losses(seen: Seen, y: Tree, k: int) -> Tensor:
            state = self._first(k)
            taught = self._taught(loss, state)
            return _per_sample(loss, lift(loss.of)(seen, y, state, taught), y)

        return losses

    def _taught(self, loss: Loss, state: State) -> tuple[Seen, ...]:
        if loss.teachers is None:
            return ()
        assert self._x is not None
        points = lift(loss.teachers)(state)
        return tuple(
            self._executor.see(self._programs(1 + place), point, self._x, loss.features)
            for place, point in enumerate(points)
        )


def _per_sample(loss: Loss, found: object, y: Tree) -> Tensor:
    """What a method's own loss returned, if it is one number for each sample."""
    wanted = first_leaf(y).shape[:2]
    if isinstance(found, Tensor) and found.shape == wanted:
        return found
    shape = tuple(found.shape[1:]) if isinstance(found, Tensor) else type(found).__name__
    name = getattr(loss.of, "__qualname__", "a loss")
    raise QuiverError(
        f"{name} gave {shape} for {wanted[1]} samples; a loss of a method's own returns one number "
        'per sample, such as F.cross_entropy(…, reduction="none").'
    )


def workspace(start: Point, part: str, both: bool) -> tuple[Tensor, Point]:
    """A copy of the trained part to step in place, and the point that looks into it.

    Unless `both` are copied nothing may be written to the other part.
    """
    if both:
        start = Point(*(half.clone() for half in start))
    if part == "whole":
        values = torch.cat(start, dim=1)
        cut = start.shared.shape[1]
        return values, Point(values[:, :cut], values[:, cut:])
    if part == "shared":
        values = start.shared.clone()
        return values, Point(values, aligned(start.personal))
    values = start.personal.clone()
    return values, Point(aligned(start.shared), values)


def first_rows(state: State, k: int) -> Any:
    kind: Any = type(state)
    return kind(*(leaf[:k] for leaf in state))
