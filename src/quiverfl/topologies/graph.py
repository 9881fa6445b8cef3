"""A round's graph: who trains, who sends to whom, and with which weight.

weights[receiver, sender]: mixed_i = Σ_j weights[i, j] · message_j. Every client is its own
neighbour. Stored sparse, or as one row where all rows are equal (a star, a full graph); a larger
form is made only when somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse

from quiverfl.errors import QuiverError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Row: TypeAlias = tuple[Integers, Floats]
"""(senders in ascending order, their weights): a row that all clients have in common."""

DENSE_LIMIT = 5_000
TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Graph:
    """One round. `hub` marks a star: clients talk to a server only, which counts in the bytes.

    `matrix` is what was given: the weights in CSR form, or the one row of every client.
    """

    matrix: sparse.csr_array | Row
    active: Flags
    hub: bool = False

    def __post_init__(self) -> None:
        clients = len(self.active)
        if not isinstance(self.matrix, tuple) and self.matrix.shape != (clients, clients):
            raise QuiverError(
                f"a graph of {clients} clients needs a {clients} × {clients} matrix, "
                f"got {self.matrix.shape}."
            )
        weights = self.matrix[1] if isinstance(self.matrix, tuple) else self.matrix.data
        if weights.size and not (np.isfinite(weights).all() and weights.min() >= 0):
            raise QuiverError("mixing weights must be finite and not negative.")

    @property
    def clients(self) -> int:
        return len(self.active)

    @cached_property
    def sparse(self) -> sparse.csr_array:
        """The weights as a scipy CSR array [m, m]."""
        if not isinstance(self.matrix, tuple):
            return self.matrix
        senders, weights = self.matrix
        starts = np.arange(self.clients + 1) * len(senders)
        entries = (np.tile(weights, self.clients), np.tile(senders, self.clients), starts)
        return sparse.csr_array(entries, shape=(self.clients, self.clients))

    @cached_property
    def weights(self) -> Floats:
        """The dense matrix, float64 [m, m], for a few thousand clients at most."""
        if self.clients > DENSE_LIMIT:
            raise QuiverError(
                f"a dense matrix of {self.clients} clients is too large (limit {DENSE_LIMIT}): "
                "use graph.sparse, a scipy CSR array."
            )
        dense: Floats = self.sparse.toarray()
        return dense

    @cached_property
    def common_row(self) -> Row | None:
        """The one row if all rows are equal, so that the sum need be computed only once."""
        return self.matrix if isinstance(self.matrix, tuple) else _common_row(self.matrix)

    @property
    def links(self) -> int:
        """How many weights the matrix stores, without making it."""
        if isinstance(self.matrix, tuple):
            return self.clients * len(self.matrix[0])
        return int(self.matrix.nnz)

    @cached_property
    def row_stochastic(self) -> bool:
        if isinstance(self.matrix, tuple):
            sums: Any = self.matrix[1].sum()
        else:
            sums = self.matrix.sum(axis=1)
        return bool(np.abs(sums - 1).max() <= TOLERANCE)

    @cached_property
    def column_stochastic(self) -> bool:
        if isinstance(self.matrix, tuple):
            sums: Any = np.zeros(self.clients)
            sums[self.matrix[0]] = self.matrix[1] * self.clients
        else:
            sums = self.matrix.sum(axis=0)
        return bool(np.abs(sums - 1).max() <= TOLERANCE)

    @cached_property
    def senders(self) -> Integers:
        """Clients whose message is used by somebody."""
        if isinstance(self.matrix, tuple):
            return self.matrix[0]
        senders: Integers = np.unique(self.matrix.indices).astype(np.int64)
        return senders

    @cached_property
    def uploads(self) -> Integers:
        """Messages each client puts on the network."""
        if self.hub:
            return self.active.astype(np.int64)
        if isinstance(self.matrix, tuple):
            counts = np.zeros(self.clients, dtype=np.int64)
            counts[self.matrix[0]] = self.clients - 1
            return counts
        return self._off_diagonal(axis=0)

    @cached_property
    def downloads(self) -> Integers:
        """Messages each client takes from the network."""
        if self.hub:
            return self.active.astype(np.int64)
        if isinstance(self.matrix, tuple):
            counts = np.full(self.clients, len(self.matrix[0]), dtype=np.int64)
            counts[self.matrix[0]] -= 1
            return counts
        return self._off_diagonal(axis=1)

    def _off_diagonal(self, axis: int) -> Integers:
        coordinates = self.sparse.tocoo()
        across = (coordinates.row != coordinates.col) & (coordinates.data != 0)
        ends = coordinates.col if axis == 0 else coordinates.row
        counts: Integers = np.bincount(ends[across], minlength=self.clients).astype(np.int64)
        return counts


def _common_row(matrix: sparse.csr_array) -> Row | None:
    counts = np.diff(matrix.indptr)
    if not matrix.has_sorted_indices or (counts != counts[0]).any():
        return None
    senders = matrix.indices.reshape(len(counts), counts[0])
    weights = matrix.data.reshape(len(counts), counts[0])
    if (senders != senders[0]).any() or (weights != weights[0]).any():
        return None
    return senders[0].astype(np.int64), weights[0].astype(np.float64)


def from_entries(
    clients: int, receivers: Integers, senders: Integers, weights: Floats, **options: Any
) -> Graph:
    """A graph from (receiver, sender, weight) triples; duplicates add up."""
    matrix = sparse.csr_array((weights, (receivers, senders)), shape=(clients, clients))
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    options.setdefault("active", np.ones(clients, dtype=bool))
    return Graph(matrix, **options)


@dataclass(frozen=True)
class Topology:
    """Round → Graph, a pure function of (seed, round), with the options that made it."""

    name: str
    clients: int
    draw: Callable[[int], Graph] = field(repr=False, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fixed(cls, name: str, graph: Graph, **options: Any) -> Topology:
        """The same graph in every round."""
        return cls(name, graph.clients, partial(_always, graph), options)

    def __call__(self, round: int) -> Graph:
        return self.draw(round)


def _always(graph: Graph, round: int) -> Graph:
    """A function of the module and no closure, so that a Topology pickles."""
    return graph
