"""Byte images with their channels last: gathered, cropped, flipped and normalised in one go.

Convolutions on a CPU are fastest with this layout. A row of a cut is one copy, and what is moved
are bytes, a quarter of the memory; the result is bit for bit what `prepare` and `augment` give. One
compiled pass does all of it where there is a C compiler, a few of NumPy's and PyTorch's elsewhere.
For a model that normalises bytes by itself the images stay bytes.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.augmentation import CropFlip, Normalize
from quiverfl.data.federated import FederatedData
from quiverfl.seeds import Hashes
from quiverfl.support.compiler import load_library, why_not_compiled
from quiverfl.types import Integers

Bytes = npt.NDArray[np.uint8]

SOURCE = ("byte_images", "-ffp-contract=off")


class ByteImages:
    """Images [n, channels, height, width] of one split: a copy of their bytes with a black rim."""

    def __init__(
        self, x: Tensor, normalize: Normalize, augment: CropFlip | None, as_bytes: bool = False
    ) -> None:
        self._draws, self._side = augment, 0 if augment is None else augment.padding
        count, channels, height, width = x.shape
        self._shape, self._image = (height, width, channels), (channels, height, width)
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
        scale, shift = (factor.repeat(width) for factor in normalize.factors(255.0))
        self.factors, self.as_bytes = (scale, shift), as_bytes
        self._compiled = why_not_compiled(*SOURCE) is None  # the bits are the same
        self._kind = torch.uint8 if as_bytes else torch.float32
        self._at = (*(() if as_bytes else (scale.data_ptr(), shift.data_ptr())), padded.ctypes.data)
        flips = augment is not None and augment.flip
        self._sizes = (*padded.shape, self._side, flips)

    @classmethod
    def of(
        cls,
        x: Tensor,
        data: FederatedData,
        dtype: torch.dtype,
        layout: torch.memory_format,
        as_bytes: bool = False,
    ) -> ByteImages | None:
        """None where they are prepared or augmented in another way, or wanted otherwise."""
        normalize, augment = data.prepare, data.augment
        wanted = dtype == torch.float32 and layout == torch.channels_last
        if not wanted or x.dtype != torch.uint8 or x.ndim != 4 or x.device.type != "cpu":
            return None
        if type(normalize) is not Normalize or len(normalize.mean) != x.shape[1]:
            return None
        if augment is not None and type(augment) is not CropFlip:
            return None
        if augment is not None and augment.fill != normalize.black:
            return None  # padding with bytes of 0 is padding with what black becomes
        return cls(x, normalize, augment, as_bytes)

    def take(self, places: Tensor, keys: Hashes | None) -> Tensor:
        """The images at these places [k, n], ready for the model, or their bytes: [k, n, …].

        They are augmented where there are keys.
        """
        keys = None if self._draws is None else keys
        taken = self._at_once if self._compiled else self._in_passes
        images = taken(places, keys).permute(0, 3, 1, 2)
        return images.view(*places.shape, *self._image)

    def _at_once(self, places: Tensor, keys: Hashes | None) -> Tensor:
        places, count = places.contiguous(), places.numel()
        assert places.dtype == torch.int64
        out = torch.empty((count, *self._shape), dtype=self._kind)
        if keys is not None:
            keys = np.ascontiguousarray(keys)
        wanted = places.data_ptr(), None if keys is None else keys.ctypes.data, count
        if not self._call(out.data_ptr(), *self._at, *wanted, *self._sizes):
            raise IndexError(f"there are {len(self._padded)} images")
        return out

    @cached_property
    def _call(self) -> Any:
        """The compiled pass."""
        library = load_library(*SOURCE)
        function = library.cuts if self.as_bytes else library.crops
        pointers = 4 if self.as_bytes else 6
        function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * 7
        return function

    def _in_passes(self, places: Tensor, keys: Hashes | None) -> Tensor:
        down = right = np.full(places.numel(), self._side)
        flips = np.zeros(places.numel(), dtype=bool)
        if keys is not None and self._draws is not None:
            down, right, flips = self._draws.draw_offsets(keys.ravel())
        images = self._cut(places.numpy().ravel(), down, right[:, None])
        flipped = np.flatnonzero(flips)
        images[flipped] = torch.from_numpy(images[flipped]).flip(2).numpy()
        floats = torch.from_numpy(images)
        if not self.as_bytes:
            scale, shift = self.factors
            rows = floats.view(-1, len(scale)).to(torch.float32)
            floats = rows.mul_(scale).add_(shift)
        return floats.view(-1, *self._shape)

    def _cut(self, places: Integers, down: Integers, right: Integers) -> Bytes:
        """[n, height, width, channels], so far down and to the right in the padded images."""
        rows = down[:, None] + np.arange(self._shape[0])
        cut: Bytes = self._runs[places[:, None], rows, right].view(np.uint8)
        return cut.reshape(len(places), *self._shape)
