"""The gradient of a batch in a Train phase: the task's loss or the method's own, and DP-SGD."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quiverfl.engine.local.context import PhaseContext
from quiverfl.engine.local.examples import Batch
from quiverfl.engine.local.programs import (
    Executor,
    Gradient,
    Losses,
    Program,
    align_rows,
    disable_fused_kernels,
    make_losses,
)
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.methods.contract import Loss, Part, Train
from quiverfl.task import ModelOutputs, Params
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.privacy import DPSGD
from quiverfl.trees import Tree, first_leaf, tree_map

StatesOf = Callable[[int], Any]
"""k → the states of the first k clients."""


def bind_phase_gradient(
    phase: Train,
    context: PhaseContext,
    programs: Callable[[int], Program],
    params: Params,
    trained: Tensor,
    states: StatesOf,
) -> Gradient:
    """The gradient at these stacked parameters, which may change in place.

    `trained` is the part of them that is stepped.
    """
    executor, private = context.executor, context.private
    features = phase.loss is not None and phase.loss.needs_features
    taught = None if phase.loss is None else _PhaseLoss(phase.loss, executor, programs, states)
    losses = None if taught is None else taught.losses
    plain = gradient = executor.bind(programs(0), params, phase.part, losses, features)
    if taught is not None:
        gradient = taught.remember_inputs(plain)
    if private is None:
        return gradient
    together = samples_at_once(executor.chunk, trained) if context.by_sample else 1
    if together > 1:
        of_samples = bind_samples(programs(0), params, phase.part, losses, features)
    else:

        def of_samples(k: int, x: Tree, y: Tree) -> Tensor:
            return plain(Batch(k, x, y)).unsqueeze(1)

    def private_or_plain(batch: Batch) -> Tensor:
        # A model is tuned before it is evaluated without noise: that gradient is never sent.
        if batch.noise is None:
            return gradient(batch)
        return private_gradient(private, of_samples, together, batch, batch.noise)

    return private_or_plain


class _PhaseLoss:
    """A phase's own loss for stacked clients, and the teachers that look at the same batch."""

    def __init__(
        self,
        loss: Loss,
        executor: Executor,
        programs: Callable[[int], Program],
        states: StatesOf,
    ) -> None:
        self._batch: Batch | None = None
        self._loss, self._executor, self._programs, self._states = loss, executor, programs, states

    def remember_inputs(self, gradient: Gradient) -> Gradient:
        """The same gradient; it also keeps its batch for the teachers and the loss."""

        def remember(batch: Batch) -> Tensor:
            self._batch = batch
            return gradient(batch)

        return remember

    def losses(self, seen: ModelOutputs, y: Tree, k: int) -> Tensor:
        """One number per sample, [k, n]."""
        state = self._states(k)
        given: tuple[Any, ...] = (seen, y, state, self._teach(state))
        if self._loss.needs_weights:
            weights = None if self._batch is None else self._batch.weights
            if weights is None:
                weights = state[0].new_ones(first_leaf(y).shape[:2])
            given = (*given, weights)
        numbers: Tensor = vmap_clients(self._loss.function)(*given)
        return numbers

    def _teach(self, state: Any) -> tuple[ModelOutputs, ...]:
        """The outputs of the teachers."""
        if self._loss.teachers is None:
            return ()
        features, models = self._loss.needs_features, vmap_clients(self._loss.teachers)(state)
        inputs = None if self._batch is None else self._batch.inputs
        return tuple(
            self._executor.forward(self._programs(1 + number), params, inputs, features)
            for number, params in enumerate(models)
        )


def make_workspace(start: Params, part: str, both: bool) -> tuple[Tensor, Params]:
    """A copy of the trained part to step in place, and the parameters as views of it.

    Unless `both` parts are copied nothing may be written to the other one.
    """
    if both:
        start = Params(*(half.clone() for half in start))
    if part == "whole":
        values = torch.cat(start, dim=1)
        cut = start.shared.shape[1]
        return values, Params(values[:, :cut], values[:, cut:])
    if part == "shared":
        values = start.shared.clone()
        return values, Params(values, align_rows(start.personal))
    values = start.personal.clone()
    return values, Params(align_rows(start.shared), values)


