"""What a share looks like in bytes: agreed once, never read from what arrives.

A payload is the raw little-endian buffers of the leaves, end to end. Names, shapes and types come
from the manifest both sides have agreed on by its hash, so a personal part, which is not in it,
cannot leave, and a received shape is never trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError

Array = npt.NDArray[Any]
Leaves = dict[str, Array]

TYPES = ("<f4", "<f8")


@dataclass(frozen=True)
class Leaf:
    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * int(self.type[-1])


@dataclass(frozen=True)
class Manifest:
    """The leaves of a message in order, and the names of the parameters inside them."""

    leaves: tuple[Leaf, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(
        cls, message: Mapping[str, Array], parameters: Sequence[tuple[str, tuple[int, ...]]] = ()
    ) -> Manifest:
        leaves = []
        for name in sorted(message):
            kind = message[name].dtype.newbyteorder("<").str
            if kind not in TYPES:
                raise QuiverError(
                    f"the message's leaf {name!r} has type {kind}; peers send float32 or float64."
                )
            leaves.append(Leaf(name, kind, tuple(message[name].shape)))
        return cls(tuple(leaves), tuple((name, tuple(shape)) for name, shape in parameters))

    @cached_property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @cached_property
    def hash(self) -> str:
        content = [[leaf.name, leaf.type, leaf.shape] for leaf in self.leaves]
        return canonical_hash({"leaves": content, "parameters": self.parameters})

    def pack(self, message: Mapping[str, Array]) -> bytes:
        if sorted(message) != [leaf.name for leaf in self.leaves]:
            raise QuiverError(f"a message of {sorted(message)} does not fit the manifest.")
        return b"".join(
            np.ascontiguousarray(message[leaf.name], dtype=leaf.type).tobytes()
            for leaf in self.leaves
        )

    def unpack(self, payload: bytes | bytearray | memoryview) -> Leaves:
        """Read-only views into the payload."""
        if len(payload) != self.nbytes:
            raise QuiverError(
                f"a payload of {len(payload)} bytes, the manifest says {self.nbytes}."
            )
        message, start = {}, 0
        for leaf in self.leaves:
            flat = np.frombuffer(payload, dtype=leaf.type, count=leaf.size, offset=start)
            message[leaf.name] = flat.reshape(leaf.shape)
            start += leaf.nbytes
        return message


def canonical_hash(value: Any) -> str:
    """sha256 of a value written as JSON in one way only."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def scaled(message: Mapping[str, Array], numerator: int, denominator: int) -> Leaves:
    """A share of a message, in the message's own type."""
    return {
        name: np.multiply(leaf, leaf.dtype.type(numerator / denominator))
        for name, leaf in message.items()
    }


def added(own: Mapping[str, Array], shares: Sequence[Mapping[str, Array]]) -> Leaves:
    """Own share plus the others', in the given order."""
    result = {name: np.array(leaf) for name, leaf in own.items()}
    for share in shares:
        for name, leaf in result.items():
            np.add(leaf, share[name], out=leaf)
    return result


def total(message: Mapping[str, Array]) -> float:
    """The sum of all numbers in float64: one figure that mixing must not change."""
    return math.fsum(float(leaf.sum(dtype=np.float64)) for leaf in message.values())


def magnitude(message: Mapping[str, Array]) -> float:
    """The sum of all magnitudes: what a rounding error is measured against."""
    return math.fsum(float(np.abs(leaf).sum(dtype=np.float64)) for leaf in message.values())


def norm(message: Mapping[str, Array]) -> float:
    squares = (float(np.square(leaf, dtype=np.float64).sum()) for leaf in message.values())
    return math.sqrt(math.fsum(squares))


def largest(message: Mapping[str, Array]) -> float:
    """The largest magnitude; not finite if any number is not."""
    ends = [
        float(end) for leaf in message.values() if leaf.size for end in (leaf.max(), leaf.min())
    ]
    return math.nan if any(math.isnan(end) for end in ends) else max(map(abs, ends), default=0.0)


def finite(message: Mapping[str, Array]) -> bool:
    return math.isfinite(largest(message))
