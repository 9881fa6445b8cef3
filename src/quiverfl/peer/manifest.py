"""What a share looks like in bytes: agreed once, never read from what arrives.

A payload is the raw little-endian buffers of the leaves, end to end; or, for a method that has
`payload` since its messages are smaller than their tensors, their non-zero numbers (packing.py).
Where the run compresses, it is a byte that says which: WHOLE and the raw buffers, or CODED, the
share's part of the message (a double, little-endian) and the codes of the leaves. Where the
topology looks, what the sender tells of itself goes before that, float32 numbers.
Names, shapes and types come from the manifest both sides have agreed on by its hash, so a personal
part, which is not in it, cannot leave, and a received shape is never trusted.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from quiverfl.engine.shares import Array as Array
from quiverfl.engine.shares import Leaves as Leaves
from quiverfl.engine.shares import added as added
from quiverfl.engine.shares import parted
from quiverfl.engine.shares import scaled as scaled
from quiverfl.errors import QuiverError
from quiverfl.peer.packing import packed, unpacked
from quiverfl.transforms.coding import Coding, Origin

TYPES = ("<f4", "<f8")
WHOLE, CODED = b"\0", b"\1"
_PART = struct.Struct("<d")
TOLD = np.dtype("<f4")


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
    coding: Coding | None = None
    told: int = 0
    """How many numbers a sender tells of itself beside the message."""

    @classmethod
    def of(
        cls,
        message: Mapping[str, Array],
        parameters: Sequence[tuple[str, tuple[int, ...]]] = (),
        sparse: bool = False,
        coding: Coding | None = None,
        told: int = 0,
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
        return cls(tuple(leaves), named, sparse, coding, told)

    @cached_property
    def nbytes(self) -> int:
        """Of a message that is sent whole."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def allows(self, nbytes: int) -> bool:
        """Whether a payload may be of this size."""
        nbytes -= TOLD.itemsize * self.told
        if self.coding is not None:
            return nbytes in (1 + self.nbytes, 1 + self._coded_nbytes(self.coding))
        if not self.sparse:
            return nbytes == self.nbytes
        return nbytes <= self.nbytes + len(self.leaves)  # a byte each says how a leaf is written

    def _coded_nbytes(self, coding: Coding) -> int:
        sizes = {leaf.name: (leaf.size, int(leaf.type[-1])) for leaf in self.leaves}
        return _PART.size + coding.bytes_of(sizes)

    @cached_property
    def hash(self) -> str:
        content = [[leaf.name, leaf.type, leaf.shape] for leaf in self.leaves]
        form: dict[str, Any] = {"sparse": True} if self.sparse else {}
        if self.coding is not None:
            form["coding"] = [self.coding.compression.name, self._coded_nbytes(self.coding)]
        form |= {"told": self.told} if self.told else {}
        return canonical_hash({"leaves": content, "parameters": self.parameters, **form})

    def pack(self, message: Mapping[str, Array]) -> bytes:
        if sorted(message) != [leaf.name for leaf in self.leaves]:
            raise QuiverError(f"a message of {sorted(message)} does not fit the manifest.")
        arrays = (np.ascontiguousarray(message[leaf.name], dtype=leaf.type) for leaf in self.leaves)
        if self.sparse:
            return packed([array.reshape(-1) for array in arrays])
        head = b"" if self.coding is None else WHOLE
        return head + b"".join(array.tobytes() for array in arrays)

    def unpack(
        self, payload: bytes | bytearray | memoryview, origin: Origin | None = None
    ) -> Leaves:
        """A message that was packed, or a QuiverError; where it is coded, `origin` is needed."""
        payload = memoryview(payload)[TOLD.itemsize * self.told :]
        if self.coding is not None:
            return self._decoded(self.coding, bytes(payload), origin)
        if not self.sparse:
            return self.unpack_whole(payload)
        kinds = [(np.dtype(leaf.type), leaf.size) for leaf in self.leaves]
        flat = unpacked(payload, kinds)
        return {
            leaf.name: array.reshape(leaf.shape)
            for leaf, array in zip(self.leaves, flat, strict=True)
        }

    def telling(self, numbers: Array | None = None) -> bytes:
        """What goes before a packed message; nothing is known without numbers."""
        if numbers is None:
            numbers = np.full(self.told, np.nan)
        return np.asarray(numbers, dtype=TOLD).tobytes()

    def told_by(self, payload: bytes | bytearray | memoryview) -> Array:
        """What a sender says of itself."""
        return np.frombuffer(payload, dtype=TOLD, count=self.told).copy()

    def _decoded(self, coding: Coding, payload: bytes, origin: Origin | None) -> Leaves:
        way, content = payload[:1], payload[1:]
        if way == WHOLE:
            return self.unpack_whole(content)
        if way != CODED or origin is None or len(content) < _PART.size:
            raise QuiverError(f"a payload is neither whole nor coded: it begins with {way!r}.")
        part = _PART.unpack_from(content)[0]
        if not 0 < part <= 1:
            raise QuiverError(f"a coded payload is {part} of a message: it must be in (0, 1].")
        kinds = {leaf.name: (leaf.size, np.dtype(leaf.type)) for leaf in self.leaves}
        flat = coding.decoded(content[_PART.size :], kinds, origin)
        message = {leaf.name: flat[leaf.name].reshape(leaf.shape) for leaf in self.leaves}
        return parted(message, part)

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


def as_coded(code: bytes, part: float) -> bytes:
    """The payload of a share that is this part of a coded message."""
    return CODED + _PART.pack(part) + code


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
