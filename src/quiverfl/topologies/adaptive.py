"""Adaptive topologies: clients choose whom to push to, or to pull from, by the reports they have.

In all that push a client keeps 1/(n + 1) of its mass and gives as much to each of n others, so that
columns sum to 1 whatever is chosen, and Σμ and Σu are conserved. `explore` of the n others are not
chosen but drawn: in every round all clients stand in a circle in random order, and everybody sends
to those behind it. So no link is ever impossible, every round is strongly connected, and each
client receives messages. Otherwise its μ would vanish: a client that receives nothing keeps
1/(n + 1) of its μ, round after round, and push-sum steps by η/μ.
A client without a report counts as the average of the clients with one.

Every draw is a hash of its coordinates: the same view, seed and round give the same graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from quiverfl.errors import QuiverError, suggest
from quiverfl.seeds import Hashes, key_hashes
from quiverfl.topologies.arguments import (
    check_clients,
    check_fraction,
    check_neighbors,
    check_whole,
)
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import ReportSpec, ReportView, check_client_count
from quiverfl.topologies.topology import Topology, build_graph
from quiverfl.types import Flags, Floats, Integers

Criterion: TypeAlias = Literal["loss", "similarity"]
Score: TypeAlias = Callable[[ReportView, int], Floats]
"""(view, round) → how much client i wants to send to client j, [clients, clients]; NaN: unknown."""
_CRITERIA = ("loss", "similarity")
LAST = np.uint64(2**64 - 1)


def loss_push(
    clients: int,
    neighbors: int,
    candidates: int | None = None,
    explore: int = 1,
    seed: int = 0,
) -> Topology:
    """Each client pushes to those with the highest reported loss, among some drawn ones.

    Power of choice (Cho, Wang and Joshi 2022) without a server: a client draws `candidates`
    others, 2n unless given, and takes those with the highest reported loss.
    """
    clients = check_clients("loss_push", clients)
    neighbors = check_neighbors("loss_push", neighbors, clients)
    if candidates is None:
        candidates = min(2 * neighbors, clients - 1)
    others = "is one other" if clients == 2 else f"are {clients - 1} others"
    why = f"{neighbors} of them are chosen, and there {others}"
    candidates = check_whole("loss_push", "candidates", candidates, neighbors, clients - 1, why)
    score = partial(_candidate_losses, candidates, seed)
    rule = _PushRule("loss_push", neighbors, score, explore, seed)
    return rule.topology(clients, ReportSpec(loss=True), candidates=candidates)


def similar_push(
    clients: int, neighbors: int, explore: int = 1, sketch: int = 32, seed: int = 0
) -> Topology:
    """Each client pushes to those whose update is most similar to its own, by their sketches.

    The cosine of two sketches estimates that of the updates, with an error of about 1/√sketch.
    """
    clients = check_clients("similar_push", clients)
    neighbors = check_neighbors("similar_push", neighbors, clients)
    spec = _sketch_spec("similar_push", sketch, seed)
    rule = _PushRule("similar_push", neighbors, _similarities, explore, seed)
    return rule.topology(clients, spec, sketch=spec.sketch)


def similar_pull(
    clients: int,
    neighbors: int,
    sharpness: float = 10.0,
    own: float | None = None,
    explore: int = 1,
    sketch: int = 32,
    seed: int = 0,
) -> Topology:
    """Each client averages over those whose model is most similar to its own, by their sketches.

    The attention of HeurFedAMP (Huang et al. 2021): a client weighs itself `own`, 1/(n + 1) unless
    given, and n others in proportion to exp(sharpness · cosine) of what they share. Sketches travel
    with the messages, so the cosines are those of the round before. With n = clients - 1 all are
    mixed, as in the paper; with fewer, `explore` of them are drawn, so that none stays unknown.
    """
    clients = check_clients("similar_pull", clients)
    neighbors = check_neighbors("similar_pull", neighbors, clients)
    if not 0 <= sharpness < np.inf:
        raise QuiverError(
            f"similar_pull: sharpness = {sharpness}: it must be 0 or more, such as 10."
        )
    if own is not None:
        own = check_fraction("similar_pull", "own", own, zero=False)
    why = "a sketch of one number knows only signs"
    spec = ReportSpec(model=check_whole("similar_pull", "sketch", sketch, 2, None, why), seed=seed)
    rule = _PullRule("similar_pull", neighbors, _model_similarities, explore, seed, sharpness, own)
    weight = {} if own is None else {"own": own}
    return rule.topology(clients, spec, sharpness=sharpness, **weight, sketch=spec.model)


def bandit_push(
    clients: int,
    neighbors: int,
    by: Criterion = "loss",
    confidence: float = 0.5,
    explore: int = 1,
    sketch: int = 32,
    seed: int = 0,
) -> Topology:
    """Each client pushes by upper confidence bounds: to clients in need and rarely sent to.

    Score of j: its reported loss (or its similarity), scaled to 0 … 1 among those i knows, plus
    confidence · √(ln(1 + round) / (1 + messages sent to j)). UCB1 (Auer et al. 2002) on losses as
    in Cho et al. 2020, with the last loss heard in place of a discounted mean.
    """
    clients = check_clients("bandit_push", clients)
    neighbors = check_neighbors("bandit_push", neighbors, clients)
    if by not in _CRITERIA:
        raise QuiverError(f"bandit_push: by = {by!r}: {suggest(str(by), _CRITERIA)}")
    if not 0 <= confidence < np.inf:
        raise QuiverError(
            f"bandit_push: confidence = {confidence}: it must be 0 or more, such as 0.5."
        )
    spec = ReportSpec(loss=True) if by == "loss" else _sketch_spec("bandit_push", sketch, seed)
    options = {} if by == "loss" else {"sketch": spec.sketch}
    rule = _PushRule(
        "bandit_push", neighbors, partial(_confidence_bounds, by, confidence), explore, seed
    )
    return rule.topology(clients, spec, by=by, confidence=confidence, **options)


def _sketch_spec(name: str, sketch: int, seed: int) -> ReportSpec:
    why = "a sketch of one number knows only signs"
    return ReportSpec(sketch=check_whole(name, "sketch", sketch, 2, None, why), seed=seed)


@dataclass(frozen=True)
class _PushRule:
    """Choose n receivers: some are drawn, the rest have the highest scores."""

    name: str
    neighbors: int
    score: Score
    explore: int
    seed: int

    def topology(self, clients: int, reports: ReportSpec, **options: object) -> Topology:
        check_client_count(self.name, clients)
        why = f"so many of the {self.neighbors} neighbours are drawn"
        explore = check_whole(self.name, "explore", self.explore, 0, self.neighbors, why)
        options = {"neighbors": self.neighbors, **options, "explore": explore, "seed": self.seed}
        return Topology(self.name, clients, self.draw, options, reports)

    def draw(self, round: int, view: ReportView) -> Graph:
        clients, count = view.clients, self.neighbors
        chosen = self._choose_others(_fill_unknown(self.score(view, round)), round)
        senders, receivers = (ends.astype(np.int64) for ends in chosen.nonzero())
        everyone = np.arange(clients)
        return build_graph(
            clients,
            np.concatenate([everyone, receivers]),
            np.concatenate([everyone, senders]),
            np.full(clients * (count + 1), 1 / (count + 1)),
        )

    def _choose_others(self, scores: Floats, round: int) -> Flags:
        """[who chooses, who is chosen]: the next in the circle, then the best of the rest."""
        drawn = self._draw_circle(len(scores), round)
        taken = drawn | np.eye(len(scores), dtype=bool)
        ties = _hash_pairs(self.seed, self.name, round, len(scores))
        best_first = np.lexsort((ties, np.where(taken, np.inf, -scores)), axis=-1)
        chosen: Flags = drawn | (_rank(best_first) < self.neighbors - self.explore)
        return chosen

    def _draw_circle(self, clients: int, round: int) -> Flags:
        circle = np.argsort(key_hashes(self.seed, f"{self.name}-circle", round, np.arange(clients)))
        drawn = np.zeros((clients, clients), dtype=bool)
        for step in range(1, self.explore + 1):
            drawn[circle, np.roll(circle, -step)] = True
        return drawn


@dataclass(frozen=True)
class _PullRule(_PushRule):
    """Choose n senders in the same way, and weigh them by a softmax of their scores."""

    sharpness: float
    own: float | None

    def draw(self, round: int, view: ReportView) -> Graph:
        clients = view.clients
        scores = _fill_unknown(self.score(view, round))
        chosen = self._choose_others(scores, round)
        logits = np.where(chosen, self.sharpness * scores, -np.inf)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        own = 1 / (self.neighbors + 1) if self.own is None else self.own
        weights *= (1 - own) / weights.sum(axis=1, keepdims=True)
        np.fill_diagonal(weights, own)
        receivers, senders = (ends.astype(np.int64) for ends in weights.nonzero())
        return build_graph(clients, receivers, senders, weights[receivers, senders])


def _hash_pairs(seed: int, purpose: str, round: int, clients: int) -> Hashes:
    """A hash for every pair of clients."""
    everyone = np.arange(clients)
    return key_hashes(seed, purpose, round, everyone[:, None], everyone)


def _rank(order: Integers) -> Integers:
    """The rank of every client in each row's order."""
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(order.shape[1])[None, :], axis=1)
    return places


