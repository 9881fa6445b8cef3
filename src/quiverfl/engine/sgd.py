"""The step, exactly (docs/methods.md): clip, decay, momentum, step; clients stacked, in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quiverfl.training import Training


@dataclass(frozen=True, eq=False)
class Descent:
    """Stacked parameters [clients, size] on their way down, with a buffer that starts at zero.

    `rates` gives slices of the parameters their own rate per client [clients, 1].
    """

    values: Tensor
    rates: tuple[tuple[slice, Tensor], ...]
    training: Training
    buffer: Tensor

    @classmethod
    def start(
        cls, values: Tensor, rates: tuple[tuple[slice, Tensor], ...], training: Training
    ) -> Descent:
        return cls(values, rates, training, torch.zeros_like(values))

    def step(self, gradient: Tensor) -> None:
        """Move the first k clients along their gradients [k, size], which are used up."""
        k = len(gradient)
        values, buffer = self.values[:k], self.buffer[:k]
        if self.training.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_((self.training.clip_norm / norm).clamp(max=1))
        if self.training.weight_decay:
            gradient.add_(values, alpha=self.training.weight_decay)
        direction = gradient
        if self.training.momentum:
            direction = buffer.mul_(self.training.momentum).add_(gradient)
        for part, rate in self.rates:
            values[:, part].addcmul_(direction[:, part], rate[:k], value=-1)
