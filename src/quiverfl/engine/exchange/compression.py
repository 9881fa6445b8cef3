"""The stage of compression: coded messages travel, and the rest is kept.

    remainder   u' = u - Q(u) + Σ P · Q(u): what is not sent stays with its sender, so that Σu is
                what it was wherever the columns of P sum to 1. The mass is sent as it is.
    replica     x̂ ← x̂ + Q(x - x̂), x' = x + γ (Σ P · x̂ - x̂): CHOCO-SGD. Neighbours keep x̂, so they
                must be the same in every round.

Both are u' = u + γ (P - I) · k with k as receivers know it: Q(u) or x̂.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from quiverfl.engine.exchange.exchange import MessageStage
from quiverfl.engine.exchange.matrix import MatrixProduct, Transmit, chunk_width
from quiverfl.engine.exchange.quantized import ColumnCode, mix_coded
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import TOLERANCE, Graph
from quiverfl.topologies.topology import Topology, count_uploads, own_weights
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.noise import BLOCK, Dither
from quiverfl.types import Flags, Integers

REPLICA = "replica/"


class CompressionStage(MessageStage):
    """Sends codes of every leaf but the mass; `ids` are the clients of the rows here.

    Where nothing is late, (P - I) · k is added before the core sums the rest; with `fused`, in one
    process, coding and mixing are one pass over the columns.
    """

    def __init__(
        self,
        core: MatrixProduct,
        compression: Compression,
        seed: int,
        ids: Integers,
        mass: str | None,
        replica: bool,
        fused: bool,
    ) -> None:
        self._core, self._seed = core, seed
        self._compression = compression.for_replicas() if replica else compression
        self._ids, self._mass = ids, mass
        self._fused = fused and not replica
        self._replicas: Message | None = {} if replica else None
        self._step = (compression.step or compression.replica_step()) if replica else 1.0
        self._rest: Message = {}
        self._first: Graph | None = None

    def coded_sizes(self, outbox: Message, sizes: Integers) -> Integers:
        return count_coded_bytes(self._compression, outbox, self._mass, sizes)

    def before(self, round: int, graph: Graph, outbox: Message) -> tuple[Graph, Message]:
        self._check_graph(round, graph)
        leaves = {name: leaf for name, leaf in outbox.items() if name != self._mass}
        sent = {name: leaf for name, leaf in outbox.items() if name == self._mass}
        self._rest = {}
        device = next((leaf.device for leaf in leaves.values()), torch.device("cpu"))
        dither = Dither(self._seed, round, device)
        in_core = graph.one_row or bool(self._core.delay)
        moves = None if in_core else subtract_identity(graph)
        silent = np.flatnonzero(keeps_all(graph)[self._ids])
        for name, leaf in leaves.items():
            own = dither.for_leaf(name, self._ids, leaf[0].numel() if len(leaf) else 0)
            code = ColumnCode(self._compression, own, silent)
            if self._fused and moves is not None:
                self._rest[name] = mix_coded(moves, leaf, code) if moves.matrix.nnz else leaf
                continue
            known = self._update_known(name, leaf, code.transmit)
            if moves is not None:
                self._rest[name] = self._add_moves(moves, leaf, known)
            else:
                self._rest[name] = leaf.sub_(known, alpha=self._step)
                sent[name] = known.clone() if self._replicas is not None else known
        return graph, sent

    def _add_moves(self, moves: Graph, leaf: Tensor, known: Tensor) -> Tensor:
        """leaf + γ (P - I) · known."""
        if not moves.matrix.nnz:
            return leaf
        known = known.clone() if self._replicas is not None else known
        return leaf.add_(self._core.product(moves, known), alpha=self._step)

    def after(self, round: int, graph: Graph, mixed: Message) -> Message:
        for name, rest in self._rest.items():
            arrived = mixed.get(name)
            mixed[name] = rest if arrived is None else rest.add_(arrived, alpha=self._step)
        self._rest = {}
        return mixed

    def tensors(self) -> dict[str, Tensor]:
        return {f"{REPLICA}{name}": leaf for name, leaf in (self._replicas or {}).items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if self._replicas is not None:
            names = [name for name in tensors if name.startswith(REPLICA)]
            self._replicas = {name.removeprefix(REPLICA): tensors[name] for name in names}

    def _update_known(self, name: str, leaf: Tensor, transmit: Transmit) -> Tensor:
        """The value that receivers hold for each row here once this round's codes have arrived."""
        flat = leaf.view(len(leaf), -1)
        width = chunk_width(max(1, len(leaf)), leaf.element_size(), BLOCK)
        if self._replicas is None:
            known = torch.empty_like(flat)
            for begin in range(0, flat.shape[1], width):
                columns = slice(begin, begin + width)
                known[:, columns] = transmit(flat[:, columns].contiguous(), begin)
            return known.view(leaf.shape)
        replica = self._replicas.setdefault(name, torch.zeros_like(leaf)).view(flat.shape)
        for begin in range(0, flat.shape[1], width):
            columns = slice(begin, begin + width)
            replica[:, columns] += transmit(flat[:, columns] - replica[:, columns], begin)
        return replica.view(leaf.shape)

    def _check_graph(self, round: int, graph: Graph) -> None:
        """Refuse a graph that changes: a new neighbour has no replica."""
        if self._replicas is None:
            return
        if self._first is None:
            self._first = graph
        if not _is_same_graph(self._first, graph):
            raise QuiverError(
                f"round {round}: the graph has changed, and a new neighbour has no replica of the "
                "others' models, to which CHOCO-SGD sends differences. Use a graph that stays as "
                'it is, without participation and link failures, or feedback = "remainder".'
            )


def count_coded_bytes(
    compression: Compression, outbox: Message, mass: str | None, sizes: Integers
) -> Integers:
    """Bytes of each row's message with coded leaves; the mass is sent as it is."""
    saved = 0
    for name, leaf in outbox.items():
        numbers, element = leaf[0].numel() if len(leaf) else 0, leaf.element_size()
        if name != mass:
            saved += numbers * element - compression.coded_bytes(numbers, element)
    return np.where(sizes > 0, sizes - saved, 0)


def keeps_all(graph: Graph) -> Flags:
    """Clients whose whole message stays with them: they keep every bit of it, uncoded.

    A client that merely has no receivers may still give its own message up for what it receives,
    as on `random_pull`; then it gives up its code, as all clients do.
    """
    keeps: Flags = (count_uploads(graph) == 0) & (own_weights(graph) >= 1 - TOLERANCE)
    return keeps


class Difference(Graph):
    """P - I: what moves, with what leaves its sender as negative weights."""

    def __post_init__(self) -> None:
        """It is no graph of shares, so it is not checked as one."""


def subtract_identity(graph: Graph) -> Difference:
    """P - I of a graph."""
    moves = sparse.csr_array(graph.sparse - sparse.eye_array(graph.clients, format="csr"))
    moves.eliminate_zeros()
    moves.sort_indices()
    return Difference(moves, graph.active)


def is_fixed(topology: Topology, rounds: int) -> bool:
    """Whether the graph is the same in the first rounds and does not depend on reports."""
    if topology.reports is not None:
        return False
    first = topology(0)
    return all(_is_same_graph(first, topology(round)) for round in range(1, min(rounds, 8)))


def _is_same_graph(first: Graph, second: Graph) -> bool:
    if first is second:
        return True
    if first.matrix.shape != second.matrix.shape:
        return False
    changes = sparse.csr_array(first.matrix - second.matrix)
    return not changes.count_nonzero() and bool((first.active == second.active).all())
