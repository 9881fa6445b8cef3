"""Clients that choose whom to push to, from what those told them: topologies that look.

In all of them a client keeps 1/(n + 1) of its mass and gives as much to each of n others, so that
columns sum to 1 whatever is chosen, and Σμ and Σu are conserved. `explore` of the n others are not
chosen but drawn: in every round all clients stand in a circle in random order, and everybody sends
to those behind it. So no link is ever impossible, every round is strongly connected, and nobody is
left without messages, which would let its μ vanish: a client that nobody sends to keeps
1/(n + 1) of its μ, round after round, and push-sum steps by η/μ.
Somebody of whom nothing is known counts as the average of those of whom something is.

Every draw is a hash of its coordinates: the same view, seed and round give the same graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from quiverfl.errors import QuiverError, nearest
from quiverfl.seeds import Hashes, hashed
from quiverfl.topologies.arguments import checked_clients, checked_neighbors, checked_whole
from quiverfl.topologies.graph import Flags, Floats, Graph, Integers
from quiverfl.topologies.topology import Topology, from_entries
from quiverfl.topologies.view import Looks, View, not_too_many

By: TypeAlias = Literal["loss", "similarity"]
Score: TypeAlias = Callable[[View, int], Floats]
"""(view, round) → how much client i wants to send to client j, [clients, clients]; NaN: unknown."""
_BY = ("loss", "similarity")
LAST = np.uint64(2**64 - 1)


def loss_push(
    clients: int,
    neighbors: int,
    candidates: int | None = None,
    explore: int = 1,
    seed: int = 0,
) -> Topology:
    """Each client pushes to those who said that their loss is highest, among some drawn ones.

    Power of choice (Cho, Wang and Joshi 2022) without a server: a client draws `candidates`
    others, 2n unless given, and takes of them those with the highest loss it was told.
    """
    clients = checked_clients("loss_push", clients)
    neighbors = checked_neighbors("loss_push", neighbors, clients)
    if candidates is None:
        candidates = min(2 * neighbors, clients - 1)
    why = f"{neighbors} of them are chosen, and there are {clients - 1} others"
    candidates = checked_whole("loss_push", "candidates", candidates, neighbors, clients - 1, why)
    score = partial(_drawn_losses, candidates, seed)
    rule = _Rule("loss_push", neighbors, score, explore, seed)
    return rule.topology(clients, Looks(loss=True), candidates=candidates)


def similar_push(
    clients: int, neighbors: int, explore: int = 1, sketch: int = 32, seed: int = 0
) -> Topology:
    """Each client pushes to those whose update is most similar to its own, by their sketches.

    The cosine of two sketches estimates that of the updates, with an error of about 1/√sketch.
    """
    clients = checked_clients("similar_push", clients)
    neighbors = checked_neighbors("similar_push", neighbors, clients)
    looks = _sketched("similar_push", sketch, seed)
    rule = _Rule("similar_push", neighbors, _similarities, explore, seed)
    return rule.topology(clients, looks, sketch=looks.sketch)


def bandit_push(
    clients: int,
    neighbors: int,
    by: By = "loss",
    confidence: float = 0.5,
    explore: int = 1,
    sketch: int = 32,
    seed: int = 0,
) -> Topology:
    """Each client pushes by upper confidence bounds: who needs it, and whom it rarely sent to.

    Score of j: the loss it told (or its similarity), scaled to 0 … 1 among those i knows, plus
    confidence · √(ln(1 + round) / (1 + messages sent to j)). UCB1 (Auer et al. 2002) on losses as
    in Cho et al. 2020, with the last loss heard in place of a discounted mean.
    """
    clients = checked_clients("bandit_push", clients)
    neighbors = checked_neighbors("bandit_push", neighbors, clients)
    if by not in _BY:
        raise QuiverError(f"bandit_push: by = {by!r}: {nearest(str(by), _BY)}")
    if not 0 <= confidence < np.inf:
        raise QuiverError(
            f"bandit_push: confidence = {confidence}: it must be 0 or more, such as 0.5."
        )
    looks = Looks(loss=True) if by == "loss" else _sketched("bandit_push", sketch, seed)
    told = {} if by == "loss" else {"sketch": looks.sketch}
    rule = _Rule("bandit_push", neighbors, partial(_bounds, by, confidence), explore, seed)
    return rule.topology(clients, looks, by=by, confidence=confidence, **told)


def _sketched(name: str, sketch: int, seed: int) -> Looks:
    why = "a sketch of one number knows only signs"
    return Looks(sketch=checked_whole(name, "sketch", sketch, 2, None, why), seed=seed)


@dataclass(frozen=True)
class _Rule:
    """How a client comes to n others: some are drawn, the rest have the highest scores."""

    name: str
    neighbors: int
    score: Score
    explore: int
    seed: int

    def topology(self, clients: int, looks: Looks, **options: object) -> Topology:
        not_too_many(self.name, clients)
        why = f"so many of the {self.neighbors} neighbours are drawn"
        explore = checked_whole(self.name, "explore", self.explore, 0, self.neighbors, why)
        options = {"neighbors": self.neighbors, **options, "explore": explore, "seed": self.seed}
        return Topology(self.name, clients, self.push, options, looks)

    def push(self, round: int, view: View) -> Graph:
        clients, count = view.clients, self.neighbors
        chosen = self._chosen(_known(self.score(view, round)), round)
        senders, receivers = (ends.astype(np.int64) for ends in chosen.nonzero())
        everyone = np.arange(clients)
        return from_entries(
            clients,
            np.concatenate([everyone, receivers]),
            np.concatenate([everyone, senders]),
            np.full(clients * (count + 1), 1 / (count + 1)),
        )

    def _chosen(self, scores: Floats, round: int) -> Flags:
        """[sender, receiver]: those behind one in the circle, then the best of the others."""
        drawn = self._circle(len(scores), round)
        taken = drawn | np.eye(len(scores), dtype=bool)
        ties = _pairs(self.seed, self.name, round, len(scores))
        best_first = np.lexsort((ties, np.where(taken, np.inf, -scores)), axis=-1)
        chosen: Flags = drawn | (_places(best_first) < self.neighbors - self.explore)
        return chosen

    def _circle(self, clients: int, round: int) -> Flags:
        circle = np.argsort(hashed(self.seed, f"{self.name}-circle", round, np.arange(clients)))
        drawn = np.zeros((clients, clients), dtype=bool)
        for step in range(1, self.explore + 1):
            drawn[circle, np.roll(circle, -step)] = True
        return drawn


def _pairs(seed: int, purpose: str, round: int, clients: int) -> Hashes:
    """A number for every pair of clients."""
    everyone = np.arange(clients)
    return hashed(seed, purpose, round, everyone[:, None], everyone)


def _places(order: Integers) -> Integers:
    """The place of everybody in each row's order."""
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(order.shape[1])[None, :], axis=1)
    return places


