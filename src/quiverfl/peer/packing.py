"""Messages that are mostly zeros: where the others are, one bit for each, and what they are.

A leaf is a byte that says how it is written, and then

    WHOLE   all its numbers
    OWN     one bit per number, set where it is not zero (the first number is the lowest bit of the
            first byte, the rest of the last byte is 0), then the numbers there
    LIKE    the place of an earlier leaf (two bytes), whose bits are meant, then the numbers there:
            a weight is kept where its mask is
    EVEN    added to OWN or LIKE: the numbers are all the same and stand there once (a mask)

whichever is shortest, numbers and places little-endian. That is general: a method says that its
messages are smaller than their tensors (`payload`), and this makes them so. The sign of a zero is
lost, which no sum can tell.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

WHOLE, OWN, LIKE, EVEN = 0, 1, 2, 4
_PLACE = struct.Struct("<H")


def packed(leaves: Sequence[Array]) -> bytes:
    """Flat arrays as bytes."""
    written: list[bytes] = []
    known: list[Flags] = []
    for leaf in leaves:
        kept: Flags = leaf != 0
        bits = np.packbits(kept, bitorder="little").tobytes()
        every = np.ones(len(leaf), dtype=np.bool_)
        ways = [
            (bytes([WHOLE]) + leaf.tobytes(), every),
            (_few(OWN, bits, leaf[kept]), kept),
        ]
        place = _covering(kept, known)
        if place is not None:
            like = _few(LIKE, _PLACE.pack(place), leaf[known[place]])
            ways.append((like, known[place]))
        best, places = min(ways, key=lambda way: len(way[0]))
        written.append(best)
        known.append(places)
    return b"".join(written)


def _few(way: int, where: bytes, numbers: Array) -> bytes:
    if len(numbers) > 1 and (numbers == numbers[0]).all():
        way, numbers = way | EVEN, numbers[:1]
    return bytes([way]) + where + numbers.tobytes()


def _covering(kept: Flags, known: Sequence[Flags]) -> int | None:
    """The earlier leaf whose places include all of these and as few others as possible."""
    wide = [
        (int(flags.sum()), place)
        for place, flags in enumerate(known)
        if len(flags) == len(kept) and not (kept & ~flags).any()
    ]
    return min(wide)[1] if wide and min(wide)[1] < 1 << 16 else None


def unpacked(
    payload: bytes | bytearray | memoryview, kinds: Sequence[tuple[np.dtype[Any], int]]
) -> list[Array]:
    """The arrays of these types and lengths; whatever the bytes are, they or a QuiverError."""
    rest, known, leaves = memoryview(payload), list[Flags](), list[Array]()
    for kind, size in kinds:
        way, rest = _cut(rest, 1)
        flags, rest = _places(way[0] & ~EVEN, rest, size, known)
        count = int(flags.sum())
        even = bool(way[0] & EVEN)
        if even and (count < 2 or way[0] == WHOLE | EVEN):
            raise QuiverError("a sparse payload repeats a number for fewer than two places.")
        numbers, rest = _cut(rest, (1 if even else count) * kind.itemsize)
        leaf = np.zeros(size, dtype=kind)
        leaf[flags] = np.frombuffer(numbers, dtype=kind)
        known.append(flags)
        leaves.append(leaf)
    if len(rest):
        raise QuiverError(f"a sparse payload has {len(rest)} bytes too many.")
    return leaves


def _places(
    way: int, rest: memoryview, size: int, known: Sequence[Flags]
) -> tuple[Flags, memoryview]:
    """Where a leaf has numbers, and what follows."""
    if way == WHOLE:
        return np.ones(size, dtype=np.bool_), rest
    if way == OWN:
        bits, rest = _cut(rest, -(-size // 8))
        flags = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        if flags[size:].any():
            raise QuiverError("a sparse payload has numbers beyond the end of a leaf.")
        return flags[:size].astype(np.bool_), rest
    if way == LIKE:
        place, rest = _cut(rest, _PLACE.size)
        number = _PLACE.unpack(place)[0]
        if number >= len(known) or len(known[number]) != size:
            raise QuiverError(f"a sparse payload has a leaf like number {number}, which is not.")
        return known[number], rest
    raise QuiverError(f"a sparse payload has a leaf that is written in way {way}: there is none.")


def _cut(rest: memoryview, count: int) -> tuple[memoryview, memoryview]:
    if len(rest) < count:
        raise QuiverError(f"a sparse payload ends {count - len(rest)} bytes early.")
    return rest[:count], rest[count:]
