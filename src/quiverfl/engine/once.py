"""Once steps for stacked clients: what they ask for is computed, then all step together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.batches import batch_order
from quiverfl.engine.context import ClientGroup, PhaseContext, Place
from quiverfl.engine.lifting import changes_nothing, failed, lift, lift_point, same_kind
from quiverfl.engine.picks import weights_of
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message, Moment, Once
from quiverfl.seeds import stream
from quiverfl.task import Point

Integers = npt.NDArray[np.int64]

SLAB = 512
"""Samples per client that pass through the model at once, where all of them do."""


@dataclass(eq=False)
class OnceSteps:
    """Carries out Once phases; knows data and optimizer settings, knows no method."""

    context: PhaseContext
    rate_was_read: bool = field(default=False, init=False)
    """By a step: a rate that nobody reads would change nothing."""

    def run(
        self,
        phase: Once,
        personal: Callable[[Any], Point],
        state: Any,
        group: ClientGroup,
        place: Place,
    ) -> tuple[Any, Integers]:
        """The state after one step of every client, and how many gradients it took."""
        asked: dict[str, Any] = {}
        if phase.gradient or phase.statistics is not None:
            point = lift_point(phase.at or personal)(state)
        if phase.gradient:
            asked["gradient"] = self._first_gradient(point, group, place)
        if phase.statistics is not None:
            asked["statistics"] = self._statistics(phase, point, state, group)
        if phase.noise:
            asked["noise"] = self._noise(group, place)
        steps = np.full(len(group.rows), int(phase.gradient), dtype=np.int64)
        return self.step(phase, state, place, asked), steps

    def step(self, phase: Once, state: Any, place: Place, asked: dict[str, Any]) -> Any:
        """The step itself, all clients together."""
        context = self.context

        def step(state: Any, asked: dict[str, Any]) -> Any:
            moment = _WatchedMoment(
                place.round, context.rounds, context.training, place.share, **asked, owner=self
            )
            return phase.step(state, moment)

        if phase.one_by_one:
            changes_nothing(phase.step, partial(_one_by_one, step), (state, asked))
            return same_kind(phase.step, _one_by_one(step, state, asked), state)
        try:
            changes_nothing(phase.step, torch.vmap(step), (state, asked))
            return same_kind(phase.step, torch.vmap(step)(state, asked), state)
        except QuiverError:
            raise
        except Exception as error:
            words = "Use torch.where in place of if, or Once(…, one_by_one=True)."
            raise QuiverError(f"{failed(phase.step, error)} {words}") from error

    def _first_gradient(self, point: Point, group: ClientGroup, place: Place) -> Point:
        """Of the plain loss on the first batch of this phase."""
        context = self.context
        sizes, batch = context.examples.sizes[group.rows], context.training.batch_size
        everyone = sizes if group.company is None else group.company.train
        counts, among = (s if batch is None else np.minimum(batch, s) for s in (sizes, everyone))
        samples = np.zeros((len(sizes), int(among.max())), dtype=np.int64)
        for row, (client, size) in enumerate(zip(group.ids, sizes, strict=True)):
            order = np.arange(size)
            if batch is not None:
                key = (context.seed, int(client), place.round, place.number)
                order = batch_order(*key, epoch=0, size=int(size))
            samples[row, : counts[row]] = order[: counts[row]]
        x, y = context.examples.gather(group.rows, samples)
        weights = weights_of(counts, among, point.shared)
        gradient = context.executor.bind(context.program(), point, "whole")
        keys = context.draw_keys(group.ids, place, 0)
        keys = None if keys is None else keys.to(context.device)
        slope = gradient(len(sizes), x, y, weights, keys)
        cut = point.shared.shape[1]
        return Point(slope[:, :cut], slope[:, cut:])

    def _statistics(self, phase: Once, point: Point, state: Any, group: ClientGroup) -> Message:
        """Sums over all training samples, as they are."""
        assert phase.statistics is not None
        context = self.context
        program, features = context.program(), context.task.head is not None
        sizes = context.examples.sizes[group.rows]
        most = int((sizes if group.company is None else group.company.train).max())
        total: Message = {}
        for begin in range(0, most, SLAB):
            places = np.arange(begin, min(begin + SLAB, most))
            inside = torch.from_numpy(places < sizes[:, None]).to(point.shared)
            x, y = context.examples.gather(group.rows, np.minimum(places, sizes[:, None] - 1))
            seen = context.executor.see(program, point, x, features)
            found: Message = lift(phase.statistics)(seen, y, inside, state)
            for name, leaf in found.items():
                total[name] = leaf if name not in total else total[name] + leaf
        return total

    def _noise(self, group: ClientGroup, place: Place) -> Tensor:
        """Uniform numbers, one per parameter; every phase draws its own.

        Phase 1 keeps the key it had when phases had none, so that Dis-PFL's runs stay the same.
        """
        context = self.context
        size = context.task.shared_layout.size + context.task.personal_layout.size
        key = (place.round,) if place.number == 1 else (place.round, place.number)
        drawn = [stream(context.seed, "noise", int(c), *key).random(size) for c in group.ids]
        return torch.from_numpy(np.stack(drawn)).to(context.device)


@dataclass(frozen=True)
class _WatchedMoment(Moment):
    """Notes that the rate is read."""

    owner: OnceSteps | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in ("rate", "training"):
            object.__getattribute__(self, "owner").rate_was_read = True
        return object.__getattribute__(self, name)


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
