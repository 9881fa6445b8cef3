"""The bytes of a message: a layout that both sides agreed on, dense, sparse or compressed.

A payload is the raw little-endian buffers of the leaves, end to end. Two kinds of run differ:

- A method with `message_bytes` sends sparse messages; see `pack_sparse`.
- A run that compresses puts a byte first. WHOLE means the raw buffers. CODED means the share's part
  of the message (a double, little-endian) and the codes of the leaves.

With an adaptive topology, the sender's report goes first, as float32 numbers.

Names, shapes and types come from the manifest, on whose hash both sides have agreed. So a personal
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

from quiverfl.engine.exchange.fixed_point import Leaves as Leaves
from quiverfl.engine.exchange.fixed_point import add_shares as add_shares
from quiverfl.engine.exchange.fixed_point import keep_remainder, take_part
from quiverfl.engine.exchange.fixed_point import scale_message as scale_message
from quiverfl.errors import QuiverError
from quiverfl.transforms.codec import MessageCodec, Origin
from quiverfl.types import AnyArray, Flags

WHOLE, OWN, LIKE, EVEN = 0, 1, 2, 4
"""Format of a sparse leaf; see `pack_sparse`."""
_INDEX = struct.Struct("<H")


def pack_sparse(leaves: Sequence[AnyArray]) -> bytes:
    """Write flat arrays that are mostly zeros.

    A leaf is a byte that says how it is written, and then

        WHOLE   all its numbers
        OWN     one bit per number, set where it is not zero (the first number is the lowest bit of
                the first byte, the rest of the last byte is 0), then the numbers there
        LIKE    the index of an earlier leaf (two bytes) whose bits hold here too, then the numbers
                there: a weight is kept where its mask is
        EVEN    added to OWN or LIKE: the numbers are all the same and stand there once (a mask)

    whichever is shortest, numbers and indices little-endian. The sign of a zero is lost, which no
    sum can tell.
    """
    parts: list[bytes] = []
    masks: list[Flags] = []
    for leaf in leaves:
        nonzero: Flags = leaf != 0
        bits = np.packbits(nonzero, bitorder="little").tobytes()
        full = np.ones(len(leaf), dtype=np.bool_)
        candidates = [
            (bytes([WHOLE]) + leaf.tobytes(), full),
            (_pack_numbers(OWN, bits, leaf[nonzero]), nonzero),
        ]
        index = _find_covering(nonzero, masks)
        if index is not None:
            like = _pack_numbers(LIKE, _INDEX.pack(index), leaf[masks[index]])
            candidates.append((like, masks[index]))
        shortest, mask = min(candidates, key=lambda candidate: len(candidate[0]))
        parts.append(shortest)
        masks.append(mask)
    return b"".join(parts)


def _pack_numbers(format: int, mask: bytes, numbers: AnyArray) -> bytes:
    if len(numbers) > 1 and (numbers == numbers[0]).all():
        format, numbers = format | EVEN, numbers[:1]
    return bytes([format]) + mask + numbers.tobytes()


def _find_covering(nonzero: Flags, masks: Sequence[Flags]) -> int | None:
    """Find the earlier mask that includes all of these and as few others as possible."""
    covering = [
        (int(mask.sum()), index)
        for index, mask in enumerate(masks)
        if len(mask) == len(nonzero) and not (nonzero & ~mask).any()
    ]
    return min(covering)[1] if covering and min(covering)[1] < 1 << 16 else None


def unpack_sparse(
    payload: bytes | bytearray | memoryview, kinds: Sequence[tuple[np.dtype[Any], int]]
) -> list[AnyArray]:
    """Read arrays of these types and lengths, or raise a QuiverError, whatever the bytes are."""
    rest, masks, leaves = memoryview(payload), list[Flags](), list[AnyArray]()
    for kind, size in kinds:
        format, rest = _split_at(rest, 1)
        mask, rest = _read_mask(format[0] & ~EVEN, rest, size, masks)
        count = int(mask.sum())
        even = bool(format[0] & EVEN)
        if even and (count < 2 or format[0] == WHOLE | EVEN):
            raise QuiverError("a sparse payload repeats a number for fewer than two places.")
        numbers, rest = _split_at(rest, (1 if even else count) * kind.itemsize)
        leaf = np.zeros(size, dtype=kind)
        leaf[mask] = np.frombuffer(numbers, dtype=kind)
        masks.append(mask)
        leaves.append(leaf)
    if len(rest):
        raise QuiverError(f"a sparse payload has {len(rest)} bytes too many.")
    return leaves


def _read_mask(
    format: int, rest: memoryview, size: int, masks: Sequence[Flags]
) -> tuple[Flags, memoryview]:
    """Read where a leaf has numbers. Returns the mask and the remaining bytes."""
    if format == WHOLE:
        return np.ones(size, dtype=np.bool_), rest
    if format == OWN:
        bits, rest = _split_at(rest, -(-size // 8))
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        if flags[size:].any():
            raise QuiverError("a sparse payload has numbers beyond the end of a leaf.")
        return flags[:size].astype(np.bool_), rest
    if format == LIKE:
        index, rest = _split_at(rest, _INDEX.size)
        number = _INDEX.unpack(index)[0]
        if number >= len(masks) or len(masks[number]) != size:
            raise QuiverError(f"a sparse payload has a leaf like {number}, which does not exist.")
        return masks[number], rest
    raise QuiverError(f"a sparse payload has a leaf of format {format}, which does not exist.")


def _split_at(rest: memoryview, count: int) -> tuple[memoryview, memoryview]:
    if len(rest) < count:
        raise QuiverError(f"a sparse payload ends {count - len(rest)} bytes early.")
    return rest[:count], rest[count:]


# The layout of a share


TYPES = ("<f4", "<f8")
PLAIN, CODED = b"\0", b"\1"
_PART = struct.Struct("<d")
REPORT_TYPE = np.dtype("<f4")


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
    coding: MessageCodec | None = None
    report_size: int = 0
    """Count of numbers of the sender's report, which go before the message."""

    @classmethod
    def of(
        cls,
        message: Mapping[str, AnyArray],
        parameters: Sequence[tuple[str, tuple[int, ...]]] = (),
        sparse: bool = False,
        coding: MessageCodec | None = None,
        report_size: int = 0,
    ) -> Manifest:
        """Describe a message."""
        leaves = []
        for name in sorted(message):
            kind = message[name].dtype.newbyteorder("<").str
            if kind not in TYPES:
                raise QuiverError(
                    f"the message's leaf {name!r} has type {kind}; peers send float32 or float64."
                )
            leaves.append(Leaf(name, kind, tuple(message[name].shape)))
        named = tuple((name, tuple(shape)) for name, shape in parameters)
        return cls(tuple(leaves), named, sparse, coding, report_size)

    @cached_property
    def nbytes(self) -> int:
        """The size of a message that is sent whole."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def _report_nbytes(self) -> int:
        return REPORT_TYPE.itemsize * self.report_size

    def allows_size(self, nbytes: int) -> bool:
        """Whether a payload may be of this size."""
        nbytes -= self._report_nbytes
        if self.coding is not None:
            return nbytes in (1 + self.nbytes, 1 + self._coded_nbytes(self.coding))
        if not self.sparse:
            return nbytes == self.nbytes
        return nbytes <= self.nbytes + len(self.leaves)  # a byte each says how a leaf is written

    def _coded_nbytes(self, coding: MessageCodec) -> int:
        sizes = {leaf.name: (leaf.size, int(leaf.type[-1])) for leaf in self.leaves}
        return _PART.size + coding.coded_bytes(sizes)

    @cached_property
    def hash(self) -> str:
        content = [[leaf.name, leaf.type, leaf.shape] for leaf in self.leaves]
        form: dict[str, Any] = {"sparse": True} if self.sparse else {}
        if self.coding is not None:
            form["coding"] = [self.coding.compression.name, self._coded_nbytes(self.coding)]
        form |= {"told": self.report_size} if self.report_size else {}
        return canonical_hash({"leaves": content, "parameters": self.parameters, **form})

    def pack(self, message: Mapping[str, AnyArray]) -> bytes:
        if sorted(message) != [leaf.name for leaf in self.leaves]:
            raise QuiverError(f"a message of {sorted(message)} does not fit the manifest.")
        arrays = (np.ascontiguousarray(message[leaf.name], dtype=leaf.type) for leaf in self.leaves)
        if self.sparse:
            return pack_sparse([array.reshape(-1) for array in arrays])
        head = b"" if self.coding is None else PLAIN
        return head + b"".join(array.tobytes() for array in arrays)

    def unpack(
        self, payload: bytes | bytearray | memoryview, origin: Origin | None = None
    ) -> Leaves:
        """Read a message that was packed, or raise a QuiverError. Codes need their `origin`."""
        payload = memoryview(payload)[self._report_nbytes :]
        if self.coding is not None:
            return self._decode(self.coding, bytes(payload), origin)
        if not self.sparse:
            return self.unpack_whole(payload)
        kinds = [(np.dtype(leaf.type), leaf.size) for leaf in self.leaves]
        flat = unpack_sparse(payload, kinds)
        return {
            leaf.name: array.reshape(leaf.shape)
            for leaf, array in zip(self.leaves, flat, strict=True)
        }

    def pack_report(self, report: AnyArray | None = None) -> bytes:
        """Write the report that goes before a message; without one it is unknown (NaN)."""
        if report is None:
            report = np.full(self.report_size, np.nan)
        return np.asarray(report, dtype=REPORT_TYPE).tobytes()

    def unpack_report(self, payload: bytes | bytearray | memoryview) -> AnyArray:
        """Read the sender's report from the beginning of a payload."""
        return np.frombuffer(payload, dtype=REPORT_TYPE, count=self.report_size).copy()

    def _decode(self, coding: MessageCodec, payload: bytes, origin: Origin | None) -> Leaves:
        kind, content = payload[:1], payload[1:]
        if kind == PLAIN:
            return self.unpack_whole(content)
        if kind != CODED or origin is None or len(content) < _PART.size:
            raise QuiverError(f"a payload is neither whole nor coded: it begins with {kind!r}.")
        part = _PART.unpack_from(content)[0]
        if not 0 < part <= 1:
            raise QuiverError(f"a coded payload is {part} of a message: it must be in (0, 1].")
        kinds = {leaf.name: (leaf.size, np.dtype(leaf.type)) for leaf in self.leaves}
        flat = coding.decode(content[_PART.size :], kinds, origin)
        message = {leaf.name: flat[leaf.name].reshape(leaf.shape) for leaf in self.leaves}
        return take_part(message, part)

    def unpack_whole(self, payload: bytes | bytearray | memoryview) -> Leaves:
        """Read a message that was sent whole, as read-only views into the payload."""
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


