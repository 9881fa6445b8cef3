"""A round's graph: who trains, who sends to whom, and with which weight.

weights[receiver, sender]: mixed_i = Σ_j weights[i, j] · message_j. Every client is its own
neighbour. Stored sparse; a dense matrix is made only when somebody asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from quiverfl.errors import QuiverError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

DENSE_LIMIT = 5_000
TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Graph:
    """One round. `hub` marks a star: clients talk to a server only, which counts in the bytes."""

    sparse: sparse.csr_array
    active: Flags
    hub: bool = False

    def __post_init__(self) -> None:
        clients = len(self.active)
        if self.sparse.shape != (clients, clients):
            raise QuiverError(
                f"a graph of {clients} clients needs a {clients} × {clients} matrix, "
                f"got {self.sparse.shape}."
            )
        if self.sparse.nnz and not (np.isfinite(self.sparse.data).all() and self.sparse.min() >= 0):
            raise QuiverError("mixing weights must be finite and not negative.")

    @property
    def clients(self) -> int:
        return len(self.active)

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
    def row_stochastic(self) -> bool:
        return bool(np.abs(self.sparse.sum(axis=1) - 1).max() <= TOLERANCE)

    @cached_property
    def column_stochastic(self) -> bool:
        return bool(np.abs(self.sparse.sum(axis=0) - 1).max() <= TOLERANCE)

    @cached_property
    def senders(self) -> Integers:
        """Clients whose message is used by somebody."""
        senders: Integers = np.unique(self.sparse.indices).astype(np.int64)
        return senders

    @cached_property
    def uploads(self) -> Integers:
        """Messages each client puts on the network."""
        if self.hub:
            return self.active.astype(np.int64)
        return self._off_diagonal(axis=0)

    @cached_property
    def downloads(self) -> Integers:
        """Messages each client takes from the network."""
        if self.hub:
            return self.active.astype(np.int64)
        return self._off_diagonal(axis=1)

    def _off_diagonal(self, axis: int) -> Integers:
        coordinates = self.sparse.tocoo()
        across = (coordinates.row != coordinates.col) & (coordinates.data != 0)
        ends = coordinates.col if axis == 0 else coordinates.row
        counts: Integers = np.bincount(ends[across], minlength=self.clients).astype(np.int64)
        return counts


def from_entries(
    clients: int, receivers: Integers, senders: Integers, weights: Floats, **options: Any
) -> Graph:
    """A graph from (receiver, sender, weight) triples; duplicates add up."""
    matrix = sparse.csr_array((weights, (receivers, senders)), shape=(clients, clients))
    matrix.sum_duplicates()
    matrix.sort_indices()
    options.setdefault("active", np.ones(clients, dtype=bool))
    return Graph(matrix, **options)


@dataclass(frozen=True)
class Topology:
    """Round → Graph, a pure function of (seed, round), with the options that made it."""

    name: str
    clients: int
    draw: Callable[[int], Graph] = field(repr=False, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, round: int) -> Graph:
        return self.draw(round)