def _known(scores: Floats) -> Floats:
    """Whom nothing is known of counts as the average of the others; all alike if nobody is known.

    Minus infinity is kept: it says that somebody is no candidate.
    """
    told = np.where(np.isfinite(scores), scores, np.nan)
    np.fill_diagonal(told, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row in which nobody is known
        average = np.nan_to_num(np.nanmean(told, axis=1))[:, None]
    known: Floats = np.where(np.isneginf(scores) | np.isfinite(scores), scores, average)
    return known


def _drawn_losses(candidates: int, seed: int, view: View, round: int) -> Floats:
    draws = _pairs(seed, "loss_push-candidates", round, view.clients)
    draws = np.where(np.eye(view.clients, dtype=bool), LAST, draws >> np.uint64(1))
    drawn = _places(np.argsort(draws, axis=-1, kind="stable")) < candidates
    return np.where(drawn, _finite(view.loss), -np.inf)


def _similarities(view: View, round: int) -> Floats:
    sketches = view.sketch
    everyone = np.arange(view.clients)
    own = sketches[everyone, everyone]
    lengths = np.linalg.norm(sketches, axis=2) * np.linalg.norm(own, axis=1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return _finite(np.einsum("ijk,ik->ij", sketches, own) / lengths)


def _bounds(by: By, confidence: float, view: View, round: int) -> Floats:
    values = _finite(view.loss) if by == "loss" else _similarities(view, round)
    np.fill_diagonal(values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = (f(values, axis=1)[:, None] for f in (np.nanmin, np.nanmax))
    scaled = _known(np.where(high > low, (values - low) / np.where(high > low, high - low, 1), 0.5))
    bounds: Floats = scaled + confidence * np.sqrt(np.log1p(round) / (1 + view.sent))
    return bounds


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)
