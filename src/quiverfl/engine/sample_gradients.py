"""Every sample's own gradient, of stacked clients: by vmap over clients and samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quiverfl.engine.programs import Losses, Program, task_losses, unfused
from quiverfl.methods.contract import Part
from quiverfl.task import Point, Seen
from quiverfl.trees import Tree, first_leaf, mapped

SampleGradients = Callable[[int, Tree, Tree], Tensor]
"""(k, inputs [k, n, …], targets [k, n, …]) → the gradient of every sample, [k, n, parameters]."""

BYTES = 4 << 20
"""Of gradients that are in memory at a time: more of them would not stay in a cache."""


def samples_at_once(clients: int, values: Tensor) -> int:
    """Of each of so many clients with such rows of parameters; who is there does not matter."""
    return int(max(1, BYTES // max(1, clients * values.shape[1] * values.element_size())))


def bind_samples(
    program: Program, point: Point, part: Part, losses: Losses | None, features: bool
) -> SampleGradients:
    """At these stacked parameters, which may change in place; of the model in training.

    The parameters of a client are seen once for every sample, without a copy, and differentiated
    as if they were as many.
    """
    named, trained = program.named(point), program.trained(part)
    losses = losses or task_losses(program.loss)
    program.module.train()

    def call(own: dict[str, Tensor], rest: dict[str, Tensor], x: Tree) -> Seen:
        one = mapped(lambda leaf: leaf.unsqueeze(0), x)
        if features:
            seen = program.call({**own, **rest}, one, features)
            return Seen(*(mapped(lambda leaf: leaf[0], half) for half in seen))
        outputs = mapped(lambda leaf: leaf[0], program.outputs({**own, **rest}, one))
        return Seen(outputs, first_leaf(outputs).new_empty(0))

    each = torch.vmap(torch.vmap(call, in_dims=(0, None, 0)), in_dims=(0, 0, 0))

    def gradients(k: int, x: Tree, y: Tree) -> Tensor:
        samples = first_leaf(y).shape[1]
        own = {}
        for name in trained:
            leaf = named[name][:k].detach().unsqueeze(1)
            own[name] = leaf.expand(-1, samples, *leaf.shape[2:]).requires_grad_()
        rest = {name: leaf[:k] for name, leaf in named.items() if name not in own}
        with unfused():
            seen = each(own, rest, x)
        found = torch.autograd.grad(
            losses(seen, y, k).sum(), list(own.values()), allow_unused=True, materialize_grads=True
        )
        return torch.cat([gradient.reshape(k, samples, -1) for gradient in found], dim=2)

    return gradients
