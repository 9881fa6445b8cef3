"""Tensors into a safetensors file, one after the other.

The library's own writer makes a copy of all of them first, and another of the file: with 100
clients of ResNet-18 that is three times 4.5 GB. The format is a length, a JSON header and bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8
PIECE = 1 << 24
"""Bytes that are hashed and written at a time."""


Shape = tuple[torch.dtype, tuple[int, ...]]
Shapes = Mapping[str, Shape]
Piece = bytes | memoryview


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write them; the sha256 of the file."""
    shapes = {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in tensors.items()}
    return write_pieces(shapes, lambda name: pieces_of(tensors[name]), path)


def file_order(shapes: Shapes) -> list[str]:
    """The widest types first, so that all lie aligned."""
    return sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))


def write_pieces(shapes: Shapes, pieces: Callable[[str], Iterable[Piece]], path: Path) -> str:
    """The same file from the bytes of tensors that need not all be here, asked for in its order."""
    order = file_order(shapes)
    header, begin = {}, 0
    for name in order:
        dtype, shape = shapes[name]
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for part in ([len(text).to_bytes(8, "little") + text], *map(pieces, order)):
            for piece in part:
                file.write(piece)
                digest.update(piece)
    return digest.hexdigest()


def pieces_of(tensor: Tensor) -> Iterator[memoryview]:
    """Its bytes, a piece at a time."""
    flat = tensor.detach().flatten()
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    step = PIECE // flat.element_size()
    for begin in range(0, len(flat), step):
        yield flat[begin : begin + step].cpu().view(torch.uint8).numpy().data
