"""mixed = P · messages for stacked clients, in place over column chunks.

A chunk of columns of all clients fits the cache, so every number is read from and written to memory
once, and the extra memory is a chunk or two. Few neighbours, the usual case: weighted sums of rows
(`embedding_bag`). Many: a dense product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from quiverfl.topologies.graph import DENSE_LIMIT, Graph

CHUNK_BYTES = 1_000_000
NARROWEST = 64
"""Columns, a multiple of a cache line as every width is; with many clients a chunk that fits the
cache would be too narrow to read quickly."""
DENSE_SHARE = 0.25
"""Above this share of non-zero weights the dense product is faster."""


def mix(graph: Graph, leaf: Tensor) -> Tensor:
    """Σ_j P[i, j] · leaf_j for every i. The leaf's own memory is used; the result may be it.

    Where all rows of P are equal the leaf may hold the senders' messages alone, in their order,
    and the result is one row that stands for all.
    """
    flat = leaf.view(len(leaf), -1)
    if graph.common_row is not None:
        senders, weights = graph.common_row
        sent = flat if len(flat) == len(senders) else flat[torch.from_numpy(senders)]
        row = torch.from_numpy(weights).to(dtype=leaf.dtype, device=leaf.device) @ sent
        return row.view(leaf.shape[1:]).expand(graph.clients, *leaf.shape[1:])
    product = _product(graph, leaf)
    width = CHUNK_BYTES // (leaf.element_size() * len(leaf))
    width = max(NARROWEST, width - width % NARROWEST)
    rows = leaf.new_empty(len(leaf), width)  # one buffer for all chunks stays in the cache
    for begin in range(0, flat.shape[1], width):
        columns = flat[:, begin : begin + width]
        if columns.shape[1] < width:
            rows = leaf.new_empty(columns.shape)
        columns.copy_(product(rows.copy_(columns)))
    return leaf


def _product(graph: Graph, leaf: Tensor) -> Callable[[Tensor], Tensor]:
    """Rows [clients, width] → P · rows."""
    if graph.clients <= DENSE_LIMIT and graph.links > DENSE_SHARE * graph.clients**2:
        dense = torch.from_numpy(graph.weights).to(dtype=leaf.dtype, device=leaf.device)
        return lambda rows: dense @ rows
    csr = graph.sparse
    senders, starts = (
        torch.from_numpy(part.astype("int32")).to(leaf.device)
        for part in (csr.indices, csr.indptr[:-1])
    )
    weights = torch.from_numpy(csr.data).to(dtype=leaf.dtype, device=leaf.device)

    def sums(rows: Tensor) -> Tensor:
        return embedding_bag(senders, rows, starts, mode="sum", per_sample_weights=weights)

    return sums
