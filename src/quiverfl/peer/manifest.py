"""What a share looks like in bytes: agreed once, never read from what arrives.

A payload is the raw little-endian buffers of the leaves, end to end; or, for a method that has
`payload` since its messages are smaller than their tensors, their non-zero numbers (packing.py).
Names, shapes and types come from the manifest both sides have agreed on by its hash, so a personal
part, which is not in it, cannot leave, and a received shape is never trusted.
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

from quiverfl.engine.shares import Array as Array
from quiverfl.engine.shares import Leaves as Leaves
from quiverfl.engine.shares import added as added
from quiverfl.engine.shares import scaled as scaled
from quiverfl.errors import QuiverError
from quiverfl.peer.packing import packed, unpacked

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
    sparse: bool = False

    @classmethod
    def of(
        cls,
        message: Mapping[str, Array],
        parameters: Sequence[tuple[str, tuple[int, ...]]] = (),
        sparse: bool = False,
    ) -> Manifest:
        leaves = []
        for name in sorted(message):
            kind = message[name].dtype.newbyteorder("<").str
            if kind not in TYPES:
                raise QuiverError(
                    f"the message's leaf {name!r} has type {kind}; peers send float32 or float64."
                )
            leaves.append(Leaf(name, kind, tuple(message[name].shape)))
        named = tuple((name, tuple(shape)) for name, shape in parameters)
        return cls(tuple(leaves), named, sparse)

    @cached_property
    def nbytes(self) -> int:
        """Of a message that is sent whole."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def allows(self, nbytes: int) -> bool:
        """Whether a payload may be of this size."""
        if not self.sparse:
            return nbytes == self.nbytes
        return nbytes <= self.nbytes + len(self.leaves)  # a byte each says how a leaf is written

    @cached_property
    def hash(self) -> str:
        content = [[leaf.name, leaf.type, leaf.shape] for leaf in self.leaves]
        form = {"sparse": True} if self.sparse else {}
        return canonical_hash({"leaves": content, "parameters": self.parameters, **form})

    def pack(self, message: Mapping[str, Array]) -> bytes:
        if sorted(message) != [leaf.name for leaf in self.leaves]:
            raise QuiverError(f"a message of {sorted(message)} does not fit the manifest.")
        arrays = (np.ascontiguousarray(message[leaf.name], dtype=leaf.type) for leaf in self.leaves)
        if self.sparse:
            return packed([array.reshape(-1) for array in arrays])
        return b"".join(array.tobytes() for array in arrays)

    def unpack(self, payload: bytes | bytearray | memoryview) -> Leaves:
        """A message that was packed, or a QuiverError."""
        if not self.sparse:
            return self.unpack_whole(payload)
        kinds = [(np.dtype(leaf.type), leaf.size) for leaf in self.leaves]
        flat = unpacked(payload, kinds)
        return {
            leaf.name: array.reshape(leaf.shape)
            for leaf, array in zip(self.leaves, flat, strict=True)
        }

    def unpack_whole(self, payload: bytes | bytearray | memoryview) -> Leaves:
        """Read-only views into the payload of a message that was sent whole."""
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
