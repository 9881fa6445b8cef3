"""Robust aggregation: receivers put factors on links, W = P · c.

Every rule compares a neighbour's model with the receiver's own and accepts a part of its share,
between 0 and 1. The rest returns to its sender where columns sum to 1, so that Σu and Σμ are
conserved. Where only rows sum to 1, the receiver keeps that much more of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from quiverfl.options import NotNegative, Number, Positive, check_options
from quiverfl.seeds import key_hashes
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import build_graph
from quiverfl.types import AnyArray, Floats, Integers


@dataclass(frozen=True, eq=False)
class ReceivedMessage:
    """Norms and distances that receivers compare, one entry per link between two clients."""

    receivers: Integers
    distances: Floats
    """‖z_j - z_i‖ for sender j and receiver i; of sketches where the rule takes sketches."""
    own: Floats
    """‖z_i‖ of the receiver."""
    theirs: Floats
    """‖z_j‖ of the sender."""
    progress: float
    """Rounds done, as a fraction of all."""


class Robustness(Protocol):
    """A frozen dataclass of options."""

    name: ClassVar[str]

    @property
    def sketch(self) -> int | None:
        """Size of the sketch that goes ahead of a message; None: receivers see the message."""

    def factors(self, messages: ReceivedMessage) -> Floats:
        """The part of every link's share that is accepted, in [0, 1]."""

    def acceptance_radius(self, progress: float) -> float | None:
        """The largest distance at which a model is fully accepted, as a multiple of the norm of
        the receiver's own; None where there is no such bound. An adaptive attack uses it."""


@dataclass(frozen=True)
class SelfCenteredClip:
    """x_i + Σ P · clip(x_j - x_i, τ): a model further than τ from one's own is drawn nearer.

    τ is `factor` times the median distance of the round's senders, or `radius` if given (He et al.
    2022, "Byzantine-robust decentralized learning via ClippedGossip").
    """

    factor: Positive = 1.0
    radius: Positive | None = None

    name = "clip"
    sketch = None

    def __post_init__(self) -> None:
        check_options(self, "robustness")

    def factors(self, messages: ReceivedMessage) -> Floats:
        if self.radius is not None:
            radii = np.full(len(messages.distances), self.radius)
        else:
            radii = self.factor * _median_of_receiver(messages)
        factors: Floats = np.minimum(1.0, radii / np.maximum(messages.distances, 1e-300))
        return factors

    def acceptance_radius(self, progress: float) -> None:
        """None: which models are near depends on the other messages."""


@dataclass(frozen=True)
class Balance:
    """Accepts a model that is near enough: ‖z_j - z_i‖ ≤ γ · exp(-κ t/T) · ‖z_i‖.

    Fang et al. 2024, "Byzantine-robust decentralized federated learning" (BALANCE). With `sketch`
    both sides compare random projections of this many numbers, which go ahead. A refused model is
    not sent at all.
    """

    gamma: Positive = 1.0
    kappa: NotNegative = 0.5
    sketch: Number | None = None

    name = "balance"

    def __post_init__(self) -> None:
        check_options(self, "robustness")

    def factors(self, messages: ReceivedMessage) -> Floats:
        return (
            messages.distances <= self.acceptance_radius(messages.progress) * messages.own
        ).astype(np.float64)

    def acceptance_radius(self, progress: float) -> float:
        return self.gamma * math.exp(-self.kappa * progress)


@dataclass(frozen=True)
class NormBound:
    """Accepts a model whose norm is at most `factor` times one's own.

    Peers also use this rule, each for itself, to refuse outliers (peers.outlier).
    """

    factor: Positive = 10.0

    name = "norm"
    sketch = None

    def __post_init__(self) -> None:
        check_options(self, "robustness")

    def factors(self, messages: ReceivedMessage) -> Floats:
        return np.asarray(self.accepts(messages.theirs, messages.own), dtype=np.float64)

    def acceptance_radius(self, progress: float) -> float:
        return max(0.0, self.factor - 1)

    def accepts(self, theirs: Any, own: Any) -> Any:
        """Whether a norm, or each of many, is no outlier beside one's own."""
        return ~np.greater(theirs, self.factor * np.asarray(own))


