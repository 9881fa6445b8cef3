"""Byte images with their channels last: gathered, cropped, flipped and normalised in one go.

As convolutions on a CPU like them. A row of a cut is one copy, and what is moved are bytes, a
quarter of the memory; what comes out is bit for bit what `prepare` and `augment` make of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.augmentation import CropFlip
from quiverfl.data.federated import FederatedData, Normalize
from quiverfl.seeds import Hashes


class ByteImages:
    """Images [n, channels, height, width] of one split, with a copy of their bytes."""

    def __init__(self, x: Tensor, normalize: Normalize, augment: CropFlip | None) -> None:
        self._bytes = x.permute(0, 2, 3, 1).contiguous()
        self._augment = augment
        # One number for each place of a row: a channel at a time is many times slower.
        width = x.shape[3]
        scale, shift = normalize.factors(255.0)
        self._scale, self._shift = scale.repeat(width), shift.repeat(width)

    @classmethod
    def of(
        cls, x: Tensor, data: FederatedData, dtype: torch.dtype, layout: torch.memory_format
    ) -> ByteImages | None:
        """None where they are prepared or augmented in another way, or wanted otherwise."""
        normalize, augment = data.prepare, data.augment
        wanted = dtype == torch.float32 and layout == torch.channels_last
        if not wanted or x.dtype != torch.uint8 or x.ndim != 4 or x.device.type != "cpu":
            return None
        if type(normalize) is not Normalize or not isinstance(augment, CropFlip | None):
            return None
        if augment is not None and augment.fill != normalize.black:
            return None  # padding with bytes of 0 is padding with what black becomes
        return cls(x, normalize, augment)

    def take(self, places: Tensor, keys: Hashes | None) -> Tensor:
        """These images, ready for the model; augmented where there are keys."""
        images = self._bytes.index_select(0, places)
        if self._augment is not None and keys is not None:
            images = torch.from_numpy(cut_and_flipped(self._augment, images.numpy(), keys.ravel()))
        count, height, width, channels = images.shape
        rows = images.view(count * height, width * channels).to(torch.float32)
        ready = rows.mul_(self._scale).add_(self._shift)
        return ready.view(count, height, width, channels).permute(0, 3, 1, 2)


def cut_and_flipped(
    augment: CropFlip, images: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], keys: Hashes
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Crop and flip of bytes [n, height, width, channels], padded with 0."""
    down, right, flips = augment.draws(keys)
    count, height, width, channels = images.shape
    side = augment.padding
    padded = np.zeros((count, height + 2 * side, width + 2 * side, channels), dtype=np.uint8)
    padded[:, side : side + height, side : side + width] = images
    # Every run of `width` pixels as one item that begins in its first: a cut is one per row.
    run = np.dtype((np.void, width * channels))
    places = (count, height + 2 * side, 2 * side + 1)
    runs: np.ndarray[tuple[int, ...], np.dtype[np.void]] = np.ndarray(
        places, run, padded, strides=padded.strides[:3]
    )
    rows = down[:, None] + np.arange(height)
    cut = runs[np.arange(count)[:, None], rows, right[:, None]].view(np.uint8)
    cut = cut.reshape(images.shape)
    flipped = np.flatnonzero(flips)
    if len(flipped):
        cut[flipped] = torch.from_numpy(cut[flipped]).flip(2).numpy()
    return cut
