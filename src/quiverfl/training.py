"""[training] of a configuration: the optimizer, the same for every method.

The reference of methods ("The step"), has the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, PlainSerializer

from quiverfl.errors import QuiverError, suggest
from quiverfl.options import convert_fields, refuse_old_names

Optimizer = Literal["sgd", "adam", "adamw"]


def _parse_batch_size(value: object) -> object:
    """Return what a configuration means: "all" is the whole local set, None in Python."""
    if value is None or value == "all":
        return None
    if isinstance(value, int) and value >= 1:
        return value
    raise ValueError(
        'it must be a whole number of at least 1, or "all" for the whole local set in one batch'
    )


BatchSize = Annotated[
    int | None,
    BeforeValidator(_parse_batch_size),
    PlainSerializer(lambda size: "all" if size is None else size, return_type=int | str),
]


@refuse_old_names(rate="lr_at", personal_rate="personal_lr_at", at_personal_rate="with_personal_lr")
@dataclass(frozen=True)
class Training:
    """Section [training], from a configuration or from Python.

    The optimizer's state is reset in every phase of every round, unless kept.

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
    batch_size: BatchSize = 128
    clip_norm: float | None = None
    optimizer: Optimizer = "sgd"
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        convert_fields(self)
        for name in ("lr", "lr_decay", "personal_lr", "clip_norm", "epsilon"):
            value = getattr(self, name)
            if value is None and name in ("personal_lr", "clip_norm"):
                continue
            if not (_is_number(value) and value > 0):
                raise QuiverError(f"training.{name} = {value!r}: it must be a positive number.")
        if not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            raise QuiverError(f"training.momentum = {self.momentum!r}: it must be in [0, 1).")
        if not (_is_number(self.weight_decay) and self.weight_decay >= 0):
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
            known = suggest(str(self.optimizer), get_args(Optimizer))
            raise QuiverError(f"training.optimizer = {self.optimizer!r}: {known}")
        if self.optimizer != "sgd" and (self.momentum or self.nesterov):
            raise QuiverError(
                f"training.optimizer = {self.optimizer!r} has no momentum of SGD's kind: leave "
                "training.momentum and training.nesterov out; betas take their place."
            )
        if self.nesterov and not self.momentum:
            raise QuiverError("training.nesterov needs a training.momentum above 0.")
        betas = tuple(self.betas)
        if len(betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
            raise QuiverError(f"training.betas = {self.betas!r}: give two numbers in [0, 1).")
        object.__setattr__(self, "betas", betas)
        for name in ("betas", "epsilon"):
            if self.optimizer == "sgd" and getattr(self, name) != getattr(Training, name):
                raise QuiverError(
                    f"training.{name} is Adam's, and training.optimizer = 'sgd' has no use for it: "
                    'leave it out, or set optimizer = "adam".'
                )

    def with_personal_lr(self) -> Training:
        """The same with personal_lr in place of lr."""
        return replace(self, lr=self.lr if self.personal_lr is None else self.personal_lr)

    def lr_at(self, round: int) -> float:
        """Learning rate η of the round."""
        return self.lr * self.lr_decay**round

    def momentum_sum(self, steps: int) -> float:
        """Return how far steps with rate 1 go along a constant gradient: `steps` without momentum.

        Step k goes 1 + β + … + β^(k-1), with Nesterov's one term more.
        """
        beta = self.momentum
        if not beta:
            return float(steps)
        ahead = beta if self.nesterov else 1.0
        return (steps - ahead * beta * (1 - beta**steps) / (1 - beta)) / (1 - beta)

    def personal_lr_at(self, round: int) -> float:
        """Learning rate of the personal part in methods that train it as such."""
        base = self.lr if self.personal_lr is None else self.personal_lr
        return base * self.lr_decay**round


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
