"""Uniform numbers for rounding and choosing: a pure function of (seed, round, leaf, client, place).

One table is drawn for a round. A client reads row (client + turn) of it for a block, where the turn
is hashed from the leaf and the block: no two of up to 1,024 clients read the same row for the same
block. So noise for a thousand clients costs as much as for one, and whoever knows the seed
(another rank, a peer, the receiver of a random choice) reads the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.seeds import hashed, stream

BLOCK = 96
"""Numbers of a leaf that are coded together: a multiple of what mixing multiplies at a time."""
ROWS = 1024
CPU = torch.device("cpu")

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Dither:
    """The numbers of one round, in (0, 1): odd multiples of 2⁻¹⁷, which float32 adds exactly."""

    seed: int
    round: int
    device: torch.device = CPU

    @cached_property
    def integers(self) -> npt.NDArray[np.uint16]:
        """[ROWS, BLOCK]: n stands for (n + ½) / 65536."""
        raw = stream(self.seed, "dither", self.round).bit_generator.random_raw(ROWS * BLOCK // 4)
        return np.asarray(raw).astype("<u8").view("<u2").astype(np.uint16).reshape(ROWS, BLOCK)

    @cached_property
    def table(self) -> Tensor:
        """[2 · ROWS, BLOCK], the rows twice, so that a turn never runs over the end."""
        once = torch.from_numpy((self.integers.astype(np.float32) + 0.5) / 65536)
        return torch.cat([once, once]).to(self.device)

    def of(self, leaf: str, clients: Integers, numbers: int) -> Draws:
        """What these clients draw for a leaf of so many numbers."""
        groups, own = np.unique(clients // ROWS, return_inverse=True)
        blocks = np.arange(-(-numbers // BLOCK))
        found = hashed(self.seed, f"dither {leaf}", self.round, blocks[:, None], groups)
        turns = (found % np.uint64(ROWS)).astype(np.int64)
        return Draws(self, turns, own, clients % ROWS)


@dataclass(frozen=True, eq=False)
class Draws:
    """turns[block, group of a thousand clients]; clients by group and by place in it."""

    dither: Dither
    turns: Integers
    groups: Integers
    places: Integers

    def at(self, first: int, count: int) -> Tensor:
        """[clients, count, BLOCK] for `count` blocks from block `first`."""
        table = self.dither.table
        if count == 1 and self._together:  # a view: what matters where there are many clients
            begin = int(self.turns[first, 0] + self.places[0])
            return table[begin : begin + len(self.places)].unsqueeze(1)
        rows = self.turns[first : first + count, self.groups].T + self.places[:, None]
        index = torch.from_numpy(rows.reshape(-1)).to(table.device)
        return table.index_select(0, index).view(len(self.places), count, BLOCK)

    @cached_property
    def _together(self) -> bool:
        return self.turns.shape[1] == 1 and bool((np.diff(self.places) == 1).all())
