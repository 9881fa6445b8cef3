"""Vectors of named tensors (Layout), and trees of tensors.

A client's shared parameters are one vector u, its personal ones one vector v, so that methods read
like the paper (z = u / μ) and mixing is one matrix product. A Layout says which slice of the
vector is which tensor.

What goes into a model and comes out of it is a Tree: a tensor, or a dictionary, tuple or list of
trees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tree: TypeAlias = Any
"""A tensor, or a dictionary, tuple or list of trees."""


def tree_map(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The same tree with every leaf replaced by function(leaf, leaves of others…)."""
    if isinstance(tree, dict):
        return {k: tree_map(function, tree[k], *(other[k] for other in others)) for k in tree}
    if isinstance(tree, tuple | list):
        parts = [tree_map(function, *part) for part in zip(tree, *others, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree, *others)


def tree_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, such as `mask` or `0.ids`; a lone tensor has the path ""."""
    if isinstance(tree, dict | tuple | list):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, part in parts:
            yield from tree_leaves(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree


def tree_map_with_path(function: Callable[[str, Any], Any], tree: Tree, name: str = "") -> Tree:
    """The same tree with every leaf replaced by function(path, leaf)."""
    if isinstance(tree, dict | tuple | list):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        before = f"{name}." if name else ""
        mapped = {k: tree_map_with_path(function, part, f"{before}{k}") for k, part in parts}
        return mapped if isinstance(tree, dict) else type(tree)(mapped.values())
    return function(name, tree)


def first_leaf(tree: Tree) -> Any:
    return next(leaf for _, leaf in tree_leaves(tree))


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors in a vector, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_named(cls, named: Iterable[tuple[str, Tensor]]) -> Layout:
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
