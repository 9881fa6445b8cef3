"""leaf + P · Q(leaf): coding and mixing in one pass over the columns.

`Quantize` in float32 is computed in C (`support/native/quantized_mixing.c`) where there are a
compiler and a processor with AVX2, in less time than mixing uncompressed messages takes. Everything
else is computed by PyTorch. Both give the same bits, which is tried on a small case before the
compiled pass is first used.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.exchange.matrix import is_dense, mix
from quiverfl.engine.local.workers import parallel_for, worker_count
from quiverfl.support.compiler import load_library, why_not_compiled
from quiverfl.topologies import random_push
from quiverfl.topologies.graph import Graph
from quiverfl.transforms.compression import SLACK, Compression, Quantize
from quiverfl.transforms.noise import BLOCK, ClientDither, Dither
from quiverfl.types import Integers


@dataclass(frozen=True, eq=False)
class ColumnCode:
    """The coding of one leaf in one round; `silent` are rows of clients that keep everything."""

    compression: Compression
    dither: ClientDither
    silent: Integers

    def transmit(self, rows: Tensor, begin: int) -> Tensor:
        """Decoded values of columns [clients, width] from column `begin`; a new tensor."""
        decoded = transmit_columns(self.compression, self.dither, rows, begin)
        return decoded.index_fill_(0, self._silent, 0.0) if len(self.silent) else decoded

    @cached_property
    def _silent(self) -> Tensor:
        return torch.from_numpy(self.silent).to(self.dither.round.device)


def transmit_columns(
    compression: Compression, dither: ClientDither, rows: Tensor, begin: int
) -> Tensor:
    """Decoded values of columns [clients, width] that begin with a block."""
    blocks, rest = divmod(rows.shape[1], BLOCK)
    cut = blocks * BLOCK
    parts = []
    for first, columns, width in ((0, rows[:, :cut], BLOCK), (blocks, rows[:, cut:], rest)):
        count = columns.shape[1] // width if width else 0
        if count:
            split = columns.view(len(rows), count, width)
            block = begin // BLOCK + first
            noise = (
                dither.take_blocks(block, count)[..., :width] if compression.is_random else split
            )
            parts.append(compression.transmit(split, noise).flatten(1))
    if not parts:
        return rows.clone()
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


SOURCE = ("quantized_mixing", "-ffp-contract=off")
AT_ONCE = 2**24
"""Numbers of one call: Ctrl-C takes effect between two calls."""


class _MixQuantized(ctypes.Structure):
    """The struct of quantized_mixing.c."""

    _fields_ = [
        ("rows", ctypes.c_void_p),
        ("clients", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("senders", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("silent", ctypes.c_void_p),
        ("random", ctypes.c_void_p),
        ("random_rows", ctypes.c_int64),
        ("turns", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("group_of", ctypes.c_void_p),
        ("place_of", ctypes.c_void_p),
        ("factor", ctypes.c_float),
    ]


def mix_coded(graph: Graph, leaf: Tensor, code: ColumnCode) -> Tensor:
    """leaf_i + Σ_j P[i, j] · Q(leaf_j) for every i, in the leaf's own memory; P has all rows."""
    coder = code.compression
    if isinstance(coder, Quantize) and _is_for_c(graph, leaf) and compiled_matches_torch(coder):
        return _by_c(graph, leaf, code)
    return _by_torch(graph, leaf, code)


def _is_for_c(graph: Graph, leaf: Tensor) -> bool:
    """Whether the C is written for this graph and leaf."""
    flat = leaf.view(len(leaf), -1)
    usual = leaf.dtype == torch.float32 and leaf.device.type == "cpu" and flat.stride(1) == 1
    return usual and len(leaf) == graph.clients and not is_dense(graph)


@cache
def compiled_matches_torch(coder: Quantize) -> bool:
    """Whether there is a compiled pass here that rounds and adds as this PyTorch does.

    PyTorch chooses kernels by processor; on one that multiplies and adds in two steps, say, last
    bits would differ between this simulation and its ranks and peers.
    """
    if why_not_compiled(*SOURCE) is not None:
        return False
    clients, numbers = 48, 2 * BLOCK + 29
    graph = random_push(clients, 6)(0)
    leaf = torch.from_numpy(np.random.default_rng(0).normal(size=(clients, numbers))).float()
    dither = Dither(0, 0).for_leaf("trial", np.arange(clients), numbers)
    code = ColumnCode(coder, dither, np.arange(3))
    return torch.equal(_by_c(graph, leaf.clone(), code), _by_torch(graph, leaf, code))


def _by_torch(graph: Graph, leaf: Tensor, code: ColumnCode) -> Tensor:
    return mix(graph, leaf, BLOCK, code.transmit)


def _by_c(graph: Graph, leaf: Tensor, code: ColumnCode) -> Tensor:
    flat = leaf.view(len(leaf), -1)
    clients, columns = flat.shape
    arrays = _arrays(graph, code)
    assert isinstance(code.compression, Quantize)
    exchange = _MixQuantized(
        rows=flat.data_ptr(),
        clients=clients,
        stride=flat.stride(0),
        columns=columns,
        random_rows=len(code.dither.round.integers),
        groups=code.dither.turns.shape[1],
        factor=SLACK / code.compression.levels,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    mix_quantized = load_library(*SOURCE).mix_quantized

    def work(blocks: range) -> None:
        codes = torch.empty(clients, BLOCK, dtype=torch.int8)
        scales = torch.empty(clients)
        ends = (ctypes.c_int64(end) for end in (blocks.start, blocks.stop))
        buffers = (ctypes.c_void_p(buffer.data_ptr()) for buffer in (codes, scales))
        mix_quantized(ctypes.byref(exchange), *ends, *buffers)

    count = -(-columns // BLOCK)
    workers = worker_count(count)
    each = max(1, min(AT_ONCE // (BLOCK * clients), -(-count // workers)))
    parts = [range(first, min(first + each, count)) for first in range(0, count, each)]
    parallel_for(work, parts, workers)
    return leaf


def _arrays(graph: Graph, code: ColumnCode) -> dict[str, npt.NDArray[Any]]:
    """Inputs of the C code, by the names of its fields. The caller must keep references to them."""
    csr, dither = graph.sparse, code.dither
    silent = np.zeros(graph.clients, dtype=np.uint8)
    silent[code.silent] = 1
    arrays: dict[str, npt.NDArray[Any]] = {
        "starts": csr.indptr.astype(np.int32),
        "senders": csr.indices.astype(np.int32),
        "weights": csr.data.astype(np.float32),
        "silent": silent,
    }
    if code.compression.is_random:
        arrays["random"] = dither.round.integers
        arrays["turns"] = np.ascontiguousarray(dither.turns)
        arrays["group_of"] = np.ascontiguousarray(dither.groups, dtype=np.int64)
        arrays["place_of"] = np.ascontiguousarray(dither.numbers, dtype=np.int64)
    return arrays
