"""Byte images with their channels last: gathered, cropped, flipped and normalised in one go.

Convolutions on a CPU are fastest with this layout. A row of a cut is one copy, and what is moved
are bytes, a quarter of the memory; the result is bit for bit what `prepare` and `augment` give. One
compiled pass does all of it where there is a C compiler, a few of NumPy's and PyTorch's elsewhere.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.augmentation import CropFlip
from quiverfl.data.federated import FederatedData
from quiverfl.data.normalize import Normalize
from quiverfl.native.library import load, why_not
from quiverfl.seeds import Hashes

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

SOURCE = ("byte_images", "-ffp-contract=off")


class ByteImages:
    """Images [n, channels, height, width] of one split: a copy of their bytes with a black rim."""

    def __init__(self, x: Tensor, normalize: Normalize, augment: CropFlip | None) -> None:
        self._draws, self._side = augment, 0 if augment is None else augment.padding
        count, channels, height, width = x.shape
        self._shape = (height, width, channels)
        rim = ((0, 0), (self._side, self._side), (self._side, self._side), (0, 0))
        padded = np.ascontiguousarray(np.pad(x.permute(0, 2, 3, 1).numpy(), rim))
        self._padded = padded
        # Every run of `width` pixels as one item that begins in its first: a cut is one per row.
        self._runs: np.ndarray[tuple[int, ...], np.dtype[np.void]] = np.ndarray(
            (count, height + 2 * self._side, 2 * self._side + 1),
            np.dtype((np.void, width * channels)),
            padded,
            strides=padded.strides[:3],
        )
        # One number for each place of a row: a channel at a time is many times slower.
        scale, shift = normalize.factors(255.0)
        self._scale, self._shift = scale.repeat(width), shift.repeat(width)
        self._compiled = why_not(*SOURCE) is None  # the bits are the same

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

    def take(self, places: Integers, keys: Hashes | None) -> Tensor:
        """These images, ready for the model; augmented where there are keys."""
        if self._draws is None or keys is None:
            middle = np.full(len(places), self._side)
            down, right, flips = middle, middle, np.zeros(len(places), dtype=bool)
        else:
            down, right, flips = self._draws.draws(keys.ravel())
        taken = self._at_once if self._compiled else self._in_passes
        return taken(places, down, right, flips).permute(0, 3, 1, 2)

    def _at_once(
        self, places: Integers, down: Integers, right: Integers, flips: Booleans
    ) -> Tensor:
        if len(places) and not 0 <= places.min() <= places.max() < len(self._padded):
            raise IndexError(f"there are {len(self._padded)} images")
        found = torch.empty(len(places), *self._shape)
        whole = [np.ascontiguousarray(part, dtype=np.int64) for part in (places, down, right)]
        arrays = (self._padded, *whole, np.ascontiguousarray(flips, dtype=np.uint8))
        pointers = [array.ctypes.data for array in arrays]
        pointers += [tensor.data_ptr() for tensor in (self._scale, self._shift, found)]
        sizes = (len(places), *self._padded.shape[1:3], *self._shape)
        load(*SOURCE).crops(*map(ctypes.c_void_p, pointers), *map(ctypes.c_int64, sizes))
        return found

    def _in_passes(
        self, places: Integers, down: Integers, right: Integers, flips: Booleans
    ) -> Tensor:
        images = self._cut(places, down, right[:, None])
        flipped = np.flatnonzero(flips)
        images[flipped] = torch.from_numpy(images[flipped]).flip(2).numpy()
        rows = torch.from_numpy(images).view(-1, len(self._scale)).to(torch.float32)
        return rows.mul_(self._scale).add_(self._shift).view(images.shape)

    def _cut(self, places: Integers, down: Integers, right: Integers) -> Bytes:
        """[n, height, width, channels], so far down and to the right in the padded images."""
        rows = down[:, None] + np.arange(self._shape[0])
        cut: Bytes = self._runs[places[:, None], rows, right].view(np.uint8)
        return cut.reshape(len(places), *self._shape)
