"""Gaussian numbers as a pure function of (seed, purpose, round, client, leaf, place)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.seeds import hashed

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Noise:
    """Of one round, for rows that are these clients'."""

    seed: int
    purpose: str
    round: int
    clients: Integers

    def again(self, count: int) -> Noise:
        """Other numbers for the same place and time; the same ones for count 0."""
        return self if not count else replace(self, purpose=f"{self.purpose} again {count}")

    def like(self, name: str, leaf: Tensor) -> Tensor:
        """One standard normal number for every place of a leaf; others for every name."""
        count = int(np.prod(leaf.shape[1:], dtype=np.int64))
        rows = [torch.from_numpy(self._row(name, int(c), count)) for c in self.clients]
        return torch.stack(rows).to(leaf).view(leaf.shape) if rows else torch.zeros_like(leaf)

    def _row(self, name: str, client: int, numbers: int) -> npt.NDArray[np.float64]:
        """Box and Muller's of hashed numbers, so that no library's generator decides the bits."""
        places = np.arange(-(-numbers // 2))
        bits = hashed(self.seed, f"{self.purpose} {name}", self.round, client, places)
        first = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        second = ((bits & np.uint64(0xFFFFFFFF)).astype(np.float64) + 0.5) * 2.0**-32
        radius, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
        both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return both.reshape(-1)[:numbers]
