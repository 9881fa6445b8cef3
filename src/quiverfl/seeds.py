"""Random numbers as pure functions of (seed, purpose, coordinates). There is no global state.

`stream` gives a numpy generator for one purpose and its coordinates. `key_hashes` gives a 64-bit
number for every coordinate of whole arrays at once: so the batch order of many clients is drawn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError
from quiverfl.options import python_number

Hashes = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_ALL = (1 << 64) - 1
MOST_SEEDS = 100_000
"""More would be a slip: each is a run of its own."""


def check_seeds(seeds: Any) -> list[int]:
    """Seeds as numbers: from [0, 1, 2], from "0-4,7", or as 5, which is the five from 0 on."""
    seeds = python_number(seeds)
    listed = list(seeds) if isinstance(seeds, Iterable) and not isinstance(seeds, str) else []
    if isinstance(seeds, str):
        listed = _parse_seeds(seeds)
    elif isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds == 0:
            raise QuiverError('seeds = 0 is no seed at all: write [0], or "0-0", for the seed 0.')
        _check_seed_count(seeds, seeds)
        listed = list(range(seeds))
    numbers = [python_number(number) for number in listed]
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise QuiverError(
            f'seeds = {seeds!r}: give whole numbers such as [0, 1, 2], a range such as "0-4", or '
            "how many, such as 5."
        )
    return list(dict.fromkeys(numbers))


def _parse_seeds(text: str) -> list[int]:
    """`0-4,7` or `5`; nothing where it is neither."""
    if re.fullmatch(r"\s*\d+\s*", text):
        return check_seeds(int(text))
    numbers: list[int] = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise QuiverError(f"seeds = {text!r}: {part} ends before it begins.")
        _check_seed_count(text, last + 1 - first)
        numbers += range(first, last + 1)
    return numbers


def _check_seed_count(seeds: object, count: int) -> None:
    if count > MOST_SEEDS:
        raise QuiverError(
            f"seeds = {seeds!r}: {count:,} are more than the {MOST_SEEDS:,} that one command "
            "takes; give fewer."
        )


def stream(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    """A generator that depends on nothing but its arguments (Philox keyed by their hash)."""
    text = repr((int(seed), purpose, *(int(c) for c in coordinates))).encode()
    key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


def key_hashes(seed: int, purpose: str, *coordinates: Any) -> Hashes:
    """64 random bits for each coordinate; coordinates broadcast against each other like arrays."""
    text = repr((int(seed), purpose)).encode()
    start = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    bits: Hashes = np.asarray(np.uint64(start))
    with np.errstate(over="ignore"):
        for coordinate in coordinates:
            bits = _mix(bits ^ _mix_coordinate(coordinate))
    return bits


def _mix_coordinate(coordinate: Any) -> Any:
    if not isinstance(coordinate, int) or not -(1 << 63) <= coordinate <= _ALL:
        return _mix(np.asarray(coordinate).astype(np.uint64) + _GOLDEN)
    # The same in Python's numbers, which for one of them is ten times as fast.
    bits = (coordinate + int(_GOLDEN)) & _ALL
    bits = ((bits ^ (bits >> 30)) * int(_FIRST)) & _ALL
    bits = ((bits ^ (bits >> 27)) * int(_SECOND)) & _ALL
    return np.uint64(bits ^ (bits >> 31))


def _mix(bits: Any) -> Hashes:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    mixed: Hashes = bits ^ (bits >> np.uint64(31))
    return mixed