def reweigh_graph(graph: Graph, factors: Floats, mass: bool = True) -> Graph:
    """The graph with the weight of every link times its factor (in the order of `cross_links`).

    Without a `mass`, which would show how much arrived, rows that sum to 1 still do.
    """
    links = graph.sparse.tocoo()
    other = links.row != links.col
    weights = links.data.copy()
    weights[other] *= factors
    refused = links.data - weights
    to_sender = graph.column_stochastic and (mass or not graph.row_stochastic)
    keeper = links.col if to_sender else links.row
    kept = np.bincount(keeper, weights=refused, minlength=graph.clients)
    everyone = np.arange(graph.clients)
    return build_graph(
        graph.clients,
        np.concatenate([links.row, everyone]).astype(np.int64),
        np.concatenate([links.col, everyone]).astype(np.int64),
        np.concatenate([weights, kept]),
        active=graph.active,
    )


def cross_links(graph: Graph) -> tuple[Integers, Integers]:
    """(receivers, senders) of the links between two clients."""
    links = graph.sparse.tocoo()
    other = links.row != links.col
    return links.row[other].astype(np.int64), links.col[other].astype(np.int64)


def _median_of_receiver(messages: ReceivedMessage) -> Floats:
    """For every link, the median distance of all senders to its receiver."""
    medians = np.empty(len(messages.distances))
    order = np.argsort(messages.receivers, kind="stable")
    cuts = np.flatnonzero(np.diff(messages.receivers[order])) + 1
    for links in np.split(order, cuts):
        medians[links] = np.median(messages.distances[links]) if len(links) else 0.0
    return medians


def count_sketch(rows: Tensor, size: int, seed: int, name: str) -> Tensor:
    """A count sketch, [clients, size]: adds every number, with a random sign, to a random bucket.

    On average, distances between sketches are those between the rows. All rows of a seed share
    buckets and signs.
    """
    bits = key_hashes(seed, f"sketch {name}", np.arange(rows.shape[1]))
    buckets = torch.from_numpy((bits >> np.uint64(1)).astype(np.int64) % size)
    signs = torch.from_numpy((bits & np.uint64(1)).astype(np.float64) * 2 - 1)
    result = rows.new_zeros(len(rows), size)
    return result.index_add_(1, buckets.to(rows.device), rows * signs.to(rows))


Leaves = Mapping[str, AnyArray]


def compute_factors(
    rule: Robustness,
    own: tuple[Leaves, float],
    others: Sequence[tuple[Leaves, float]],
    progress: float,
) -> Floats:
    """The fraction of each received (message, mass) that one receiver accepts.

    No rule accepts a message that is not finite.
    """
    distances = np.array([_distance(own, other) for other in others])
    received = ReceivedMessage(
        np.zeros(len(others), dtype=np.int64),
        distances,
        np.full(len(others), model_norm(*own)),
        np.array([model_norm(*other) for other in others]),
        progress,
    )
    factors: Floats = np.where(np.isfinite(distances), rule.factors(received), 0.0)
    return factors


def model_norm(message: Leaves, mass: float) -> float:
    """‖z‖ = ‖u‖ / μ."""
    squares = (float(np.square(leaf, dtype=np.float64).sum()) for leaf in message.values())
    return math.sqrt(math.fsum(squares)) / mass


def _distance(own: tuple[Leaves, float], other: tuple[Leaves, float]) -> float:
    (mine, mass), (theirs, weight) = own, other
    squares = []
    with np.errstate(invalid="ignore", over="ignore"):
        for name, leaf in mine.items():
            difference = np.divide(theirs[name], weight, dtype=np.float64)
            difference -= np.divide(leaf, mass, dtype=np.float64)
            squares.append(float(np.square(difference).sum()))
    total = math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf
    return math.sqrt(total)


def reweigh_copies(own: int, others: Sequence[int], factors: Floats) -> tuple[int, list[int]]:
    """Weights of copies, in units. Weight removed from others is added to the receiver's own."""
    left = [int(weight * factor) for weight, factor in zip(others, factors.tolist(), strict=True)]
    return own + sum(others) - sum(left), left
