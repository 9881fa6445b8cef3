"""The core of one process and of ranks: mixed = P · messages, leaf by leaf.

A product is computed in place, over chunks of columns of all clients. A chunk fits the cache, so
every number is read from and written to memory once, and the extra memory is a chunk or two for
every worker. With few neighbours, the usual case, it sums rows: in C (`support/native/mixing.c`),
or by `embedding_bag` where that is not compiled, to the same bits. With many neighbours it is a
dense product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from quiverfl.engine.local.workers import parallel_for, worker_count
from quiverfl.methods.contract import Message
from quiverfl.support.compiler import load_library, why_not_compiled
from quiverfl.topologies.graph import DENSE_LIMIT, Graph
from quiverfl.topologies.topology import count_links, find_offline
from quiverfl.types import Flags, Integers

CHUNK_BYTES = 600_000
NARROWEST = 48
"""Columns of the narrowest chunk, a multiple of a cache line as every width is; with many clients
a chunk that fits the cache would be too narrow to read quickly."""
SOURCE = ("mixing", "-ffp-contract=fast")
LINES = 64
"""Columns of which the chunks of the C are multiples."""
FIRST_CACHE = 32 << 10
"""Bytes of a chunk in C, where there are few clients; a chunk of many fits the second cache."""
AT_ONCE = 2**24
"""Numbers of one call of the C code: Ctrl-C takes effect between two calls."""
DENSE_SHARE = 0.25
"""Above this fraction of non-zero weights the dense product is faster."""
DUE, WAITING = "due/", "waiting/"
"""Names in a checkpoint."""

Transmit: TypeAlias = Callable[[Tensor, int], Tensor]
"""(columns of all rows, number of the first one) → their decoded values; a new tensor."""
Product: TypeAlias = Callable[[Graph, Tensor], Tensor]
"""(graph, the messages of the rows that are here) → their mixed messages."""


def mix(
    graph: Graph, leaf: Tensor, multiple: int = NARROWEST, transmit: Transmit | None = None
) -> Tensor:
    """Σ_j P[i, j] · leaf_j for every i. The leaf's own memory is used; the result may be it.

    Where all rows of P are equal the leaf may hold the senders' messages alone, in their order,
    and the result is one row that stands for all. Columns are cut at multiples of `multiple`.
    With `transmit` the result is leaf + P · transmit(leaf), for a P of several rows.
    """
    flat = leaf.view(len(leaf), -1)
    if graph.one_row:
        senders = torch.from_numpy(graph.senders).to(leaf.device)
        theirs = flat if len(flat) == len(senders) else flat[senders]
        weights = torch.from_numpy(graph.matrix.data).to(dtype=leaf.dtype, device=leaf.device)
        row = weights @ theirs
        return row.view(leaf.shape[1:]).expand(graph.clients, *leaf.shape[1:])
    product = _dense_product(graph, leaf)
    if product is None and transmit is None and _is_for_c(graph, flat):
        _sum_rows(graph, flat)
        return leaf
    product = product or _sparse_product(graph, leaf)
    width = chunk_width(len(leaf), leaf.element_size(), multiple)

    def work(columns: range) -> None:
        rows = leaf.new_empty(
            len(leaf), width if transmit is None else 0
        )  # one buffer for all chunks
        for begin in columns:
            chunk = flat[:, begin : begin + width]
            if transmit is None and chunk.shape[1] < width:
                rows = leaf.new_empty(chunk.shape)
            if transmit is None:
                chunk.copy_(product(rows.copy_(chunk)))
            else:
                chunk.add_(product(transmit(chunk, begin)))

    begins = range(0, max(1, flat.shape[1]), width)
    workers = worker_count(len(begins)) if leaf.device.type == "cpu" else 1
    each = -(-len(begins) // workers)
    parts = [begins[first : first + each] for first in range(0, len(begins), each)]
    parallel_for(work, parts, workers)
    return leaf


class _Mixing(ctypes.Structure):
    """The struct of mixing.c."""

    _fields_ = [
        *(("rows", ctypes.c_void_p), ("clients", ctypes.c_int64), ("stride", ctypes.c_int64)),
        *((name, ctypes.c_void_p) for name in ("starts", "senders", "weights")),
    ]


def _is_for_c(graph: Graph, flat: Tensor) -> bool:
    """Whether the C code handles these rows with the same bits as PyTorch."""
    if flat.dtype != torch.float32 or flat.device.type != "cpu" or flat.stride(1) != 1:
        return False
    return flat.shape[0] == graph.matrix.shape[0] and compiled_matches_torch()


@cache
def compiled_matches_torch() -> bool:
    """Whether a compiled sum is available that adds in the same order as PyTorch.

    Tried once, before the first round. On a processor that multiplies and adds in two steps, say,
    PyTorch chooses other kernels, and results would depend on whether there is a compiler.
    """
    if why_not_compiled(*SOURCE) is not None:
        return False
    clients, columns = 48, 3 * LINES + 37
    draws = np.random.default_rng(0)
    links = sparse.csr_array(np.where(draws.random((clients, clients)) < 0.2, 1 / 7, 0.0))
    graph = Graph(links, np.ones(clients, dtype=bool))
    leaf = torch.from_numpy(draws.normal(size=(clients, columns))).float()
    expected = _sparse_product(graph, leaf)(leaf)
    _sum_rows(graph, leaf)
    return torch.equal(leaf, expected)


def _sum_rows(graph: Graph, flat: Tensor) -> None:
    """P · flat in the memory of flat, by C."""
    csr, (clients, columns) = graph.sparse, flat.shape
    parts = csr.indptr.astype(np.int32), csr.indices.astype(np.int32), csr.data.astype(np.float32)
    pointers = (part.ctypes.data for part in parts)
    mixing = _Mixing(flat.data_ptr(), clients, flat.stride(0), *pointers)
    mix_rows = load_library(*SOURCE).mix_rows
    width = min(8, max(1, FIRST_CACHE // (4 * clients * LINES))) * LINES

    def work(chunks: range) -> None:
        buffer = flat.new_empty(clients, width)
        sizes = map(ctypes.c_int64, (chunks.start, min(chunks.stop, columns), width))
        mix_rows(ctypes.byref(mixing), *sizes, ctypes.c_void_p(buffer.data_ptr()))

    begins = range(0, columns, width)
    workers = worker_count(len(begins))
    each = max(1, min(AT_ONCE // (width * clients), -(-len(begins) // workers)))
    pieces = [begins[first : first + each] for first in range(0, len(begins), each)]
    parallel_for(work, pieces, workers)


def chunk_width(clients: int, element_size: int, multiple: int = NARROWEST) -> int:
    """Columns that are multiplied at a time. Where chunks begin and end decides the last bits."""
    width = CHUNK_BYTES // (element_size * clients)
    return max(multiple, width - width % multiple)


def is_dense(graph: Graph) -> bool:
    """Whether a dense product is faster than sums of rows; it adds in another order."""
    clients = graph.clients
    return clients <= DENSE_LIMIT and count_links(graph) > DENSE_SHARE * clients**2


def _dense_product(graph: Graph, leaf: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Rows [clients, width] → P · rows, where P has many links."""
    if not is_dense(graph):
        return None
    dense = torch.from_numpy(graph.weights).to(dtype=leaf.dtype, device=leaf.device)
    return lambda rows: dense @ rows


