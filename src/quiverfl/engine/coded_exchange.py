"""An exchange in which coded messages travel, and what was not sent is not lost.

    remainder   u' = u - Q(u) + Σ P · Q(u): what is not sent stays with its sender, so that Σu is
                what it was wherever the columns of P sum to 1. The mass is sent whole.
    replica     x̂ ← x̂ + Q(x - x̂), x' = x + γ (Σ P · x̂ - x̂): CHOCO-SGD. Neighbours keep x̂, so they
                must be the same in every round.

Both are u' = u + γ (P - I) · k with what others know of a client, k = Q(u) or x̂.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse
from torch import Tensor

from quiverfl.engine.column_code import ColumnCode
from quiverfl.engine.exchange import MatrixExchange
from quiverfl.engine.mixing import Sent, chunk_width
from quiverfl.engine.quantized_mixing import mix_coded
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, uploads
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.dither import BLOCK, Dither

Integers = npt.NDArray[np.int64]


class CodedExchange:
    """Wraps the exchange that moves what was sent; `ids` are the clients of the rows here.

    In one process and without delay coding and mixing are one pass over the columns (`fused`).
    """

    def __init__(
        self,
        inner: MatrixExchange,
        compression: Compression,
        seed: int,
        ids: Integers,
        mass: str | None,
        replica: bool,
        fused: bool,
    ) -> None:
        self._inner, self._seed = inner, seed
        self._compression = compression.for_replicas() if replica else compression
        self._ids, self._mass = ids, mass
        self._fused = fused and not replica
        self._replicas: Message | None = {} if replica else None
        self._step = (compression.step or compression.replica_step()) if replica else 1.0
        self._rest: Message = {}
        self._first: Graph | None = None

    def senders(self, graph: Graph) -> None:
        """Everybody's: whoever does not send keeps what it has."""

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        return coded_payload(self._compression, outbox, self._mass, payload)

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        return self._inner.traffic(graph, payload)

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        self._check(round, graph)
        coded = {name: leaf for name, leaf in outbox.items() if name != self._mass}
        travels = {name: leaf for name, leaf in outbox.items() if name == self._mass}
        self._rest = {}
        where = next((leaf.device for leaf in coded.values()), torch.device("cpu"))
        dither = Dither(self._seed, round, where)
        apart = graph.one_row or bool(self._inner.delay)
        moves = None if apart else difference(graph)
        silent = np.flatnonzero(uploads(graph)[self._ids] == 0)
        for name, leaf in coded.items():
            draws = dither.of(name, self._ids, leaf[0].numel() if len(leaf) else 0)
            code = ColumnCode(self._compression, draws, silent)
            if self._fused and moves is not None:
                self._rest[name] = mix_coded(moves, leaf, code) if moves.matrix.nnz else leaf
                continue
            known = self._known(name, leaf, code.sent)
            if moves is not None:
                self._rest[name] = self._moved(moves, leaf, known)
            else:
                self._rest[name] = leaf.sub_(known, alpha=self._step)
                travels[name] = known.clone() if self._replicas is not None else known
        if graph.one_row:
            here = torch.from_numpy(np.flatnonzero(np.isin(self._ids, graph.senders)))
            travels = {name: leaf[here] for name, leaf in travels.items()}
        self._inner.push(round, graph, travels)

    def _moved(self, moves: Graph, leaf: Tensor, known: Tensor) -> Tensor:
        """leaf + γ (P - I) · known."""
        if not moves.matrix.nnz:
            return leaf
        known = known.clone() if self._replicas is not None else known
        return leaf.add_(self._inner.product(moves, known), alpha=self._step)

    def collect(self, round: int) -> Message:
        mixed = self._inner.collect(round)
        for name, rest in self._rest.items():
            share = mixed.get(name)
            mixed[name] = rest if share is None else rest.add_(share, alpha=self._step)
        self._rest = {}
        return mixed

    def in_flight(self) -> dict[str, Tensor]:
        replicas = self._replicas or {}
        kept = {f"replica/{name}": leaf for name, leaf in replicas.items()}
        return {**self._inner.in_flight(), **kept}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        own = {k.removeprefix("replica/"): v for k, v in tensors.items() if _of_replica(k)}
        if self._replicas is not None:
            self._replicas = own
        self._inner.restore({k: v for k, v in tensors.items() if not _of_replica(k)})

    def _known(self, name: str, leaf: Tensor, sent: Sent) -> Tensor:
        """What others know of the rows here once this round's codes have arrived."""
        flat = leaf.view(len(leaf), -1)
        width = chunk_width(max(1, len(leaf)), leaf.element_size(), BLOCK)
        if self._replicas is None:
            known = torch.empty_like(flat)
            for begin in range(0, flat.shape[1], width):
                columns = slice(begin, begin + width)
                known[:, columns] = sent(flat[:, columns].contiguous(), begin)
            return known.view(leaf.shape)
        replica = self._replicas.setdefault(name, torch.zeros_like(leaf)).view(flat.shape)
        for begin in range(0, flat.shape[1], width):
            columns = slice(begin, begin + width)
            replica[:, columns] += sent(flat[:, columns] - replica[:, columns], begin)
        return replica.view(leaf.shape)

    def _check(self, round: int, graph: Graph) -> None:
        """Replicas are of use to those who have had every code since the first round."""
        if self._replicas is None:
            return
        if self._first is None:
            self._first = graph
        if not _same(self._first, graph):
            raise QuiverError(
                f"round {round}: the graph has changed, and a new neighbour has no replica of the "
                "others' models, to which CHOCO-SGD sends differences. Use a graph that stays as "
                'it is, without participation and link failures, or feedback = "remainder".'
            )


def coded_payload(
    compression: Compression, outbox: Message, mass: str | None, payload: Integers
) -> Integers:
    """Bytes of each row's message once its leaves are coded; the mass is sent whole."""
    saved = 0
    for name, leaf in outbox.items():
        numbers, element = leaf[0].numel() if len(leaf) else 0, leaf.element_size()
        if name != mass:
            saved += numbers * element - compression.bytes_of(numbers, element)
    return np.where(payload > 0, payload - saved, 0)


class Difference(Graph):
    """P - I: what moves, with what leaves its sender as negative weights."""

    def __post_init__(self) -> None:
        """Not a graph of shares, so not checked as one."""


def difference(graph: Graph) -> Difference:
    moves = sparse.csr_array(graph.sparse - sparse.eye_array(graph.clients, format="csr"))
    moves.eliminate_zeros()
    moves.sort_indices()
    return Difference(moves, graph.active)


def is_fixed(topology: Topology, rounds: int) -> bool:
    """Whether the graph is the same in the first rounds, whatever clients tell each other."""
    if topology.looks is not None:
        return False
    first = topology(0)
    return all(_same(first, topology(round)) for round in range(1, min(rounds, 8)))


def _same(first: Graph, second: Graph) -> bool:
    if first is second:
        return True
    if first.matrix.shape != second.matrix.shape:
        return False
    difference = sparse.csr_array(first.matrix - second.matrix)
    return not difference.count_nonzero() and bool((first.active == second.active).all())


def _of_replica(name: str) -> bool:
    return name.startswith("replica/")