def _fill_unknown(scores: Floats) -> Floats:
    """Score clients without a report by the average of the known scores; 0 if there is none.

    Minus infinity is kept: such a client is no candidate.
    """
    reported = np.where(np.isfinite(scores), scores, np.nan)
    np.fill_diagonal(reported, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a row without any report
        average = np.nan_to_num(np.nanmean(reported, axis=1))[:, None]
    known: Floats = np.where(np.isneginf(scores) | np.isfinite(scores), scores, average)
    return known


def _candidate_losses(candidates: int, seed: int, view: ReportView, round: int) -> Floats:
    draws = _hash_pairs(seed, "loss_push-candidates", round, view.clients)
    draws = np.where(np.eye(view.clients, dtype=bool), LAST, draws >> np.uint64(1))
    drawn = _rank(np.argsort(draws, axis=-1, kind="stable")) < candidates
    return np.where(drawn, _mask_infinite(view.loss), -np.inf)


def _similarities(view: ReportView, round: int) -> Floats:
    return _cosines(view.sketch)


def _model_similarities(view: ReportView, round: int) -> Floats:
    return _cosines(view.model)


def _cosines(sketches: Floats) -> Floats:
    """Cosines of each client's own sketch with those it knows, [clients, clients]; or NaN."""
    everyone = np.arange(len(sketches))
    own = sketches[everyone, everyone]
    lengths = np.linalg.norm(sketches, axis=2) * np.linalg.norm(own, axis=1)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        return _mask_infinite(np.einsum("ijk,ik->ij", sketches, own) / lengths)


def _confidence_bounds(by: Criterion, confidence: float, view: ReportView, round: int) -> Floats:
    values = _mask_infinite(view.loss) if by == "loss" else _similarities(view, round)
    np.fill_diagonal(values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        low, high = (f(values, axis=1)[:, None] for f in (np.nanmin, np.nanmax))
    scaled = _fill_unknown(
        np.where(high > low, (values - low) / np.where(high > low, high - low, 1), 0.5)
    )
    bounds: Floats = scaled + confidence * np.sqrt(np.log1p(round) / (1 + view.sent))
    return bounds


def _mask_infinite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)
