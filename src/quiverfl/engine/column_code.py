"""What receivers decode of some columns of all clients' messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.transforms.compression import Compression
from quiverfl.transforms.dither import BLOCK, Draws

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ColumnCode:
    """How one leaf is coded in one round; `silent` are the rows of which nothing is sent."""

    compression: Compression
    draws: Draws
    silent: Integers

    def sent(self, rows: Tensor, begin: int) -> Tensor:
        """What is decoded of columns [clients, width] from column `begin`; a new tensor."""
        found = code_columns(self.compression, self.draws, rows, begin)
        return found.index_fill_(0, self._silent, 0.0) if len(self.silent) else found

    @cached_property
    def _silent(self) -> Tensor:
        return torch.from_numpy(self.silent).to(self.draws.dither.device)


def code_columns(compression: Compression, draws: Draws, rows: Tensor, begin: int) -> Tensor:
    """What a receiver decodes of columns [clients, width] that begin with a block."""
    blocks, rest = divmod(rows.shape[1], BLOCK)
    cut = blocks * BLOCK
    parts = []
    for first, columns, width in ((0, rows[:, :cut], BLOCK), (blocks, rows[:, cut:], rest)):
        count = columns.shape[1] // width if width else 0
        if count:
            split = columns.view(len(rows), count, width)
            place = begin // BLOCK + first
            noise = draws.at(place, count)[..., :width] if compression.draws else split
            parts.append(compression.sent(split, noise).flatten(1))
    if not parts:
        return rows.clone()
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
