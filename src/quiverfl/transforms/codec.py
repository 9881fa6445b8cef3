"""Compressed leaves and messages as bytes, and back.

    quantize   every block's scale (bfloat16), then b bits a number, offset to 0 … 2^b - 2
    top_k      the indices of every block's numbers (a byte each, rising), then the numbers
    random_k   the numbers; indices follow from the seed, the round, the client and the leaf

Everything is little-endian. Decoding gives the very numbers that a simulation mixes. Bytes that no
encoder could have written are refused.

The codes of a message's leaves follow each other in the order of their names. Encoding and decoding
are pure functions of the message, the seed, the round and the client (`Origin`): a sender that
repeats a message repeats its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.transforms.compression import INDEX_BYTES, Compression, Quantize, RandomK, TopK
from quiverfl.transforms.noise import BLOCK, ClientDither, Dither
from quiverfl.types import AnyArray

Bytes = npt.NDArray[np.uint8]


class Malformed(QuiverError):
    """The bytes are no code of such a leaf."""


def encode(compression: Compression, leaf: Tensor, dither: ClientDither) -> bytes:
    """The code of a leaf [numbers] of the one client that `dither` belongs to."""
    if not bool(torch.isfinite(leaf).all()):
        raise QuiverError("a leaf with numbers that are not finite cannot be coded.")
    whole, rest = _split_blocks(leaf)
    if isinstance(compression, Quantize):
        return _encode_quantized(compression, whole, rest, dither)
    parts = [(part, first) for part, first in ((whole, 0), (rest, len(whole))) if part.numel()]
    if isinstance(compression, RandomK):
        indices = [_draw_indices(compression, dither, first, part.shape) for part, first in parts]
        head = b""
    else:
        assert isinstance(compression, TopK)
        indices = [compression.select_indices(part).sort(dim=-1).values for part, _ in parts]
        head = b"".join(index.to(torch.uint8).numpy().tobytes() for index in indices)
    values = [part.gather(-1, index) for (part, _), index in zip(parts, indices, strict=True)]
    return head + b"".join(_to_little_endian(value).tobytes() for value in values)


def decode(
    compression: Compression, code: bytes, numbers: int, dtype: torch.dtype, dither: ClientDither
) -> Tensor:
    """The leaf [numbers] that a sender's bytes stand for; `dither` is the sender's."""
    size = compression.coded_bytes(numbers, dtype.itemsize)
    if len(code) != size:
        raise Malformed(
            f"a {compression.name} code of {numbers} numbers has {size} bytes, not {len(code)}."
        )
    content = np.frombuffer(code, dtype=np.uint8)
    if isinstance(compression, Quantize):
        return _decode_quantized(compression, content, numbers, dtype)
    assert isinstance(compression, TopK | RandomK)
    total = compression.count_leaf(numbers)
    cut = len(code) - total * dtype.itemsize
    head, tail = content[:cut], content[cut:].view(_little_endian(dtype))
    values = torch.from_numpy(tail.astype(tail.dtype.newbyteorder("=")))
    if not bool(torch.isfinite(values).all()):
        raise Malformed("a code with numbers that are not finite.")
    blocks, rest = divmod(numbers, BLOCK)
    result = torch.zeros(numbers, dtype=dtype)
    cut = blocks * compression.count_block(BLOCK)
    for first, begin, end, count, width in (
        (0, 0, cut, blocks, BLOCK),
        (blocks, cut, total, 1, rest),
    ):
        if not count or not width:
            continue
        into = result[first * BLOCK : first * BLOCK + count * width].view(count, width)
        if isinstance(compression, TopK):
            index = _read_indices(head[begin * INDEX_BYTES : end * INDEX_BYTES], count, width)
        else:
            index = _draw_indices(compression, dither, first, torch.Size((count, width)))
        into.scatter_(-1, index, values[begin:end].view(count, -1))
    return result


def _encode_quantized(
    compression: Quantize, whole: Tensor, rest: Tensor, dither: ClientDither
) -> bytes:
    scales, codes = [], []
    for part, first in ((whole, 0), (rest, len(whole))):
        if part.numel():
            own = dither.take_blocks(first, len(part))[0, :, : part.shape[1]]
            scale = compression.scales(part)
            scales.append(scale.reshape(-1))
            codes.append(compression.codes(part, scale, own).reshape(-1))
    if not codes:
        return b""
    heads = torch.cat(scales).bfloat16().view(torch.int16).numpy().astype("<i2").tobytes()
    offset = (torch.cat(codes) + compression.levels).to(torch.uint8).numpy()
    return heads + _pack_bits(offset, compression.bits).tobytes()


def _decode_quantized(
    compression: Quantize, content: Bytes, numbers: int, dtype: torch.dtype
) -> Tensor:
    blocks = -(-numbers // BLOCK)
    heads = content[: 2 * blocks].view("<i2").astype(np.int16)
    scales = torch.from_numpy(heads).view(torch.bfloat16).to(dtype)
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise Malformed("a quantize code with a scale that is not a positive number.")
    offset, spare = _unpack_bits(content[2 * blocks :], compression.bits, numbers)
    if offset.max(initial=0) > 2 * compression.levels:
        raise Malformed(
            f"a quantize code with a number above {2 * compression.levels}, which "
            f"{compression.bits} bits do not use."
        )
    if spare.any():
        raise Malformed("a quantize code with bits after its last number.")
    codes = torch.from_numpy(offset.astype(np.int16)).to(dtype) - compression.levels
    values = codes * scales.repeat_interleave(BLOCK)[:numbers]
    if not bool(torch.isfinite(values).all()):
        raise Malformed("a quantize code with a scale so large that its numbers are not finite.")
    return values


def _split_blocks(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The complete blocks [count, BLOCK], and the rest, [1, numbers] or nothing."""
    count = len(leaf) // BLOCK
    rest = leaf[count * BLOCK :]
    return leaf[: count * BLOCK].view(count, BLOCK), rest.view(1 if len(rest) else 0, len(rest))


