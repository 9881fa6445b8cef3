"""One client's message as the bytes that travel: what peers send, and what they go on from.

The codes of a message's leaves stand one after the other, in the order of their names. Coding and
decoding are pure functions of the message, the seed, the round and the client (`Origin`): whoever
sends the same message again sends the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quiverfl.transforms.codec import Malformed, decode, encode
from quiverfl.transforms.compression import Compression
from quiverfl.transforms.dither import Dither, Draws

Array = npt.NDArray[Any]
TYPES = {"f4": torch.float32, "f8": torch.float64}


class Origin(NamedTuple):
    """Whose message it is, and of which of its rounds: where draws come from."""

    client: int
    round: int


@dataclass(frozen=True)
class Coding:
    """How the clients of a run code: the same for all of them."""

    compression: Compression
    seed: int

    def bytes_of(self, sizes: Mapping[str, tuple[int, int]]) -> int:
        """Of a message of leaves of so many numbers, of so many bytes each."""
        return sum(self.compression.bytes_of(*size) for size in sizes.values())

    def coded(self, message: Mapping[str, Array], origin: Origin) -> bytes:
        parts = (
            encode(self.compression, _tensor(message[name]), self._draws(name, leaf.size, origin))
            for name, leaf in sorted(message.items())
        )
        return b"".join(parts)

    def decoded(
        self, code: bytes, kinds: Mapping[str, tuple[int, np.dtype[Any]]], origin: Origin
    ) -> dict[str, Array]:
        """Leaves of so many numbers of these types; whatever the bytes are, they or Malformed."""
        found, start = {}, 0
        for name, (numbers, kind) in sorted(kinds.items()):
            end = start + self.compression.bytes_of(numbers, kind.itemsize)
            draws = self._draws(name, numbers, origin)
            dtype = TYPES[kind.str[1:]]
            leaf = decode(self.compression, code[start:end], numbers, dtype, draws)
            found[name], start = leaf.numpy(), end
        if start != len(code):
            raise Malformed(f"a coded message has {len(code) - start} bytes too many.")
        return found

    def known(self, message: Mapping[str, Array], origin: Origin) -> dict[str, Array]:
        """What receivers know of a message: Q(u)."""
        kinds = {name: (leaf.size, leaf.dtype) for name, leaf in message.items()}
        flat = self.decoded(self.coded(message, origin), kinds, origin)
        return {name: flat[name].reshape(leaf.shape) for name, leaf in message.items()}

    def _draws(self, name: str, numbers: int, origin: Origin) -> Draws:
        return _dither(self.seed, origin.round).of(name, np.array([origin.client]), numbers)


@lru_cache(maxsize=2)
def _dither(seed: int, round: int) -> Dither:
    """Kept for the leaves of a message: its table is drawn once."""
    return Dither(seed, round)


def _tensor(leaf: Array) -> torch.Tensor:
    flat = np.ascontiguousarray(leaf).reshape(-1)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
