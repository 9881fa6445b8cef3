"""The optimizer's settings, the same for every method (docs/methods.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quiverfl.errors import QuiverError


@dataclass(frozen=True)
class Training:
    """SGD with heavy-ball momentum; the buffer starts at zero in every phase of every round.

    `personal_lr` applies to the personal part where a method trains it as such (None: the same as
    `lr`). The rate in round t is lr · lr_decay^t. `batch_size=None` means the whole local set in
    one batch, in its given order. `clip_norm` bounds the norm of the gradient of the trained part.
    """

    lr: float = 0.1
    personal_lr: float | None = None
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int | None = 128
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        positive = {"lr": self.lr, "lr_decay": self.lr_decay}
        if self.personal_lr is not None:
            positive["personal_lr"] = self.personal_lr
        if self.clip_norm is not None:
            positive["clip_norm"] = self.clip_norm
        for name, value in positive.items():
            if not (value > 0 and math.isfinite(value)):
                raise QuiverError(f"training.{name} = {value}: it must be a positive number.")
        if not 0 <= self.momentum < 1:
            raise QuiverError(f"training.momentum = {self.momentum}: it must be in [0, 1).")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise QuiverError(f"training.weight_decay = {self.weight_decay}: it must be ≥ 0.")
        if self.batch_size is not None and self.batch_size < 1:
            raise QuiverError(
                f"training.batch_size = {self.batch_size}: it must be at least 1, "
                "or None for the whole local set in one batch."
            )

    def rate(self, round: int) -> float:
        """Learning rate η of the round."""
        return self.lr * self.lr_decay**round

    def personal_rate(self, round: int) -> float:
        """Learning rate of the personal part in methods that train it as such."""
        base = self.lr if self.personal_lr is None else self.personal_lr
        return base * self.lr_decay**round
