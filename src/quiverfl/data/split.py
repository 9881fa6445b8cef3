"""The examples of all clients, laid end to end.

So nothing is padded however unequal the clients are, and a batch of any clients is one gather.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quiverfl.data.dataset import Integers
from quiverfl.trees import Tree, first_leaf, mapped


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of all clients end to end: client i owns rows offsets[i]:offsets[i + 1].

    Where inputs were left where they lie, `places` says in which row of `x` each of these is, and
    `files` are the maps of the files behind `x`.
    """

    x: Tree
    y: Tree
    offsets: Integers
    places: Integers | None = None
    files: tuple[mmap.mmap, ...] = ()

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Integers:
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """How many examples the largest client has."""
        return int(self.sizes.max(initial=0))

    def of(self, client: int) -> tuple[Tree, Tree]:
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        where: Any = rows if self.places is None else torch.from_numpy(self.places[rows])
        return mapped(lambda leaf: leaf[where], self.x), mapped(lambda leaf: leaf[rows], self.y)

    def only(self, clients: Sequence[int]) -> Split:
        """The same examples for some of the clients, renumbered from 0."""
        if self.places is None:
            return joined([self.of(client) for client in clients])
        spans = [np.arange(self.offsets[c], self.offsets[c + 1]) for c in clients]
        rows = np.concatenate(spans)
        offsets = np.cumsum([0, *(len(span) for span in spans)]).astype(np.int64)
        y = mapped(lambda leaf: leaf[torch.from_numpy(rows)], self.y)
        return replace(self, y=y, offsets=offsets, places=self.places[rows])


def joined(parts: Sequence[tuple[Tree, Tree]]) -> Split:
    sizes = [len(first_leaf(y)) for _, y in parts]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    x, y = (mapped(lambda *rows: torch.cat(rows), *trees) for trees in zip(*parts, strict=True))
    return Split(x, y, offsets)