def _draw_indices(
    compression: RandomK, dither: ClientDither, first: int, shape: torch.Size
) -> Tensor:
    return compression.select_indices(dither.take_blocks(first, shape[0])[0, :, : shape[1]])


def _read_indices(head: Bytes, count: int, width: int) -> Tensor:
    indices = torch.from_numpy(head.astype(np.int64)).view(count, -1)
    if int(indices.max()) >= width or bool((indices.diff(dim=-1) <= 0).any()):
        raise Malformed(
            f"a top_k code whose places do not rise, or are not below {width}, the size of a block."
        )
    return indices


def _pack_bits(codes: Bytes, bits: int) -> Bytes:
    """Several numbers to a byte, the first in the lowest bits."""
    each = 8 // bits
    padded = np.pad(codes, (0, -len(codes) % each)).reshape(-1, each)
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    packed: Bytes = np.bitwise_or.reduce(padded << shifts, axis=1).astype(np.uint8)
    return packed


def _unpack_bits(packed: Bytes, bits: int, numbers: int) -> tuple[Bytes, Bytes]:
    """The numbers, and what is behind the last one."""
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    codes = ((packed[:, None] >> shifts) & np.uint8(2**bits - 1)).reshape(-1)
    return codes[:numbers], codes[numbers:]


def _little_endian(dtype: torch.dtype) -> Any:
    return np.dtype({torch.float32: "<f4", torch.float64: "<f8"}[dtype])


def _to_little_endian(values: Tensor) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = values.numpy().astype(_little_endian(values.dtype))
    return array


TYPES = {"f4": torch.float32, "f8": torch.float64}


class Origin(NamedTuple):
    """The client and the round of a message, which decide its dither."""

    client: int
    round: int


@dataclass(frozen=True)
class MessageCodec:
    """Encodes and decodes the messages of a run, for all clients alike."""

    compression: Compression
    seed: int

    def coded_bytes(self, sizes: Mapping[str, tuple[int, int]]) -> int:
        """Bytes of a coded message; `sizes`: numbers of every leaf, and bytes of a number."""
        return sum(self.compression.coded_bytes(*size) for size in sizes.values())

    def encode(self, message: Mapping[str, AnyArray], origin: Origin) -> bytes:
        parts = (
            encode(
                self.compression, _to_tensor(message[name]), self._dither(name, leaf.size, origin)
            )
            for name, leaf in sorted(message.items())
        )
        return b"".join(parts)

    def decode(
        self, code: bytes, kinds: Mapping[str, tuple[int, np.dtype[Any]]], origin: Origin
    ) -> dict[str, AnyArray]:
        """The leaves; `kinds`: numbers and type of each. All other bytes raise Malformed."""
        message, start = {}, 0
        for name, (numbers, kind) in sorted(kinds.items()):
            end = start + self.compression.coded_bytes(numbers, kind.itemsize)
            dither = self._dither(name, numbers, origin)
            dtype = TYPES[kind.str[1:]]
            leaf = decode(self.compression, code[start:end], numbers, dtype, dither)
            message[name], start = leaf.numpy(), end
        if start != len(code):
            raise Malformed(f"a coded message has {len(code) - start} bytes too many.")
        return message

    def transmit(self, message: Mapping[str, AnyArray], origin: Origin) -> dict[str, AnyArray]:
        """The message as receivers decode it: Q(u)."""
        kinds = {name: (leaf.size, leaf.dtype) for name, leaf in message.items()}
        flat = self.decode(self.encode(message, origin), kinds, origin)
        return {name: flat[name].reshape(leaf.shape) for name, leaf in message.items()}

    def _dither(self, name: str, numbers: int, origin: Origin) -> ClientDither:
        dither = _dither_of_round(self.seed, origin.round)
        return dither.for_leaf(name, np.array([origin.client]), numbers)


@lru_cache(maxsize=2)
def _dither_of_round(seed: int, round: int) -> Dither:
    """Cached for the leaves of a message: the table of a round is drawn once."""
    return Dither(seed, round)


def _to_tensor(leaf: AnyArray) -> torch.Tensor:
    flat = np.ascontiguousarray(leaf).reshape(-1)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())
