"""Random numbers of messages: Gaussian noise, and uniform dither for rounding and choosing.

All are pure functions of the seed, the round, the client, the leaf and the place in it.

A round has one table of dither. A client reads row (client + turn) of it for a block, where the
turn is hashed from the leaf and the block: no two of up to 1,024 clients read the same row for the
same block. So dither for a thousand clients costs as much as for one, and every rank or peer
that knows the seed, such as the receiver of a random choice, reads the same numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.seeds import key_hashes, stream
from quiverfl.types import Integers


@dataclass(frozen=True, eq=False)
class Noise:
    """Gaussian noise of one round, for rows of these clients."""

    seed: int
    purpose: str
    round: int
    clients: Integers
    secret: bytes = b""
    """Noise is drawn from it if others know the seed, as the seed must not reveal the noise."""

    def with_count(self, count: int) -> Noise:
        """Other numbers for the same round and clients; the same ones for count 0."""
        return self if not count else replace(self, purpose=f"{self.purpose} again {count}")

    def draw_like(self, name: str, leaf: Tensor) -> Tensor:
        """A standard normal number for every element of a leaf; leaves of another name differ."""
        count = int(np.prod(leaf.shape[1:], dtype=np.int64))
        rows = [torch.from_numpy(self._row(name, int(c), count)) for c in self.clients]
        return torch.stack(rows).to(leaf).view(leaf.shape) if rows else torch.zeros_like(leaf)

    def _row(self, name: str, client: int, numbers: int) -> npt.NDArray[np.float64]:
        """Box and Muller's method on hashes, so that no library's generator decides the bits."""
        places = np.arange(-(-numbers // 2))
        bits = (
            self._secret_bits(name, client, len(places))
            if self.secret
            else key_hashes(self.seed, f"{self.purpose} {name}", self.round, client, places)
        )
        first = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        second = ((bits & np.uint64(0xFFFFFFFF)).astype(np.float64) + 0.5) * 2.0**-32
        radius, angle = np.sqrt(-2 * np.log(first)), 2 * math.pi * second
        both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
        return both.reshape(-1)[:numbers]

    def _secret_bits(self, name: str, client: int, count: int) -> npt.NDArray[np.uint64]:
        """Bits that cannot be told from chance without the secret."""
        text = repr((self.purpose, name, int(self.round), client)).encode()
        digest = hashlib.shake_256(self.secret + b"\0" + text).digest(8 * count)
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def message_norms(message: Mapping[str, Tensor]) -> Tensor:
    """The norm of every row, over all leaves together."""
    squares = [leaf.flatten(1).double().square().sum(dim=1) for leaf in message.values()]
    return torch.stack(squares).sum(dim=0).sqrt()


def expand_rows(numbers: Tensor, leaf: Tensor) -> Tensor:
    """One number per row, in the type and shape to multiply a leaf."""
    return numbers.to(leaf.dtype).view(-1, *(1 for _ in leaf.shape[1:]))


BLOCK = 96
"""Numbers of a leaf that are coded together, a multiple of the narrowest chunk of mixing."""
ROWS = 1024
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Dither:
    """Uniform numbers of a round, in (0, 1): odd multiples of 2⁻¹⁷, which float32 adds exactly."""

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

    def for_leaf(self, leaf: str, clients: Integers, numbers: int) -> ClientDither:
        """The dither of these clients for a leaf of this many numbers."""
        groups, own = np.unique(clients // ROWS, return_inverse=True)
        blocks = np.arange(-(-numbers // BLOCK))
        hashes = key_hashes(self.seed, f"dither {leaf}", self.round, blocks[:, None], groups)
        turns = (hashes % np.uint64(ROWS)).astype(np.int64)
        return ClientDither(self, turns, own, clients % ROWS)


@dataclass(frozen=True, eq=False)
class ClientDither:
    """The dither of some clients for one leaf: turns[block, group of clients], and every client's
    group and number in it. A group has 1,024 clients."""

    round: Dither
    turns: Integers
    groups: Integers
    numbers: Integers

    def take_blocks(self, first: int, count: int) -> Tensor:
        """[clients, count, BLOCK] for `count` blocks from block `first`."""
        table = self.round.table
        if count == 1 and self._together:  # a view: what matters where there are many clients
            begin = int(self.turns[first, 0] + self.numbers[0])
            return table[begin : begin + len(self.numbers)].unsqueeze(1)
        rows = self.turns[first : first + count, self.groups].T + self.numbers[:, None]
        index = torch.from_numpy(rows.reshape(-1)).to(table.device)
        return table.index_select(0, index).view(len(self.numbers), count, BLOCK)

    @cached_property
    def _together(self) -> bool:
        return self.turns.shape[1] == 1 and bool((np.diff(self.numbers) == 1).all())
