"""mixed = P · messages for stacked clients, in place over column chunks.

A chunk of columns of all clients fits the cache, so every number is read and written once, and the
extra memory is one chunk. Few clients, or many neighbours: a dense product. Otherwise a sparse one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quiverfl.topologies.graph import Graph

CHUNK_BYTES = 2_000_000
DENSE_CLIENTS = 256


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
    matrix = _matrix(graph, leaf)
    width = max(1, CHUNK_BYTES // (leaf.element_size() * len(leaf)))
    for begin in range(0, flat.shape[1], width):
        columns = flat[:, begin : begin + width]
        columns.copy_(matrix @ columns)
    return leaf


def _matrix(graph: Graph, leaf: Tensor) -> Tensor:
    if graph.clients <= DENSE_CLIENTS:
        return torch.from_numpy(graph.weights).to(dtype=leaf.dtype, device=leaf.device)
    csr = graph.sparse
    return torch.sparse_csr_tensor(
        torch.from_numpy(csr.indptr.astype("int64")),
        torch.from_numpy(csr.indices.astype("int64")),
        torch.from_numpy(csr.data).to(leaf.dtype),
        size=csr.shape,
        device=leaf.device,
        check_invariants=False,
    )
