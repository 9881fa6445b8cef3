"""Arrays that stay on disk: read piece by piece, or row by row, and not kept in memory.

Whatever looks at a whole array does it in pieces, so that it costs the same wherever it lies.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.memory import forget_pages

Values = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]

PIECE = 8 << 20
"""Bytes that are looked at together."""
LARGE = 64 << 20
"""Bytes from which on an array of a file stays there."""


class Rows:
    """Some rows of an array on disk, in this order and changed when they are read.

    It has what of an array is needed to read it in pieces, and is gone once it has been written
    to the cache.
    """

    def __init__(
        self,
        array: Values,
        rows: Integers | None = None,
        change: Callable[[Values], Values] = np.asarray,
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

    def __getitem__(self, which: slice | Integers) -> Values:
        found = self._change(np.asarray(self._array[self._rows[which]]))
        _forget(self._array)
        return found

    def some(self, which: Integers) -> Rows:
        """Fewer of them, still on disk."""
        return Rows(self._array, self._rows[which], self._change)

    def changed(self, change: Callable[[Values], Values]) -> Rows:
        before = self._change
        return Rows(self._array, self._rows, lambda part: change(before(part)))


def pieces(array: Any) -> Iterator[Values]:
    """The rows of an array a few at a time; pages of a file are forgotten behind it."""
    rows = max(1, PIECE // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield np.asarray(array[start : start + rows])
        _forget(array)


def rows_of(array: Any, which: Integers) -> Any:
    """Some rows: a copy, or still on disk."""
    return array.some(which) if isinstance(array, Rows) else array[which]


def map_behind(array: Any) -> mmap.mmap | None:
    """The map of the file that an array lies in, if it lies in one and cannot be written to."""
    if not isinstance(array, np.ndarray) or array.flags.writeable:
        return None
    found: Any = array
    while isinstance(found, np.ndarray):
        found = found.base
    if isinstance(found, memoryview):
        found = found.obj
    return found if isinstance(found, mmap.mmap) else None


def _forget(array: Any) -> None:
    found = map_behind(array)
    if found is not None:
        forget_pages(found)
