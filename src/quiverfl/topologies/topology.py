"""A topology: the graph of every round; and how graphs are built and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from scipy import sparse

from quiverfl.errors import QuiverError
from quiverfl.topologies.graph import Flags, Floats, Graph, Integers
from quiverfl.topologies.shown_graph import ShownTopology
from quiverfl.topologies.view import Looks, View


@dataclass(frozen=True, repr=False)
class Topology(ShownTopology):
    """Round → Graph, a pure function of (seed, round), with the options that made it.

    One that `looks` is a pure function of what clients know of each other, too (see View).
    """

    name: str
    clients: int
    draw: Callable[..., Graph] = field(repr=False, compare=False)
    """round → Graph, or (round, view) → Graph if it looks."""
    options: Mapping[str, Any] = field(default_factory=dict)
    looks: Looks | None = None

    @classmethod
    def fixed(cls, name: str, graph: Graph, **options: Any) -> Topology:
        """The same graph in every round."""
        return cls(name, graph.clients, partial(_always, graph), options)

    def __call__(self, round: int, view: View | None = None) -> Graph:
        if self.looks is None:
            return self.draw(round)
        if view is None and round:
            raise QuiverError(
                f"{self.name} looks at what the rounds before left, so its graph of round {round} "
                "is not known without them: give topology(round, view), or run it and look at "
                "what the run recorded (quiver topology show FOLDER)."
            )
        return self.draw(round, View.nothing(self.looks, self.clients) if view is None else view)


def _always(graph: Graph, round: int) -> Graph:
    """A function of the module and no closure, so that a Topology pickles."""
    return graph


def from_entries(
    clients: int, receivers: Integers, senders: Integers, weights: Floats, **options: Any
) -> Graph:
    """A graph from (receiver, sender, weight) triples; duplicates add up."""
    matrix = sparse.csr_array((weights, (receivers, senders)), shape=(clients, clients))
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    options.setdefault("active", np.ones(clients, dtype=bool))
    return Graph(_folded(matrix), **options)


def same_for_all(senders: Integers, weights: Floats, active: Flags, hub: bool = False) -> Graph:
    """Every client receives the same weighted sum of these senders' messages."""
    order = np.argsort(senders)
    ends = np.array([0, len(senders)])
    matrix = sparse.csr_array((weights[order], senders[order], ends), shape=(1, len(active)))
    return Graph(matrix, active, hub)


def links(graph: Graph) -> int:
    """How many weights the whole matrix has, without making it."""
    return int(graph.matrix.nnz) * (graph.clients // graph.matrix.shape[0])


def uploads(graph: Graph) -> Integers:
    """Messages each client puts on the network."""
    return graph.active.astype(np.int64) if graph.hub else _off_diagonal(graph, axis=0)


def downloads(graph: Graph) -> Integers:
    """Messages each client takes from the network."""
    return graph.active.astype(np.int64) if graph.hub else _off_diagonal(graph, axis=1)


def keeps_a_share(graph: Graph) -> bool:
    """Whether every client's own weight is positive."""
    if graph.one_row:
        return len(graph.senders) == graph.clients
    return bool((graph.matrix.diagonal() > 0).all())


def offline(graph: Graph) -> Flags:
    """Clients that neither train nor receive anything from others."""
    away: Flags = ~graph.active & (_off_diagonal(graph, axis=1) == 0)
    return away


def _off_diagonal(graph: Graph, axis: int) -> Integers:
    """Links to (axis 1) or from (axis 0) other clients."""
    if graph.one_row:
        own = np.zeros(graph.clients, dtype=np.int64)
        own[graph.senders] = 1
        return own * (graph.clients - 1) if axis == 0 else len(graph.senders) - own
    found = graph.matrix.tocoo()
    across = (found.row != found.col) & (found.data != 0)
    ends = found.col if axis == 0 else found.row
    counts: Integers = np.bincount(ends[across], minlength=graph.clients).astype(np.int64)
    return counts


def _folded(matrix: sparse.csr_array) -> sparse.csr_array:
    """The one row where all rows are equal."""
    counts = np.diff(matrix.indptr)
    if len(counts) < 2 or not matrix.has_sorted_indices or (counts != counts[0]).any():
        return matrix
    senders = matrix.indices.reshape(len(counts), counts[0])
    weights = matrix.data.reshape(len(counts), counts[0])
    if (senders != senders[0]).any() or (weights != weights[0]).any():
        return matrix
    return matrix[[0]]
