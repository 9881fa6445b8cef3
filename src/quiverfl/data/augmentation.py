"""Random crop and horizontal flip for whole batches, from 64 random bits per sample."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.seeds import Hashes
from quiverfl.support.references import Registry
from quiverfl.trees import Tree, tree_map_with_path
from quiverfl.types import Integers

Booleans = npt.NDArray[np.bool_]

FIELD = 24
"""Bits of a key used for each of the two shifts; the top bit decides the flip."""


@dataclass(frozen=True)
class CropFlip:
    """Pads by `padding`, cuts the original size out at a random place, flips half of the images.

    `fill` is the value of a padded pixel per channel (empty: 0). Images arrive normalised, so
    black padding, as it is done on raw images everywhere, is -mean/std.
    """

    padding: int = 4
    flip: bool = True
    fill: tuple[float, ...] = ()

    def __call__(self, x: Tensor, keys: Hashes) -> Tensor:
        return self.crop(
            x, *(torch.from_numpy(draw).to(x.device) for draw in self.draw_offsets(keys))
        )

    def crop(self, x: Tensor, down: Tensor, right: Tensor, flips: Tensor) -> Tensor:
        """The images so shifted and flipped; what was drawn lies where they do."""
        height, width = x.shape[2:]
        # Every possible cut as a view, [n, channels, down, right, height, width]; one is copied.
        cuts = self._pad(x).unfold(2, height, 1).unfold(3, width, 1)
        cut = cuts[torch.arange(len(x), device=x.device), :, down, right]
        if x.device.type == "cpu":
            cut[flips] = cut[flips].flip(3)
            return cut
        # Elsewhere the flipped ones would have to be counted first, and everything would wait.
        return torch.where(flips.view(-1, 1, 1, 1), cut.flip(3), cut)

    def draw_offsets(self, keys: Hashes) -> tuple[Integers, Integers, Booleans]:
        """Per sample: shift down, shift right (0 … 2·padding), and whether it is flipped."""
        places = np.uint64(2 * self.padding + 1)
        mask, field = np.uint64((1 << FIELD) - 1), np.uint64(FIELD)
        down = ((keys & mask) * places) >> field
        right = (((keys >> field) & mask) * places) >> field
        flips = (keys >> np.uint64(63)).astype(bool) & self.flip
        return down.astype(np.int64), right.astype(np.int64), flips

    def _pad(self, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        side = self.padding
        fill = channel_tensor(self.fill or (0.0,), x.dtype, x.device)
        shape = (count, channels, height + 2 * side, width + 2 * side)
        padded = x.new_empty(shape).copy_(fill.view(1, -1, 1, 1))
        padded[:, :, side : side + height, side : side + width] = x
        return padded


@functools.cache
def channel_tensor(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A few numbers as a tensor, made and moved once; never to be written to."""
    return torch.tensor(values, dtype=dtype, device=device)


_AUGMENTATIONS: dict[str, CropFlip | None] = {
    "none": None,
    "crop_flip": CropFlip(),
    "crop": CropFlip(flip=False),
    "flip": CropFlip(padding=0),
}
AUGMENTATIONS = Registry("augmentation", _AUGMENTATIONS)


# From raw inputs to those of a model: bytes to floats, mean 0 and standard deviation 1.


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
        return channel_tensor(scale, torch.float32, device), channel_tensor(
            self.black, torch.float32, device
        )

    @property
    def black(self) -> tuple[float, ...]:
        """Value of a black pixel after normalisation, per channel."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))


@dataclass(frozen=True)
class NormalizeParts:
    """Normalises several inputs, each in its own way; inputs not named here stay as they are."""

    parts: Mapping[str, Normalize]

    def __call__(self, x: Tree) -> Tree:
        def one(path: str, leaf: Tensor) -> Tensor:
            return self.parts[path](leaf) if path in self.parts else leaf

        return tree_map_with_path(one, x)
