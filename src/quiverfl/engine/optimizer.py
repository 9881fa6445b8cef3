"""The step, exactly (docs/methods.md): clip, decay, direction, step; stacked clients, in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quiverfl.training import Training

Buffers = dict[str, Tensor]
"""What an optimizer remembers, each [clients, size] or [clients, 1]."""
Rates = tuple[tuple[slice, Tensor], ...]
"""Slices of the parameters and their own rate per client [clients, 1]."""


@dataclass(frozen=True, eq=False)
class Descent:
    """Stacked parameters [clients, size] on their way down."""

    values: Tensor
    rates: Rates
    training: Training
    buffers: Buffers

    @classmethod
    def start(
        cls, values: Tensor, rates: Rates, training: Training, kept: Buffers | None = None
    ) -> Descent:
        buffers = fresh_buffers(training, values) if kept is None else kept
        return cls(values, rates, training, buffers)

    def step(self, gradient: Tensor) -> None:
        """Move the first k clients along their gradients [k, size], which are used up."""
        k = len(gradient)
        here = self if k == len(self.values) else self._first(k)
        here._move(gradient)

    def _first(self, k: int) -> Descent:
        rates = tuple((part, rate[:k]) for part, rate in self.rates)
        buffers = {name: buffer[:k] for name, buffer in self.buffers.items()}
        return Descent(self.values[:k], rates, self.training, buffers)

    def _move(self, gradient: Tensor) -> None:
        training, decay = self.training, self.training.weight_decay
        if training.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_(norm.reciprocal().mul_(training.clip_norm).clamp_(max=1))
        if decay and training.optimizer == "adamw":
            for part, rate in self.rates:
                self.values[:, part].mul_(1 - rate * decay)
        elif decay:
            gradient.add_(self.values, alpha=decay)
        direction = DIRECTIONS[training.optimizer](gradient, self.buffers, training)
        for part, rate in self.rates:
            whole = part == slice(None)  # a view costs as much as a small step
            here, there = (t if whole else t[:, part] for t in (self.values, direction))
            here.addcmul_(there, rate, value=-1)


def fresh_buffers(training: Training, values: Tensor) -> Buffers:
    if training.optimizer == "sgd":
        return {"momentum": torch.zeros_like(values)} if training.momentum else {}
    count = values.new_zeros(len(values), 1)
    return {
        "first": torch.zeros_like(values),
        "second": torch.zeros_like(values),
        "count": count,
    }


def _sgd(gradient: Tensor, buffers: Buffers, training: Training) -> Tensor:
    if not training.momentum:
        return gradient
    buffer = buffers["momentum"].mul_(training.momentum).add_(gradient)
    return gradient.add_(buffer, alpha=training.momentum) if training.nesterov else buffer


def _adam(gradient: Tensor, buffers: Buffers, training: Training) -> Tensor:
    """Kingma and Ba, ICLR 2015, Algorithm 1; ε is added to the corrected root, as they do."""
    beta1, beta2 = training.betas
    count = buffers["count"].add_(1)
    first = buffers["first"].mul_(beta1).add_(gradient, alpha=1 - beta1)
    second = buffers["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second / (1 - beta2**count)).sqrt_().add_(training.epsilon)
    return (first / (1 - beta1**count)).div_(root)


DIRECTIONS: dict[str, Callable[[Tensor, Buffers, Training], Tensor]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adam,
}
