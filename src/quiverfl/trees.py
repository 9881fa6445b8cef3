"""Named tensors laid end to end in one vector.

A client's shared parameters are one vector u, its personal ones one vector v, so that methods read
like the paper (z = u / μ) and mixing is one matrix product. A Layout says which slice of the
vector is which tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a vector, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> Layout:
        pairs = [(name, tuple(tensor.shape)) for name, tensor in named]
        return cls(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        ends = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes))]
        return {
            name: slice(end - size, end)
            for name, size, end in zip(self.names, self.sizes, ends, strict=True)
        }

    @property
    def size(self) -> int:
        """Length of the vector."""
        return sum(self.sizes)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Named views into a vector, or into the rows of a matrix of stacked vectors."""
        leading = tuple(vector.shape[:-1])
        return {
            name: vector[..., self.slices[name]].view(leading + shape)
            for name, shape in zip(self.names, self.shapes, strict=True)
        }

    def join(self, named: Mapping[str, Tensor]) -> Tensor:
        """The inverse of split for one client: a new vector."""
        parts = [named[name].reshape(-1) for name in self.names]
        return torch.cat(parts) if parts else torch.zeros(0)
