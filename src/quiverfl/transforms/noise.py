"""Gaussian numbers as a pure function of (seed, purpose, round, client, leaf, place)."""

from __future__ import annotations

import hashlib
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
    secret: bytes = b""
    """Where others know the seed, which must not tell them the noise: then this is drawn from."""

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
        bits = (
            self._secret_bits(name, client, len(places))
            if self.secret
            else hashed(self.seed, f"{self.purpose} {name}", self.round, client, places)
        )
        first = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        second = ((bits & np.uint64(0xFFFFFFFF)).astype(np.float64) + 0.5) * 2.0**-32
        radius, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
        both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return both.reshape(-1)[:numbers]

    def _secret_bits(self, name: str, client: int, count: int) -> npt.NDArray[np.uint64]:
        """Nobody can tell these from chance who does not have the secret."""
        text = repr((self.purpose, name, int(self.round), client)).encode()
        drawn = hashlib.shake_256(self.secret + b"\0" + text).digest(8 * count)
        return np.frombuffer(drawn, dtype="<u8").astype(np.uint64)
