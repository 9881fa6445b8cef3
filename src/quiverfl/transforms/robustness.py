"""What a receiver makes of messages it does not trust: factors on links, W = P · c.

Every rule compares a neighbour's model with the receiver's own and says which part of its share is
taken, between 0 and 1. What is not taken goes home: to its sender where columns sum to 1, so that
Σu and Σμ are what they were; and where only rows do, the receiver keeps that much of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from quiverfl.methods.options import NotNegative, Number, Positive, check_options
from quiverfl.topologies.graph import Floats, Graph, Integers
from quiverfl.topologies.topology import from_entries


@dataclass(frozen=True, eq=False)
class Seen:
    """What receivers see of every link between two clients."""

    receivers: Integers
    distances: Floats
    """‖z_j - z_i‖ for sender j and receiver i; of sketches where the rule takes sketches."""
    own: Floats
    """‖z_i‖ of the receiver."""
    theirs: Floats
    """‖z_j‖ of the sender."""
    progress: float
    """Rounds done, as a share of all."""


class Robustness(Protocol):
    """A frozen dataclass of options."""

    name: ClassVar[str]

    @property
    def sketch(self) -> int | None:
        """Numbers of the sketch that goes ahead of a message; None: the message itself is seen."""

    def factors(self, seen: Seen) -> Floats:
        """The part of every link's share that is taken, in [0, 1]."""

    def reach(self, progress: float) -> float | None:
        """How far a model may be from a receiver's own and is taken whole, as a multiple of the
        norm of that; None where no such bound is known. An attacker that adapts goes by it."""


@dataclass(frozen=True)
class SelfCenteredClip:
    """x_i + Σ P · clip(x_j - x_i, τ): what is further than τ from one's own is drawn nearer.

    τ is `factor` times the median distance of the round's senders, or `radius` if given (He et al.
    2022, "Byzantine-robust decentralized learning via ClippedGossip").
    """

    factor: Positive = 1.0
    radius: Positive | None = None

    name = "clip"
    sketch = None

    def __post_init__(self) -> None:
        check_options(self, "robustness")

    def factors(self, seen: Seen) -> Floats:
        if self.radius is not None:
            radii = np.full(len(seen.distances), self.radius)
        else:
            radii = self.factor * _median_of_receiver(seen)
        found: Floats = np.minimum(1.0, radii / np.maximum(seen.distances, 1e-300))
        return found

    def reach(self, progress: float) -> None:
        """What is near depends on the others."""


@dataclass(frozen=True)
class Balance:
    """Takes a model that is near enough: ‖z_j - z_i‖ ≤ γ · exp(-κ t/T) · ‖z_i‖.

    Fang et al. 2024, "Byzantine-robust decentralized federated learning" (BALANCE). With `sketch`
    both sides compare random projections of so many numbers, which go ahead: a model that is
    refused is not sent at all.
    """

    gamma: Positive = 1.0
    kappa: NotNegative = 0.5
    sketch: Number | None = None

    name = "balance"

    def __post_init__(self) -> None:
        check_options(self, "robustness")

    def factors(self, seen: Seen) -> Floats:
        return (seen.distances <= self.reach(seen.progress) * seen.own).astype(np.float64)

    def reach(self, progress: float) -> float:
        return self.gamma * math.exp(-self.kappa * progress)


@dataclass(frozen=True)
class NormBound:
    """Takes a model whose norm is at most `factor` times one's own.

    It is also the rule by which peers tell outliers (peers.outlier), each for itself.
    """

    factor: Positive = 10.0

    name = "norm"
    sketch = None

    def __post_init__(self) -> None:
        check_options(self, "robustness")

    def factors(self, seen: Seen) -> Floats:
        return np.asarray(self.takes(seen.theirs, seen.own), dtype=np.float64)

    def reach(self, progress: float) -> float:
        return max(0.0, self.factor - 1)

    def takes(self, theirs: Any, own: Any) -> Any:
        """Whether a norm, or every one of many, is no outlier beside one's own."""
        return ~np.greater(theirs, self.factor * np.asarray(own))


def judged(graph: Graph, factors: Floats, mass: bool = True) -> Graph:
    """The graph with every link between two clients weighed by its factor (in `across` order).

    Without a `mass` that would tell how much of everything there is, rows that sum to 1 stay so.
    """
    links = graph.sparse.tocoo()
    other = links.row != links.col
    weights = links.data.copy()
    weights[other] *= factors
    refused = links.data - weights
    to_sender = graph.column_stochastic and (mass or not graph.row_stochastic)
    home = links.col if to_sender else links.row
    kept = np.bincount(home, weights=refused, minlength=graph.clients)
    everyone = np.arange(graph.clients)
    return from_entries(
        graph.clients,
        np.concatenate([links.row, everyone]).astype(np.int64),
        np.concatenate([links.col, everyone]).astype(np.int64),
        np.concatenate([weights, kept]),
        active=graph.active,
    )


def across(graph: Graph) -> tuple[Integers, Integers]:
    """(receivers, senders) of the links between two clients."""
    links = graph.sparse.tocoo()
    other = links.row != links.col
    return links.row[other].astype(np.int64), links.col[other].astype(np.int64)


def _median_of_receiver(seen: Seen) -> Floats:
    """For every link the median distance of all senders to its receiver."""
    found = np.empty(len(seen.distances))
    order = np.argsort(seen.receivers, kind="stable")
    cuts = np.flatnonzero(np.diff(seen.receivers[order])) + 1
    for links in np.split(order, cuts):
        found[links] = np.median(seen.distances[links]) if len(links) else 0.0
    return found
