"""A round's graph: the clients that train, the links between clients, and their weights.

weights[receiver, sender]: mixed_i = Σ_j weights[i, j] · message_j. All are their own neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse

from quiverfl.errors import QuiverError
from quiverfl.topologies.shown_graph import GraphCard
from quiverfl.types import Flags, Floats, Integers

DENSE_LIMIT = 5_000
TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False, repr=False)
class Graph(GraphCard):
    """One round. `hub` marks a star: clients talk to a server only, which counts in the bytes."""

    matrix: sparse.csr_array
    """[clients, clients], or [1, clients]: the one row that all of them have."""
    active: Flags
    hub: bool = False

    def __post_init__(self) -> None:
        if self.matrix.shape not in ((1, self.clients), (self.clients, self.clients)):
            raise QuiverError(
                f"a graph of {self.clients} clients needs a {self.clients} × {self.clients} "
                f"matrix, got {self.matrix.shape}."
            )
        if self.matrix.nnz and not (np.isfinite(self.matrix.data).all() and self.matrix.min() >= 0):
            raise QuiverError("mixing weights must be finite and not negative.")

    @property
    def clients(self) -> int:
        return len(self.active)

    @property
    def one_row(self) -> bool:
        """Whether all clients receive the same sum, so that it need be computed only once."""
        return self.matrix.shape[0] == 1

    @cached_property
    def sparse(self) -> sparse.csr_array:
        """The weights as a scipy CSR array [m, m]."""
        every = np.zeros(self.clients, dtype=np.int64)
        return self.matrix[every] if self.one_row and self.clients > 1 else self.matrix

    @cached_property
    def weights(self) -> Floats:
        """The dense matrix, float64 [m, m], for a few thousand clients at most."""
        if self.clients > DENSE_LIMIT:
            size = f"a dense matrix of {self.clients} clients is too large (limit {DENSE_LIMIT})"
            raise QuiverError(f"{size}: use graph.sparse, a scipy CSR array.")
        return np.asarray(self.sparse.toarray(), dtype=np.float64)

    @cached_property
    def row_stochastic(self) -> bool:
        return bool(np.abs(self.matrix.sum(axis=1) - 1).max() <= TOLERANCE)

    @cached_property
    def column_stochastic(self) -> bool:
        sums = self.matrix.sum(axis=0) * (self.clients / self.matrix.shape[0])
        return bool(np.abs(sums - 1).max() <= TOLERANCE)

    @cached_property
    def senders(self) -> Integers:
        """Clients whose message at least one client uses."""
        return np.unique(self.matrix.indices).astype(np.int64)
