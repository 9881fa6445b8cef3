"""What one receiver makes of the messages that came to it, by the run's rule of robustness."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.topologies.graph import Floats
from quiverfl.transforms.robustness import Robustness, Seen

Array = npt.NDArray[Any]
Leaves = Mapping[str, Array]


def factors_of(
    rule: Robustness,
    own: tuple[Leaves, float],
    others: Sequence[tuple[Leaves, float]],
    progress: float,
) -> Floats:
    """The part that is taken of each of the others' (message, mass), compared with one's own.

    What is not finite is taken by no rule.
    """
    distances = np.array([_distance(own, other) for other in others])
    seen = Seen(
        np.zeros(len(others), dtype=np.int64),
        distances,
        np.full(len(others), model_norm(*own)),
        np.array([model_norm(*other) for other in others]),
        progress,
    )
    found: Floats = np.where(np.isfinite(distances), rule.factors(seen), 0.0)
    return found


def model_norm(message: Leaves, mass: float) -> float:
    """‖z‖ = ‖u‖ / μ."""
    squares = (float(np.square(leaf, dtype=np.float64).sum()) for leaf in message.values())
    return math.sqrt(math.fsum(squares)) / mass


def _distance(own: tuple[Leaves, float], other: tuple[Leaves, float]) -> float:
    (mine, mass), (theirs, weight) = own, other
    squares = []
    with np.errstate(invalid="ignore", over="ignore"):
        for name, leaf in mine.items():
            apart = np.divide(theirs[name], weight, dtype=np.float64)
            apart -= np.divide(leaf, mass, dtype=np.float64)
            squares.append(float(np.square(apart).sum()))
    found = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
    return math.sqrt(found)


def judged_weights(own: int, others: Sequence[int], factors: Floats) -> tuple[int, list[int]]:
    """Weights of copies, in whole units: of what is not taken the receiver keeps as much more."""
    taken = [int(weight * factor) for weight, factor in zip(others, factors.tolist(), strict=True)]
    return own + sum(others) - sum(taken), taken
