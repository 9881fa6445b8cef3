"""The optimizer's settings, the same for every method (docs/methods.md, "The step")."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from quiverfl.errors import QuiverError, nearest

Optimizer = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class Training:
    """The optimizer; its state is reset in every phase of every round, unless kept.

    `personal_lr` applies to the personal part where a method trains it as such (None: the same as
    `lr`). The rate in round t is lr · lr_decay^t. `batch_size=None` means the whole local set in
    one batch, in its given order. `clip_norm` bounds the norm of the gradient of the trained part.
    `momentum` and `nesterov` are for SGD, `betas` and `epsilon` for Adam and AdamW.
    """

    lr: float = 0.1
    personal_lr: float | None = None
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int | None = 128
    clip_norm: float | None = None
    optimizer: Optimizer = "sgd"
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "personal_lr", "clip_norm", "epsilon"):
            value = getattr(self, name)
            if value is None and name in ("personal_lr", "clip_norm"):
                continue
            if not (_number(value) and value > 0):
                raise QuiverError(f"training.{name} = {value!r}: it must be a positive number.")
        if not (_number(self.momentum) and 0 <= self.momentum < 1):
            raise QuiverError(f"training.momentum = {self.momentum!r}: it must be in [0, 1).")
        if not (_number(self.weight_decay) and self.weight_decay >= 0):
            raise QuiverError(f"training.weight_decay = {self.weight_decay!r}: it must be ≥ 0.")
        self._check_batch_size()
        self._check_optimizer()

    def _check_batch_size(self) -> None:
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise QuiverError(
                f"training.batch_size = {size!r}: it must be a whole number, at least 1, or the "
                'whole local set in one batch ("all" in a configuration, None in Python).'
            )

    def _check_optimizer(self) -> None:
        if self.optimizer not in get_args(Optimizer):
            known = nearest(str(self.optimizer), get_args(Optimizer))
            raise QuiverError(f"training.optimizer = {self.optimizer!r}: {known}")
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise QuiverError(
                f"training.optimizer = {self.optimizer!r} has no momentum of SGD's kind: leave "
                "training.momentum and training.nesterov out; betas take their place."
            )
        if self.nesterov and not self.momentum:
            raise QuiverError("training.nesterov needs a training.momentum above 0.")
        betas = tuple(self.betas)
        if len(betas) != 2 or not all(_number(beta) and 0 <= beta < 1 for beta in betas):
            raise QuiverError(f"training.betas = {self.betas!r}: give two numbers in [0, 1).")
        object.__setattr__(self, "betas", betas)

    def at_personal_rate(self) -> Training:
        """The same with personal_lr in place of lr."""
        return replace(self, lr=self.lr if self.personal_lr is None else self.personal_lr)

    def rate(self, round: int) -> float:
        """Learning rate η of the round."""
        return self.lr * self.lr_decay**round

    def momentum_sum(self, steps: int) -> float:
        """How far steps with rate 1 go along a constant gradient: `steps` without momentum.

        Step k goes 1 + β + … + β^(k-1), with Nesterov's one term more.
        """
        beta = self.momentum
        if not beta:
            return float(steps)
        ahead = beta if self.nesterov else 1.0
        return (steps - ahead * beta * (1 - beta**steps) / (1 - beta)) / (1 - beta)

    def personal_rate(self, round: int) -> float:
        """Learning rate of the personal part in methods that train it as such."""
        base = self.lr if self.personal_lr is None else self.personal_lr
        return base * self.lr_decay**round


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
