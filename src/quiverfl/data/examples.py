"""The examples of all clients end to end in memory, or in files that are read piece by piece.

Nothing is padded however unequal the clients are, and a batch of any clients is one gather.
Everything that reads a whole array reads it in pieces, so that it costs the same on disk.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quiverfl.support.environment import forget_pages
from quiverfl.trees import Tree, first_leaf, tree_map
from quiverfl.types import AnyArray, Integers


@dataclass(frozen=True, eq=False)
class ClientExamples:
    """Examples of all clients end to end: client i owns rows offsets[i]:offsets[i + 1].

    Where inputs were left where they lie, `places` says in which row of `x` each of these is, and
    `files` are the maps of the files behind `x`.
    """

    x: Tree
    y: Tree
    offsets: Integers
    rows: Integers | None = None
    files: tuple[mmap.mmap, ...] = ()

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Integers:
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """Number of examples of the largest client."""
        return int(self.sizes.max(initial=0))

    def of_client(self, client: int) -> tuple[Tree, Tree]:
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        where: Any = rows if self.rows is None else torch.from_numpy(self.rows[rows])
        return tree_map(lambda leaf: leaf[where], self.x), tree_map(lambda leaf: leaf[rows], self.y)

    def select(self, clients: Sequence[int]) -> ClientExamples:
        """The same examples for some of the clients, renumbered from 0."""
        if self.rows is None:
            return concatenate_clients([self.of_client(client) for client in clients])
        spans = [np.arange(self.offsets[c], self.offsets[c + 1]) for c in clients]
        rows = np.concatenate(spans)
        offsets = np.cumsum([0, *(len(span) for span in spans)]).astype(np.int64)
        y = tree_map(lambda leaf: leaf[torch.from_numpy(rows)], self.y)
        return replace(self, y=y, offsets=offsets, rows=self.rows[rows])


def concatenate_clients(parts: Sequence[tuple[Tree, Tree]]) -> ClientExamples:
    sizes = [len(first_leaf(y)) for _, y in parts]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    x, y = (tree_map(lambda *rows: torch.cat(rows), *trees) for trees in zip(*parts, strict=True))
    return ClientExamples(x, y, offsets)


PIECE = 8 << 20
"""Bytes that are read together."""
LARGE = 64 << 20
"""Arrays of at least so many bytes stay in their file."""


class DiskRows:
    """Some rows of an array on disk, in this order, converted when they are read.

    It offers only what reading in pieces needs, and lives until it is written to the cache.
    """

    def __init__(
        self,
        array: AnyArray,
        rows: Integers | None = None,
        change: Callable[[AnyArray], AnyArray] = np.asarray,
    ) -> None:
        self._array, self._change = array, change
        self._rows = np.arange(len(array)) if rows is None else rows
        first = change(np.asarray(array[:1]))
        self.dtype, self._sides = first.dtype, first.shape[1:]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._sides)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __getitem__(self, which: slice | Integers) -> AnyArray:
        values = self._change(np.asarray(self._array[self._rows[which]]))
        _forget_pages(self._array)
        return values

    def select(self, which: Integers) -> DiskRows:
        """Fewer rows, still on disk."""
        return DiskRows(self._array, self._rows[which], self._change)

    def with_change(self, change: Callable[[AnyArray], AnyArray]) -> DiskRows:
        before = self._change
        return DiskRows(self._array, self._rows, lambda part: change(before(part)))


def iterate_pieces(array: Any) -> Iterator[AnyArray]:
    """Yield the rows of an array a few at a time; a file's pages are released after use."""
    rows = max(1, PIECE // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield np.asarray(array[start : start + rows])
        _forget_pages(array)


def select_rows(array: Any, which: Integers) -> Any:
    """Select rows: a copy, or rows that stay on disk."""
    return array.select(which) if isinstance(array, DiskRows) else array[which]


def find_memory_map(array: Any) -> mmap.mmap | None:
    """The memory map behind a read-only array, if there is one."""
    if not isinstance(array, np.ndarray) or array.flags.writeable:
        return None
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    return owner if isinstance(owner, mmap.mmap) else None


def _forget_pages(array: Any) -> None:
    memory_map = find_memory_map(array)
    if memory_map is not None:
        forget_pages(memory_map)
