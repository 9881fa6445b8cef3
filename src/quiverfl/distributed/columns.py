"""mixed = P · messages where the rows are on several ranks: columns move twice.

Every rank has the rows of its own clients. A block of columns is distributed so that each rank has
*all* rows of some of them. It multiplies these as one process would, on the same chunks and so with
the same sums in the same order, and sends them back. While a block is multiplied, the next one is
on its way and the one before returns. Each rank sends 2 (R - 1) / R² of all messages, whatever the
graph is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quiverfl.distributed.ranks import Placement, Ranks, Transfer
from quiverfl.engine.exchange.matrix import NARROWEST, chunk_width, mix
from quiverfl.topologies.graph import Graph

BLOCK_BYTES = 16 << 20
"""Bytes of a rank's columns of a block. Three blocks are in memory at a time, sent and received."""


@dataclass(frozen=True, eq=False)
class Block:
    """Columns cuts[0] … cuts[R] - 1; rank r multiplies cuts[r] … cuts[r + 1] - 1."""

    cuts: Sequence[int]

    @property
    def widths(self) -> list[int]:
        return [end - begin for begin, end in zip(self.cuts, self.cuts[1:], strict=False)]


@dataclass(frozen=True, eq=False)
class Columns:
    """The product of a graph and messages, for the rows that are here."""

    ranks: Ranks
    placement: Placement

    def mix(self, graph: Graph, leaf: Tensor, multiple: int = NARROWEST) -> Tensor:
        """What `matrix.mix` computes, for the messages of this rank's clients, in their memory.

        Where all rows of the graph are equal the leaf has the messages of this rank's senders.
        """
        flat = leaf.view(len(leaf), math.prod(leaf.shape[1:]))
        if graph.one_row:
            row = self._common_row(graph, flat)
            return row.view(leaf.shape[1:]).expand(self._here, *leaf.shape[1:])
        width = chunk_width(graph.clients, leaf.element_size(), multiple)
        counts = self.placement.counts
        blocks = cut(flat.shape[1], width, sum(counts) * leaf.element_size(), self.ranks.size)
        returning: tuple[Block, Transfer, Tensor] | None = None
        for block, whole, sent in self._dealt(flat, counts, blocks):
            mixed = mix(graph, whole, multiple) if whole.numel() else whole
            back = self._return(block, mixed, sent, len(leaf))
            if returning is not None:
                self._unpack(flat, *returning)
            returning = (block, back, sent)
        if returning is not None:
            self._unpack(flat, *returning)
        return leaf

    def deal_columns(self, flat: Tensor, width: int) -> Iterator[tuple[Block, Tensor]]:
        """Blocks of columns, cut at multiples of a width, with all rows of this rank's columns."""
        counts = self.placement.counts
        blocks = cut(flat.shape[1], width, sum(counts) * flat.element_size(), self.ranks.size)
        for block, whole, _ in self._dealt(flat, counts, blocks):
            yield block, whole

    def sum_columns(
        self, flat: Tensor, width: int, work: Callable[[Tensor], Tensor], total: Tensor
    ) -> Tensor:
        """`total` + Σ work(all rows of `width` columns). Each rank computes some columns, and the
        results are added in the order of columns."""
        for block, whole in self.deal_columns(flat, width):
            cuts = block.cuts
            parts = total.new_zeros(-(-(cuts[-1] - cuts[0]) // width), *total.shape)
            first = (cuts[self.ranks.rank] - cuts[0]) // width
            for number, chunk in enumerate(torch.split(whole, width, 1) if whole.numel() else ()):
                parts[first + number] = work(chunk)
            for part in self.ranks.total(parts):
                total = total + part
        return total

    @property
    def _here(self) -> int:
        return self.placement.counts[self.ranks.rank]

    def _common_row(self, graph: Graph, flat: Tensor) -> Tensor:
        """The one sum that all clients receive. Each rank computes some of its columns."""
        counts = self.placement.count_per_rank(graph.senders)
        row = flat.new_empty(flat.shape[1])
        blocks = cut(flat.shape[1], NARROWEST, sum(counts) * flat.element_size(), self.ranks.size)
        for block, whole, _ in self._dealt(flat, counts, blocks):
            part = mix(graph, whole)[0] if whole.numel() else whole.view(-1)
            begin, end = block.cuts[0], block.cuts[-1]
            sent = [len(part)] * self.ranks.size
            copies = part.repeat(self.ranks.size)
            self.ranks.all_to_all(row[begin:end], copies, block.widths, sent).wait()
        return row

    def _dealt(
        self, flat: Tensor, counts: Sequence[int], blocks: Sequence[Block]
    ) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """(block, all rows of this rank's columns of it, what was sent), one block ahead."""
        coming = self._send(flat, counts, blocks[0]) if blocks else None
        for number, block in enumerate(blocks):
            assert coming is not None
            transfer, whole = coming
            following = number + 1 < len(blocks)
            coming = self._send(flat, counts, blocks[number + 1]) if following else None
            transfer.wait()
            yield block, whole, transfer.own

    def _send(self, flat: Tensor, counts: Sequence[int], block: Block) -> tuple[Transfer, Tensor]:
        widths = block.widths
        mine = widths[self.ranks.rank]
        sent = [len(flat) * width for width in widths]
        own = flat.new_empty(sum(sent))
        for part, into in zip(self._parts(flat, block), torch.split(own, sent), strict=True):
            into.view(part.shape).copy_(part)
        whole = flat.new_empty(sum(counts), mine)
        received = [count * mine for count in counts]
        return self.ranks.all_to_all(whole.view(-1), own, received, sent), whole

    def _return(self, block: Block, mixed: Tensor, into: Tensor, rows: int) -> Transfer:
        """Send columns back. What returns is as large as what was sent, and takes its memory."""
        mine = block.widths[self.ranks.rank]
        received = [rows * width for width in block.widths]
        sent = [count * mine for count in self.placement.counts]
        return self.ranks.all_to_all(into, mixed.view(-1), received, sent)

    def _unpack(self, flat: Tensor, block: Block, back: Transfer, into: Tensor) -> None:
        back.wait()
        sizes = [len(flat) * width for width in block.widths]
        for part, values in zip(self._parts(flat, block), torch.split(into, sizes), strict=True):
            part.copy_(values.view(part.shape))

    def _parts(self, flat: Tensor, block: Block) -> list[Tensor]:
        """This rank's rows of the columns that are for each rank."""
        return [flat[:, a:b] for a, b in zip(block.cuts, block.cuts[1:], strict=False)]


def cut(columns: int, width: int, column_bytes: int, ranks: int) -> list[Block]:
    """Blocks that divide the chunks of `width` columns evenly between ranks; no chunk is split."""
    chunks = -(-columns // width)
    each = max(1, BLOCK_BYTES // max(1, width * column_bytes))
    most = -(-chunks // max(1, -(-chunks // (each * ranks))))  # equal blocks, no small last one
    blocks = []
    for first in range(0, chunks, max(1, most)):
        count = min(most, chunks - first)
        cuts = [min(columns, (first + count * rank // ranks) * width) for rank in range(ranks + 1)]
        blocks.append(Block(cuts))
    return blocks
