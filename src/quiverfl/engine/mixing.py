"""mixed = P · messages for stacked clients, in place over column chunks.

A chunk of columns of all clients fits the cache, so every number is read from and written to memory
once, and the extra memory is a chunk or two for every worker. Few neighbours, the usual
case: weighted sums of rows (`embedding_bag`). Many: a dense product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quiverfl.engine.workers import side_by_side, worker_count
from quiverfl.topologies.graph import DENSE_LIMIT, Graph
from quiverfl.topologies.topology import links

CHUNK_BYTES = 600_000
NARROWEST = 48
"""Columns, a multiple of a cache line as every width is; with many clients a chunk that fits the
cache would be too narrow to read quickly."""
DENSE_SHARE = 0.25
"""Above this share of non-zero weights the dense product is faster."""


Sent = Callable[[Tensor, int], Tensor]
"""(columns of all rows, number of the first one) → what others receive of them; a new tensor."""


def mix(graph: Graph, leaf: Tensor, multiple: int = NARROWEST, sent: Sent | None = None) -> Tensor:
    """Σ_j P[i, j] · leaf_j for every i. The leaf's own memory is used; the result may be it.

    Where all rows of P are equal the leaf may hold the senders' messages alone, in their order,
    and the result is one row that stands for all. Columns are cut at multiples of `multiple`. With
    `sent`, the sum of what is sent is added: leaf + P · sent, for a P of several rows.
    """
    flat = leaf.view(len(leaf), -1)
    if graph.one_row:
        senders = torch.from_numpy(graph.senders).to(leaf.device)
        theirs = flat if len(flat) == len(senders) else flat[senders]
        weights = torch.from_numpy(graph.matrix.data).to(dtype=leaf.dtype, device=leaf.device)
        row = weights @ theirs
        return row.view(leaf.shape[1:]).expand(graph.clients, *leaf.shape[1:])
    product = _product(graph, leaf)
    width = chunk_width(len(leaf), leaf.element_size(), multiple)

    def work(columns: range) -> None:
        rows = leaf.new_empty(len(leaf), width if sent is None else 0)  # one buffer for all chunks
        for begin in columns:
            chunk = flat[:, begin : begin + width]
            if sent is None and chunk.shape[1] < width:
                rows = leaf.new_empty(chunk.shape)
            if sent is None:
                chunk.copy_(product(rows.copy_(chunk)))
            else:
                chunk.add_(product(sent(chunk, begin)))

    begins = range(0, max(1, flat.shape[1]), width)
    workers = worker_count(len(begins)) if leaf.device.type == "cpu" else 1
    each = -(-len(begins) // workers)
    parts = [begins[first : first + each] for first in range(0, len(begins), each)]
    side_by_side(work, parts, workers)
    return leaf


def chunk_width(clients: int, element_size: int, multiple: int = NARROWEST) -> int:
    """Columns that are multiplied at a time: where they begin and end decides the last bits."""
    width = CHUNK_BYTES // (element_size * clients)
    return max(multiple, width - width % multiple)


def is_dense(graph: Graph) -> bool:
    """Whether a dense product is faster than sums of rows; it adds in another order."""
    return graph.clients <= DENSE_LIMIT and links(graph) > DENSE_SHARE * graph.clients**2


def _product(graph: Graph, leaf: Tensor) -> Callable[[Tensor], Tensor]:
    """Rows [clients, width] → P · rows."""
    if is_dense(graph):
        dense = torch.from_numpy(graph.weights).to(dtype=leaf.dtype, device=leaf.device)
        return lambda rows: dense @ rows
    csr = graph.sparse
    senders, starts = (
        torch.from_numpy(part.astype("int32")).to(leaf.device)
        for part in (csr.indices, csr.indptr[:-1])
    )
    weights = torch.from_numpy(csr.data).to(dtype=leaf.dtype, device=leaf.device)

    def sums(rows: Tensor) -> Tensor:
        # Not nn.functional's, whose checks take as long as a fifth of a chunk. Mode 0 is the sum.
        found: Tensor = torch.embedding_bag(rows, senders, starts, False, 0, False, weights)[0]
        return found

    return sums