def _sparse_product(graph: Graph, leaf: Tensor) -> Callable[[Tensor], Tensor]:
    """Rows [clients, width] → P · rows, as sums of rows."""
    csr = graph.sparse
    senders, starts = (
        torch.from_numpy(part.astype("int32")).to(leaf.device)
        for part in (csr.indices, csr.indptr[:-1])
    )
    weights = torch.from_numpy(csr.data).to(dtype=leaf.dtype, device=leaf.device)

    def sums(rows: Tensor) -> Tensor:
        # Not nn.functional's, whose checks take as long as a fifth of a chunk. Mode 0 is the sum.
        total: Tensor = torch.embedding_bag(rows, senders, starts, False, 0, False, weights)[0]
        return total

    return sums


class MatrixProduct:
    """A core: a product per leaf, in place where nothing is late. All clients are in one process,
    unless `rows` are those that are here and `product` brings the rest.

    With a delay τ a client has its own share of round t at once and other clients' shares of round
    t - τ; before round τ no shares arrive from them. Shares for a client that is offline when
    they are due wait for the next round in which it is there.
    """

    def __init__(
        self, delay: int = 0, product: Product = mix, rows: Integers | None = None
    ) -> None:
        self.delay, self.product = delay, product
        self._rows = slice(None) if rows is None else rows
        self._due: dict[int, Message] = {}
        self._waiting: Message = {}

    def senders(self, graph: Graph) -> Integers | None:
        return graph.senders if graph.one_row and not self.delay else None

    def coded_sizes(self, outbox: Message, sizes: Integers) -> Integers:
        return sizes

    def mix(self, round: int, graph: Graph, outbox: Message) -> Message:
        if self.delay == 0:
            return {name: self.product(graph, leaf) for name, leaf in outbox.items()}
        own = torch.from_numpy(graph.sparse.diagonal()[self._rows])
        others = _without_diagonal(graph)
        self._due[round + self.delay] = {
            name: self.product(others, leaf.clone()) for name, leaf in outbox.items()
        }
        mixed = {name: leaf * _like(own, leaf) for name, leaf in outbox.items()}
        self._add_due(mixed, self._due.pop(round, {}), find_offline(graph))
        return mixed

    def _add_due(self, mixed: Message, due: Message, offline: Flags) -> None:
        """Add shares that are due or have waited, for clients that are not offline."""
        for name, leaf in mixed.items():
            parts = [part for part in (due.get(name), self._waiting.get(name)) if part is not None]
            if not parts:
                continue
            total = sum(parts[1:], parts[0])
            absent = _like(torch.from_numpy(offline[self._rows].astype(np.float64)), total)
            leaf.add_(total * (1 - absent))
            if offline.any():
                self._waiting[name] = total * absent
            else:
                self._waiting.pop(name, None)

    def tensors(self) -> dict[str, Tensor]:
        """Every share that has left its sender and not reached its receiver, by due round."""
        tensors = {
            f"{DUE}{round}/{name}": leaf
            for round, message in self._due.items()
            for name, leaf in message.items()
        }
        return {**tensors, **{f"{WAITING}{name}": leaf for name, leaf in self._waiting.items()}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._due, self._waiting = {}, {}
        for key, leaf in tensors.items():
            if key.startswith(WAITING):
                self._waiting[key.removeprefix(WAITING)] = leaf
            elif key.startswith(DUE):
                round, _, name = key.removeprefix(DUE).partition("/")
                self._due.setdefault(int(round), {})[name] = leaf


def _without_diagonal(graph: Graph) -> Graph:
    links = graph.sparse.tocoo()
    across = links.row != links.col
    entries = (links.data[across], (links.row[across], links.col[across]))
    return Graph(sparse.csr_array(entries, shape=links.shape), graph.active)


def _like(column: Tensor, leaf: Tensor) -> Tensor:
    """One number per client, shaped to multiply a leaf."""
    shape = (-1,) + (1,) * (leaf.ndim - 1)
    return column.to(dtype=leaf.dtype, device=leaf.device).view(shape)
