"""leaf + P · Q(leaf): coding and mixing in one pass over the columns.

For `Quantize` in float32 by C (`native/quantized_mixing.c`) where a compiler and a processor with
AVX2 are, in less time than mixing whole messages takes; elsewhere by PyTorch. Both find the same
bits, which is tried on a small case before the compiled pass is first used.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.column_code import ColumnCode
from quiverfl.engine.mixing import is_dense, mix
from quiverfl.engine.workers import side_by_side, worker_count
from quiverfl.native.library import load, why_not
from quiverfl.topologies import random_push
from quiverfl.topologies.graph import Graph
from quiverfl.transforms.compression import SLACK, Quantize
from quiverfl.transforms.dither import BLOCK, Dither

SOURCE = ("quantized_mixing", "-ffp-contract=off")
AT_ONCE = 2**24
"""Numbers of one call: Ctrl-C is heard between two."""


class _Exchange(ctypes.Structure):
    """As in quantized_mixing.c."""

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
    if isinstance(coder, Quantize) and _is_for_c(graph, leaf) and same_bits(coder):
        return _by_c(graph, leaf, code)
    return _by_torch(graph, leaf, code)


def _is_for_c(graph: Graph, leaf: Tensor) -> bool:
    """Whether it is what the C is written for."""
    flat = leaf.view(len(leaf), -1)
    usual = leaf.dtype == torch.float32 and leaf.device.type == "cpu" and flat.stride(1) == 1
    return usual and len(leaf) == graph.clients and not is_dense(graph)


@cache
def same_bits(coder: Quantize) -> bool:
    """Whether there is a compiled pass here, and it rounds and adds as this PyTorch does.

    PyTorch chooses kernels by processor; on one that multiplies and adds in two steps, say, last
    bits would differ between this simulation and its ranks and peers.
    """
    if why_not(*SOURCE) is not None:
        return False
    clients, numbers = 48, 2 * BLOCK + 29
    graph = random_push(clients, 6)(0)
    leaf = torch.from_numpy(np.random.default_rng(0).normal(size=(clients, numbers))).float()
    draws = Dither(0, 0).of("trial", np.arange(clients), numbers)
    code = ColumnCode(coder, draws, np.arange(3))
    return torch.equal(_by_c(graph, leaf.clone(), code), _by_torch(graph, leaf, code))


def _by_torch(graph: Graph, leaf: Tensor, code: ColumnCode) -> Tensor:
    return mix(graph, leaf, BLOCK, code.sent)


def _by_c(graph: Graph, leaf: Tensor, code: ColumnCode) -> Tensor:
    flat = leaf.view(len(leaf), -1)
    clients, columns = flat.shape
    arrays = _arrays(graph, code)
    assert isinstance(code.compression, Quantize)
    exchange = _Exchange(
        rows=flat.data_ptr(),
        clients=clients,
        stride=flat.stride(0),
        columns=columns,
        random_rows=len(code.draws.dither.integers),
        groups=code.draws.turns.shape[1],
        factor=SLACK / code.compression.levels,
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    mix_quantized = load(*SOURCE).mix_quantized

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
    side_by_side(work, parts, workers)
    return leaf


def _arrays(graph: Graph, code: ColumnCode) -> dict[str, npt.NDArray[Any]]:
    """What the C reads, by the names of its fields. Whoever calls it must hold on to them."""
    csr, draws = graph.sparse, code.draws
    silent = np.zeros(graph.clients, dtype=np.uint8)
    silent[code.silent] = 1
    found: dict[str, npt.NDArray[Any]] = {
        "starts": csr.indptr.astype(np.int32),
        "senders": csr.indices.astype(np.int32),
        "weights": csr.data.astype(np.float32),
        "silent": silent,
    }
    if code.compression.draws:
        found["random"] = draws.dither.integers
        found["turns"] = np.ascontiguousarray(draws.turns)
        found["group_of"] = np.ascontiguousarray(draws.groups, dtype=np.int64)
        found["place_of"] = np.ascontiguousarray(draws.places, dtype=np.int64)
    return found
