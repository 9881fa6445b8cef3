"""From raw inputs to those of a model: bytes to floats, mean 0 and standard deviation 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quiverfl.data.augmentation import constant
from quiverfl.trees import Tree, mapped_by_path


@dataclass(frozen=True)
class Normalize:
    """To float32, bytes on the scale of [0, 1]; then (x - mean) / std per channel (axis 1)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        factors = self.factors(255.0 if x.dtype == torch.uint8 else 1.0, x.device)
        scale, shift = (factor.view(shape) for factor in factors)
        return x.to(torch.float32) * scale + shift

    def factors(
        self, unit: float, device: torch.device = torch.device("cpu")
    ) -> tuple[Tensor, Tensor]:
        """(scale, shift) per channel for inputs on the scale of [0, unit]."""
        scale = tuple(1 / (unit * std) for std in self.std)
        return constant(scale, torch.float32, device), constant(self.black, torch.float32, device)

    @property
    def black(self) -> tuple[float, ...]:
        """What a black pixel becomes, per channel."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))


@dataclass(frozen=True)
class NormalizeParts:
    """Of several inputs, each in its own way; those without a name here are left as they are."""

    parts: Mapping[str, Normalize]

    def __call__(self, x: Tree) -> Tree:
        def one(path: str, leaf: Tensor) -> Tensor:
            return self.parts[path](leaf) if path in self.parts else leaf

        return mapped_by_path(one, x)
