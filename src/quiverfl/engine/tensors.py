"""Tensors into a safetensors file, one after the other.

The library's own writer makes a copy of all of them first, and another of the file: with 100
clients of ResNet-18 that is three times 4.5 GB. The format is a length, a JSON header and bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
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


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write them; the sha256 of the file. The widest types first, so that all lie aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, begin = {}, 0
    for name in order:
        leaf = tensors[name]
        end = begin + leaf.numel() * leaf.element_size()
        header[name] = {
            "dtype": TYPES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in _pieces(len(text).to_bytes(8, "little") + text, tensors, order):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _pieces(
    header: bytes, tensors: Mapping[str, Tensor], order: list[str]
) -> Iterator[bytes | memoryview]:
    yield header
    for name in order:
        flat = tensors[name].detach().flatten()
        if flat.stride(0) != 1:
            flat = flat.clone(memory_format=torch.contiguous_format)
        step = PIECE // flat.element_size()
        for begin in range(0, len(flat), step):
            yield flat[begin : begin + step].cpu().view(torch.uint8).numpy().data
