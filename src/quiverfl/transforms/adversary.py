"""Clients that do not play by the rules: what they send in place of their message.

A share of the clients, chosen by the seed, attacks in every round. `forged` is a pure function of
their own rows; how honest clients fare is reported apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.methods.options import Fraction, NotNegative, Positive, check_options
from quiverfl.seeds import hashed
from quiverfl.transforms.noise import Noise
from quiverfl.transforms.robustness import Robustness

Integers = npt.NDArray[np.int64]
Message = dict[str, Tensor]


class Adversary(Protocol):
    """A frozen dataclass of options."""

    name: ClassVar[str]
    flips_labels: ClassVar[bool]
    """Whether attackers train on wrong labels."""

    @property
    def share(self) -> float: ...

    def forged(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        """What attackers send in place of `sent`; `before` is what they had when the round began.

        Rows are attackers. A leaf that is left as it is may be returned itself.
        """


@dataclass(frozen=True)
class SignFlip:
    """Sends its model with the other sign, `factor` times as large."""

    share: Fraction = 0.2
    factor: Positive = 1.0

    name = "sign_flip"
    flips_labels = False

    def __post_init__(self) -> None:
        check_options(self, "adversary")

    def forged(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {n: x if n == mass else x * -self.factor for n, x in sent.items()}


@dataclass(frozen=True)
class AddNoise:
    """Adds Gaussian noise of this standard deviation to every number it sends."""

    share: Fraction = 0.2
    deviation: Positive = 1.0

    name = "noise"
    flips_labels = False

    def __post_init__(self) -> None:
        check_options(self, "adversary")

    def forged(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {
            n: x if n == mass else x + self.deviation * noise.like(n, x) for n, x in sent.items()
        }


@dataclass(frozen=True)
class ScaledUpdate:
    """Sends its update of this round `factor` times: before + factor · (sent - before).

    A negative direction is the attack of reversed updates: set factor below zero.
    """

    share: Fraction = 0.2
    factor: float = -5.0

    name = "scaled_update"
    flips_labels = False

    def __post_init__(self) -> None:
        check_options(self, "adversary")

    def forged(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {
            n: x if n == mass else before[n] + self.factor * (x - before[n])
            for n, x in sent.items()
        }


@dataclass(frozen=True)
class LabelFlip:
    """Trains on wrong labels, class c as the last class - c, and then plays by the rules."""

    share: Fraction = 0.2

    name = "label_flip"
    flips_labels = True

    def __post_init__(self) -> None:
        check_options(self, "adversary")

    def forged(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return sent


@dataclass(frozen=True)
class ForgedMass:
    """Claims a push-sum mass `factor` times its own: its model weighs so much less or more."""

    share: Fraction = 0.2
    factor: NotNegative = 0.1

    name = "forged_mass"
    flips_labels = False

    def __post_init__(self) -> None:
        check_options(self, "adversary")

    def forged(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {n: x * self.factor if n == mass else x for n, x in sent.items()}


@dataclass(frozen=True)
class Adaptive:
    """Knows the receivers' rule and sends its update reversed, as far as they just take it.

    before - s · (sent - before)/‖sent - before‖ with s = margin · reach · ‖before‖, of models: a
    receiver is taken to be about where the attacker was when the round began, and `margin` is for
    what it has moved since. `distance` sets the reach, which is otherwise that of the run's rule.
    """

    share: Fraction = 0.2
    margin: Fraction = 0.5
    distance: Positive | None = None

    name = "adaptive"
    flips_labels = False

    def __post_init__(self) -> None:
        check_options(self, "adversary")

    def forged(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        assert self.distance is not None  # `against` a rule
        update = {name: sent[name] - before[name] for name in before}
        far = self.margin * self.distance * _norms(before) / _norms(update).clamp_min(1e-300)
        found = dict(sent)
        for name, leaf in update.items():
            factor = far.to(leaf.dtype).view(-1, *(1 for _ in leaf.shape[1:]))
            found[name] = before[name] - factor * leaf
        return found

    def against(self, rule: Robustness | None, progress: float) -> Adaptive:
        """With the reach of a rule, unless a distance was given."""
        if self.distance is not None:
            return self
        reach = None if rule is None else rule.reach(progress)
        if reach is None:
            what = "no rule" if rule is None else f"robustness.name = {rule.name!r}"
            raise QuiverError(
                f'adversary.name = "adaptive" with {what}: there is no bound to stay inside of. '
                "Give adversary.distance, such as 0.9 (times the norm of a model), or "
                'robustness.name = "balance" or "norm".'
            )
        return replace(self, distance=max(reach, 1e-300))


def _norms(message: Message) -> Tensor:
    """Of every row, over all leaves together."""
    squares = [leaf.flatten(1).double().square().sum(dim=1) for leaf in message.values()]
    return torch.stack(squares).sum(dim=0).sqrt()


def attackers(adversary: Adversary | None, seed: int, clients: int) -> Integers:
    """Who attacks, in rising order: a pure function of the seed."""
    if adversary is None:
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(hashed(seed, "adversary", np.arange(clients)), kind="stable")
    return np.sort(order[: round(adversary.share * clients)])