def frame_code(code: bytes, part: float) -> bytes:
    """Write the payload of a share that is this part of a coded message."""
    return CODED + _PART.pack(part) + code


def canonical_hash(value: Any) -> str:
    """Hash a value, written as JSON in one way only, with sha256."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sum_message(message: Mapping[str, AnyArray]) -> float:
    """Sum all numbers in float64: one figure that mixing must not change."""
    return math.fsum(float(leaf.sum(dtype=np.float64)) for leaf in message.values())


def sum_magnitudes(message: Mapping[str, AnyArray]) -> float:
    """Sum all magnitudes: what a rounding error is measured against."""
    return math.fsum(float(np.abs(leaf).sum(dtype=np.float64)) for leaf in message.values())


def l2_norm(message: Mapping[str, AnyArray]) -> float:
    squares = (float(np.square(leaf, dtype=np.float64).sum()) for leaf in message.values())
    return math.sqrt(math.fsum(squares))


def max_magnitude(message: Mapping[str, AnyArray]) -> float:
    """Find the largest magnitude; it is not finite if any number is not."""
    ends = [
        float(end) for leaf in message.values() if leaf.size for end in (leaf.max(), leaf.min())
    ]
    return math.nan if any(math.isnan(end) for end in ends) else max(map(abs, ends), default=0.0)


LARGEST = 1e18
"""A larger number is no parameter: its square, and sums of it, would soon overflow."""


def check_numbers(message: Mapping[str, AnyArray]) -> str:
    """Say why the numbers of a message are refused; empty if they are not."""
    top = max_magnitude(message)
    if not math.isfinite(top):
        return "not finite"
    return "too large" if top > LARGEST else ""


class ShareEncoder:
    """Splits a message into shares: as it is, or compressed once for all its shares."""

    def __init__(
        self,
        manifest: Manifest,
        message: Leaves,
        origin: Origin,
        whole: bool = False,
        report: AnyArray | None = None,
    ) -> None:
        self._manifest, self._message, self._code = manifest, message, b""
        self._report = manifest.pack_report(report)
        self._decoded: Leaves | None = None
        """The message as receivers decode it, where the run compresses."""
        if manifest.coding is not None and not whole:
            self._code = manifest.coding.encode(message, origin)
            self._decoded = manifest.unpack(self._report + frame_code(self._code, 1.0), origin)

    def encode(self, part: int, whole: int) -> tuple[bytes, str, float]:
        """Write the share part / whole: its bytes, their digest, the sum of its numbers."""
        if self._decoded is None:
            share = scale_message(self._message, part, whole) if part != whole else self._message
            payload = self._report + self._manifest.pack(share)
        else:
            share = scale_message(self._decoded, part, whole)
            payload = self._report + frame_code(self._code, part / whole)
        return payload, hashlib.sha256(payload).hexdigest(), sum_message(share)

    def remainder(self, part: int, whole: int) -> Leaves:
        """Compute what stays here when the share part / whole is one's own."""
        if self._decoded is None:
            return scale_message(self._message, part, whole)
        return keep_remainder(self._message, self._decoded, part, whole)
