"""One client's coded leaf as bytes, and back: what travels, and what accounting counts.

    quantize   every block's scale (bfloat16), then b bits a number, offset to 0 … 2^b - 2
    top_k      the places of every block's numbers (a byte each, rising), then the numbers
    random_k   the numbers; places follow from the seed, the round, the client and the leaf

Everything is little-endian. Decoding gives the very numbers that a simulation mixes. Bytes that no
encoder could have written are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.transforms.compression import INDEX_BYTES, Compression, Quantize, RandomK, TopK
from quiverfl.transforms.dither import BLOCK, Draws

Bytes = npt.NDArray[np.uint8]


class Malformed(QuiverError):
    """Bytes that are no code of such a leaf."""


def encode(compression: Compression, leaf: Tensor, draws: Draws) -> bytes:
    """A leaf [numbers] of the one client that `draws` are of."""
    if not bool(torch.isfinite(leaf).all()):
        raise QuiverError("a leaf with numbers that are not finite cannot be coded.")
    whole, rest = _blocks(leaf)
    if isinstance(compression, Quantize):
        return _quantized(compression, whole, rest, draws)
    parts = [part for part in (whole, rest) if part.numel()]
    if isinstance(compression, RandomK):
        found = [
            part.gather(-1, _chosen(compression, draws, first, part.shape))
            for part, first in zip((whole, rest), (0, len(whole)), strict=True)
            if part.numel()
        ]
        return b"".join(_little(values).tobytes() for values in found)
    assert isinstance(compression, TopK)
    places = [compression.places(part).sort(dim=-1).values for part in parts]
    values = [part.gather(-1, at) for part, at in zip(parts, places, strict=True)]
    indices = b"".join(at.to(torch.uint8).numpy().tobytes() for at in places)
    return indices + b"".join(_little(found).tobytes() for found in values)


def decode(
    compression: Compression, code: bytes, numbers: int, dtype: torch.dtype, draws: Draws
) -> Tensor:
    """The leaf [numbers] that a sender's bytes stand for; `draws` are the sender's."""
    wanted = compression.bytes_of(numbers, dtype.itemsize)
    if len(code) != wanted:
        raise Malformed(
            f"a {compression.name} code of {numbers} numbers has {wanted} bytes, not {len(code)}."
        )
    content = np.frombuffer(code, dtype=np.uint8)
    if isinstance(compression, Quantize):
        return _dequantized(compression, content, numbers, dtype)
    assert isinstance(compression, TopK | RandomK)
    total = compression.total(numbers)
    places, values = content[: len(code) - total * dtype.itemsize], content
    values = values[len(places) :]
    found = torch.from_numpy(values.view(_kind(dtype)).astype(_kind(dtype).newbyteorder("=")))
    if not bool(torch.isfinite(found).all()):
        raise Malformed("a code with numbers that are not finite.")
    blocks, rest = divmod(numbers, BLOCK)
    result = torch.zeros(numbers, dtype=dtype)
    cut = blocks * compression.kept(BLOCK)
    for first, begin, end, count, width in (
        (0, 0, cut, blocks, BLOCK),
        (blocks, cut, total, 1, rest),
    ):
        if not count or not width:
            continue
        into = result[first * BLOCK : first * BLOCK + count * width].view(count, width)
        some = found[begin:end].view(count, -1)
        if isinstance(compression, TopK):
            at = _rising(places[begin * INDEX_BYTES : end * INDEX_BYTES], count, width)
        else:
            at = _chosen(compression, draws, first, torch.Size((count, width)))
        into.scatter_(-1, at, some)
    return result


def _quantized(compression: Quantize, whole: Tensor, rest: Tensor, draws: Draws) -> bytes:
    scales, codes = [], []
    for part, first in ((whole, 0), (rest, len(whole))):
        if part.numel():
            noise = draws.at(first, len(part))[0, :, : part.shape[1]]
            scale = compression.scales(part)
            scales.append(scale.reshape(-1))
            codes.append(compression.codes(part, scale, noise).reshape(-1))
    if not codes:
        return b""
    heads = torch.cat(scales).bfloat16().view(torch.int16).numpy().astype("<i2").tobytes()
    offset = (torch.cat(codes) + compression.levels).to(torch.uint8).numpy()
    return heads + _packed(offset, compression.bits).tobytes()


def _dequantized(compression: Quantize, content: Bytes, numbers: int, dtype: torch.dtype) -> Tensor:
    blocks = -(-numbers // BLOCK)
    heads = content[: 2 * blocks].view("<i2").astype(np.int16)
    scales = torch.from_numpy(heads).view(torch.bfloat16).to(dtype)
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise Malformed("a quantize code with a scale that is not a positive number.")
    offset, spare = _unpacked(content[2 * blocks :], compression.bits, numbers)
    if offset.max(initial=0) > 2 * compression.levels:
        raise Malformed(
            f"a quantize code with a number above {2 * compression.levels}, which "
            f"{compression.bits} bits do not use."
        )
    if spare.any():
        raise Malformed("a quantize code with bits after its last number.")
    codes = torch.from_numpy(offset.astype(np.int16)).to(dtype) - compression.levels
    found = codes * scales.repeat_interleave(BLOCK)[:numbers]
    if not bool(torch.isfinite(found).all()):
        raise Malformed("a quantize code with a scale so large that its numbers are not finite.")
    return found


def _blocks(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The whole blocks [count, BLOCK], and the rest, [1, numbers] or nothing."""
    count = len(leaf) // BLOCK
    rest = leaf[count * BLOCK :]
    return leaf[: count * BLOCK].view(count, BLOCK), rest.view(1 if len(rest) else 0, len(rest))


def _chosen(compression: RandomK, draws: Draws, first: int, shape: torch.Size) -> Tensor:
    return compression.places(draws.at(first, shape[0])[0, :, : shape[1]])


def _rising(places: Bytes, count: int, width: int) -> Tensor:
    at = torch.from_numpy(places.astype(np.int64)).view(count, -1)
    if int(at.max()) >= width or bool((at.diff(dim=-1) <= 0).any()):
        raise Malformed(
            f"a top_k code whose places do not rise, or are not below {width}, the size of a block."
        )
    return at


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Several numbers to a byte, the first in the lowest bits."""
    each = 8 // bits
    padded = np.pad(codes, (0, -len(codes) % each)).reshape(-1, each)
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    packed: Bytes = np.bitwise_or.reduce(padded << shifts, axis=1).astype(np.uint8)
    return packed


def _unpacked(packed: Bytes, bits: int, numbers: int) -> tuple[Bytes, Bytes]:
    """The numbers, and what is behind the last one."""
    each = 8 // bits
    shifts = np.arange(each, dtype=np.uint8) * np.uint8(bits)
    found = ((packed[:, None] >> shifts) & np.uint8(2**bits - 1)).reshape(-1)
    return found[:numbers], found[numbers:]


def _kind(dtype: torch.dtype) -> Any:
    return np.dtype({torch.float32: "<f4", torch.float64: "<f8"}[dtype])


def _little(values: Tensor) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = values.numpy().astype(_kind(values.dtype))
    return found