SampleGradients = Callable[[int, Tree, Tree], Tensor]
"""(k, inputs [k, n, …], targets [k, n, …]) → the gradient of every sample, [k, n, parameters]."""

BYTES = 4 << 20
"""Bytes of gradients that are in memory at a time: more would not stay in a cache."""


def samples_at_once(clients: int, values: Tensor) -> int:
    """Samples of each client whose gradients are computed at once, for groups of this size."""
    return int(max(1, BYTES // max(1, clients * values.shape[1] * values.element_size())))


def bind_samples(
    program: Program, point: Params, part: Part, losses: Losses | None, features: bool
) -> SampleGradients:
    """At these stacked parameters, which may change in place; of the model in training.

    The parameters of a client are seen once for every sample, without a copy, and differentiated
    as if they were as many.
    """
    named, trained = program.named_params(point), program.param_names(part)
    losses = losses or make_losses(program.loss)
    program.module.train()

    def call(own: dict[str, Tensor], rest: dict[str, Tensor], x: Tree) -> ModelOutputs:
        one = tree_map(lambda leaf: leaf.unsqueeze(0), x)
        if features:
            seen = program.call({**own, **rest}, one, features)
            return ModelOutputs(*(tree_map(lambda leaf: leaf[0], half) for half in seen))
        outputs = tree_map(lambda leaf: leaf[0], program.outputs({**own, **rest}, one))
        return ModelOutputs(outputs, first_leaf(outputs).new_empty(0))

    each = torch.vmap(torch.vmap(call, in_dims=(0, None, 0)), in_dims=(0, 0, 0))

    def gradients(k: int, x: Tree, y: Tree) -> Tensor:
        samples = first_leaf(y).shape[1]
        own = {}
        for name in trained:
            leaf = named[name][:k].detach().unsqueeze(1)
            own[name] = leaf.expand(-1, samples, *leaf.shape[2:]).requires_grad_()
        rest = {name: leaf[:k] for name, leaf in named.items() if name not in own}
        with disable_fused_kernels():
            seen = each(own, rest, x)
        gradients = torch.autograd.grad(
            losses(seen, y, k).sum(), list(own.values()), allow_unused=True, materialize_grads=True
        )
        return torch.cat([gradient.reshape(k, samples, -1) for gradient in gradients], dim=2)

    return gradients


def private_gradient(
    private: DPSGD, of_samples: SampleGradients, together: int, batch: Batch, noise: Noise
) -> Tensor:
    """DP-SGD: (Σ min(1, C/‖g_s‖) · g_s + σ C N(0, 1)) / batch, for stacked clients.

    `together` samples of every client are computed at once. Padding has weight 0.
    """
    width, weights = first_leaf(batch.targets).shape[1], batch.weights
    total: Tensor | None = None
    for begin in range(0, width, together):
        samples = slice(begin, begin + together)
        some_x, some_y = (
            tree_map(lambda t, s=samples: t[:, s], part) for part in (batch.inputs, batch.targets)
        )
        gradients = of_samples(batch.clients, some_x, some_y)
        norms = torch.linalg.vector_norm(gradients, dim=2)
        factors = torch.clamp(private.clip / norms.clamp_min(1e-300), max=1.0)
        if weights is not None:
            factors = factors * weights[:, samples]
        # One after the other, so that sums do not depend on how many there are.
        for one, factor in zip(gradients.unbind(1), factors.unsqueeze(2).unbind(1), strict=True):
            total = one * factor if total is None else total.addcmul_(one, factor)
    assert total is not None
    counts = width if weights is None else weights.sum(dim=1, keepdim=True)
    return (total + private.noise * private.clip * noise.draw_like("gradient", total)) / counts
