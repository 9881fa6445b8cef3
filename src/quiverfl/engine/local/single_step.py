"""SingleStep phases for stacked clients: compute their inputs, then step all together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.batches import batch_order
from quiverfl.engine.local.context import ClientGroup, PhaseContext, PhaseIndex
from quiverfl.engine.local.examples import Batch, padding_weights
from quiverfl.engine.local.vmap import method_error, vmap_clients
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message, SingleStep, StepInfo
from quiverfl.seeds import stream
from quiverfl.support.environment import NO_FLOAT64
from quiverfl.task import Params
from quiverfl.trees import tree_map
from quiverfl.types import Integers

SLAB = 512
"""Samples per client that pass through the model at once, where all of them do."""


@dataclass(eq=False)
class SingleSteps:
    """Carries out SingleStep phases; knows data and optimizer settings, knows no method."""

    context: PhaseContext

    def run(
        self,
        phase: SingleStep,
        personal: Callable[[Any], Params],
        state: Any,
        group: ClientGroup,
        index: PhaseIndex,
    ) -> tuple[Any, Integers]:
        """The state after one step of every client, and how many gradients it took."""
        asked: dict[str, Any] = {}
        if phase.needs_gradient or phase.statistics is not None:
            point = vmap_clients(phase.params or personal)(state)
        if phase.needs_gradient:
            asked["gradient"] = self._first_gradient(point, group, index)
        if phase.statistics is not None:
            asked["statistics"] = self._statistics(phase, point, state, group)
        if phase.needs_noise:
            asked["noise"] = self._noise(group, index)
        steps = np.full(len(group.rows), int(phase.needs_gradient), dtype=np.int64)
        return self.step(phase, state, index, asked), steps

    def step(self, phase: SingleStep, state: Any, index: PhaseIndex, asked: dict[str, Any]) -> Any:
        """The step itself, all clients together."""
        context, device = self.context, self.context.device
        assert isinstance(index.round, int)  # a clock refuses such phases in runs without waiting
        info = partial(
            StepInfo, index.round, context.rounds, context.training, index.active_fraction
        )
        if device.type not in NO_FLOAT64:
            return take_single_step(phase, state, asked, info)
        # A step may count in float64: it is taken on the host.
        state, asked = tree_map(lambda leaf: leaf.cpu(), (state, asked))
        after = take_single_step(phase, state, asked, info)
        return type(after)(*(_narrow(leaf).to(device) for leaf in after))

    def _first_gradient(self, point: Params, group: ClientGroup, index: PhaseIndex) -> Params:
        """Gradient of the plain loss on the first batch of this phase."""
        context = self.context
        sizes, batch = context.examples.sizes[group.rows], context.training.batch_size
        everyone = sizes if group.full_group is None else group.full_group.train
        counts, among = (s if batch is None else np.minimum(batch, s) for s in (sizes, everyone))
        samples = np.zeros((len(sizes), int(among.max())), dtype=np.int64)
        assert isinstance(index.round, int)
        for row, (client, size) in enumerate(zip(group.ids, sizes, strict=True)):
            order = np.arange(size)
            if batch is not None:
                key = (context.seed, int(client), index.round, index.number)
                order = batch_order(*key, epoch=0, size=int(size))
            samples[row, : counts[row]] = order[: counts[row]]
        x, y = context.examples.gather(group.rows, samples)
        weights = padding_weights(counts, among, point.shared)
        gradient = context.executor.bind(context.program(), point, "whole")
        keys = context.draw_keys(group.ids, index, 0)
        keys = None if keys is None else keys.to(context.device)
        slope = gradient(Batch(len(sizes), x, y, weights, keys))
        cut = point.shared.shape[1]
        return Params(slope[:, :cut], slope[:, cut:])

    def _statistics(
        self, phase: SingleStep, point: Params, state: Any, group: ClientGroup
    ) -> Message:
        """Sums over all training samples, as they are."""
        assert phase.statistics is not None
        context = self.context
        program, features = context.program(), context.task.head is not None
        sizes = context.examples.sizes[group.rows]
        most = int((sizes if group.full_group is None else group.full_group.train).max())
        total: Message = {}
        for begin in range(0, most, SLAB):
            places = np.arange(begin, min(begin + SLAB, most))
            inside = torch.from_numpy(places < sizes[:, None]).to(point.shared)
            x, y = context.examples.gather(group.rows, np.minimum(places, sizes[:, None] - 1))
            seen = context.executor.forward(program, point, x, features)
            statistics: Message = vmap_clients(phase.statistics)(seen, y, inside, state)
            for name, leaf in statistics.items():
                total[name] = leaf if name not in total else total[name] + leaf
        return total

    def _noise(self, group: ClientGroup, index: PhaseIndex) -> Tensor:
        """Uniform numbers, one per parameter; every phase draws its own.

        Phase 1 keeps the key it had when phases had none, so that Dis-PFL's runs stay the same.
        """
        context = self.context
        size = context.task.shared_layout.size + context.task.personal_layout.size
        key = (index.round,) if index.number == 1 else (index.round, index.number)
        drawn = [stream(context.seed, "noise", int(c), *key).random(size) for c in group.ids]
        noise = torch.from_numpy(np.stack(drawn))
        return (noise if context.device.type not in NO_FLOAT64 else _narrow(noise)).to(
            context.device
        )


def _narrow(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.dtype == torch.float64 else leaf


def take_single_step(
    phase: SingleStep, state: Any, asked: dict[str, Any], info: Callable[..., StepInfo]
) -> Any:
    """The states after one step; `info` makes a StepInfo of what one client asked for."""

    def step(state: Any, asked: dict[str, Any]) -> Any:
        return phase.step(state, info(**asked))

    if phase.sequential:
        return _one_by_one(step, state, asked)
    try:
        return torch.vmap(step)(state, asked)
    except QuiverError:
        raise
    except Exception as error:
        remedy = "Use torch.where in place of if, or SingleStep(…, sequential=True)."
        raise QuiverError(f"{method_error(phase.step, error)} {remedy}") from error


def _one_by_one(step: Callable[[Any, Any], Any], state: Any, asked: dict[str, Any]) -> Any:
    states = []
    for place in range(len(next(iter(state)))):
        one = type(state)(*(leaf[place] for leaf in state))
        states.append(step(one, {name: _at(value, place) for name, value in asked.items()}))
    return type(state)(*(torch.stack(leaves) for leaves in zip(*states, strict=True)))


def _at(value: Any, place: int) -> Any:
    if isinstance(value, Tensor):
        return value[place]
    if isinstance(value, dict):
        return {name: leaf[place] for name, leaf in value.items()}
    return type(value)(*(leaf[place] for leaf in value))
