"""Attacks: what some clients send in place of their message.

A fraction of the clients, chosen by the seed, attacks in every round. `attack` is a pure function
of their own rows. Results report honest clients alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.options import Fraction, NotNegative, Positive, check_options
from quiverfl.seeds import key_hashes
from quiverfl.transforms.noise import Noise, expand_rows, message_norms
from quiverfl.transforms.robustness import Robustness
from quiverfl.types import Integers

Message = dict[str, Tensor]


class Adversary(Protocol):
    """A frozen dataclass of options."""

    name: ClassVar[str]
    flips_labels: ClassVar[bool]
    """Whether attackers train on wrong labels."""

    @property
    def share(self) -> float:
        """The fraction of clients that attack."""

    def attack(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        """Messages of attackers in place of `sent`.

        `before` has the values that the round began with. Rows are attackers.
        A leaf that does not change may be returned itself.
        """


@dataclass(frozen=True)
class _Attack:
    """By default attackers are a fifth of the clients and train like all other clients."""

    share: Fraction = 0.2

    flips_labels = False

    def __post_init__(self) -> None:
        check_options(self, "adversary")


@dataclass(frozen=True)
class SignFlip(_Attack):
    """Sends its model with the other sign, `factor` times as large."""

    factor: Positive = 1.0

    name = "sign_flip"

    def attack(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {n: x if n == mass else x * -self.factor for n, x in sent.items()}


@dataclass(frozen=True)
class AddNoise(_Attack):
    """Adds Gaussian noise of this standard deviation to every number it sends."""

    deviation: Positive = 1.0

    name = "noise"

    def attack(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {
            n: x if n == mass else x + self.deviation * noise.draw_like(n, x)
            for n, x in sent.items()
        }


@dataclass(frozen=True)
class ScaledUpdate(_Attack):
    """Sends its update of this round `factor` times: before + factor · (sent - before).

    A negative factor reverses the update.
    """

    factor: float = -5.0

    name = "scaled_update"

    def attack(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {
            n: x if n == mass else before[n] + self.factor * (x - before[n])
            for n, x in sent.items()
        }


@dataclass(frozen=True)
class LabelFlip(_Attack):
    """Trains on wrong labels, class c as the last class - c, and sends its message unchanged."""

    name = "label_flip"
    flips_labels = True

    def attack(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return sent


@dataclass(frozen=True)
class ForgedMass(_Attack):
    """Claims a push-sum mass `factor` times its own, so its model weighs less or more."""

    factor: NotNegative = 0.1

    name = "forged_mass"

    def attack(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        return {n: x * self.factor if n == mass else x for n, x in sent.items()}


@dataclass(frozen=True)
class Adaptive(_Attack):
    """Knows the receivers' rule and sends its reversed update, as large as they accept.

    before - s · (sent - before)/‖sent - before‖ with s = margin · reach · ‖before‖. The attack
    assumes that a receiver's model is where its own was when the round began; `margin` allows for
    what it has moved since. `distance` sets the reach, which is otherwise that of the run's rule.
    """

    margin: Fraction = 0.5
    distance: Positive | None = None

    name = "adaptive"

    def attack(self, sent: Message, before: Message, mass: str | None, noise: Noise) -> Message:
        assert self.distance is not None  # `adapt_to` a rule
        update = {name: sent[name] - before[name] for name in before}
        lengths = message_norms(update).clamp_min(1e-300)
        scales = self.margin * self.distance * message_norms(before) / lengths
        forged = {n: before[n] - expand_rows(scales, leaf) * leaf for n, leaf in update.items()}
        return {**sent, **forged}

    def adapt_to(self, rule: Robustness | None, progress: float) -> Adaptive:
        """The attack with the reach of a rule, unless a distance was given."""
        if self.distance is not None:
            return self
        reach = None if rule is None else rule.acceptance_radius(progress)
        if reach is None:
            what = "no rule" if rule is None else f"robustness.name = {rule.name!r}"
            raise QuiverError(
                f'adversary.name = "adaptive" with {what}: there is no bound to stay inside of. '
                "Give adversary.distance, such as 0.9 (times the norm of a model), or "
                'robustness.name = "balance" or "norm".'
            )
        return replace(self, distance=max(reach, 1e-300))


def choose_attackers(adversary: Adversary | None, seed: int, clients: int) -> Integers:
    """The clients that attack, in rising order: a pure function of the seed."""
    if adversary is None:
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(key_hashes(seed, "adversary", np.arange(clients)), kind="stable")
    return np.sort(order[: round(adversary.share * clients)])
