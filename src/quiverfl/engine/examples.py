"""The examples of a shard's clients, ready to be gathered into batches of stacked clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.augmentation import CropFlip
from quiverfl.data.federated import FederatedData
from quiverfl.data.split import Split
from quiverfl.engine.byte_images import ByteImages
from quiverfl.engine.picks import Picks, moved
from quiverfl.memory import forget_pages
from quiverfl.seeds import Hashes
from quiverfl.trees import Tree, mapped

Integers = npt.NDArray[np.int64]


READ = 64 << 20
"""Bytes of a file that may be in memory before its pages are forgotten."""
AROUND = 2 << 20
"""What the system may bring into memory around a byte that is read: a large page."""


class Examples:
    """One split. Inputs that are floats already are cast once; others when they are gathered.

    Inputs that were left where they lie are read when they are gathered, and only then cast.
    """

    def __init__(
        self,
        split: Split,
        data: FederatedData,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def cast(tensor: Tensor, prepared: bool = True) -> Tensor:
            whole = tensor.is_floating_point() and prepared
            return tensor.to(device=device, dtype=dtype if whole else None)

        x = split.x
        if split.places is None:
            x = mapped(lambda leaf: cast(leaf, data.prepare is None), x)
        self._split = replace(split, x=x, y=mapped(cast, split.y))
        self._prepare, self._augment = data.prepare, data.augment
        self._dtype, self._device = dtype, device
        self._data = data
        self._images: ByteImages | None = None
        self._format = torch.contiguous_format
        self._read = 0

    def laid_out(self, image_format: torch.memory_format, as_bytes: bool = False) -> Examples:
        """The same, which hands images over in this format; numbers do not depend on it.

        `as_bytes`: they stay bytes where they can; the model must then be told `byte_factors`.
        """
        self._format = image_format
        if self._split.places is None:
            self._images = self._as_images(self._split.x, as_bytes)
        return self

    def _as_images(self, x: Tree, as_bytes: bool = False) -> ByteImages | None:
        form = (self._dtype, self._format, as_bytes)
        return ByteImages.of(x, self._data, *form) if isinstance(x, Tensor) else None

    @property
    def byte_factors(self) -> tuple[Tensor, Tensor] | None:
        """What the model has to multiply by and to add, for each place of a line, if it is handed
        bytes."""
        found = self._images
        return found.factors if found is not None and found.as_bytes else None

    @property
    def sizes(self) -> Integers:
        return self._split.sizes

    @property
    def augmented(self) -> bool:
        return self._augment is not None

    def gather(
        self, rows: Integers, samples: Integers, keys: Hashes | None = None
    ) -> tuple[Tree, Tree]:
        """Inputs and targets [k, n, …] of the samples [k, n] of the clients in these rows."""
        (picks,) = moved([self.pick(rows, samples, keys)], self._device)
        return self.take(picks)

    def pick(self, rows: Integers, samples: Integers, keys: Hashes | None = None) -> Picks:
        """Where these samples lie, and what augmentation draws for them."""
        flat = self._split.offsets[rows][:, None] + samples
        places, left = torch.from_numpy(flat), self._split.places
        if left is not None:
            return Picks(places, keys=keys, elsewhere=left[flat.ravel()])
        if keys is None or self._images is not None or type(self._augment) is not CropFlip:
            return Picks(places, keys=keys)
        draws = self._augment.draws(keys.ravel())
        return Picks(places, cuts=tuple(torch.from_numpy(draw) for draw in draws))

    def take(self, picks: Picks) -> tuple[Tree, Tree]:
        """Inputs and targets [k, n, …] of what was picked, whose places are on the device."""
        places = picks.places.reshape(-1)

        def taken(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, places)

        def shaped(leaf: Tensor) -> Tensor:
            return leaf.view(*picks.places.shape, *leaf.shape[1:])

        y = mapped(lambda leaf: shaped(taken(leaf)), self._split.y)
        if self._images is not None:
            return self._images.take(picks.places, picks.keys), y
        if picks.elsewhere is not None:
            x = self._fetched(picks.elsewhere, picks)
        else:
            x = self._ready(mapped(taken, self._split.x), picks)
        return mapped(shaped, x), y

    def _fetched(self, places: Integers, picks: Picks) -> Tree:
        """From where the inputs lie."""
        index = torch.from_numpy(places)
        raw = mapped(lambda leaf: self._rows(leaf, index), self._split.x)
        images = self._as_images(raw)
        if images is not None:
            return images.take(torch.arange(len(places))[None], picks.keys)[0]
        return self._ready(mapped(lambda leaf: leaf.to(self._device), raw), picks)

    def _rows(self, leaf: Tensor, index: Tensor) -> Tensor:
        """Rows of what may lie in a file, whose pages are forgotten every now and then."""
        if not self._split.files or leaf.nbytes <= READ:
            return leaf.index_select(0, index)
        found = leaf.new_empty(len(index), *leaf.shape[1:])
        step = max(1, READ // (leaf[0].nbytes + AROUND))
        for start in range(0, len(index), step):
            some = slice(start, start + step)
            torch.index_select(leaf, 0, index[some], out=found[some])
            self._read += len(index[some])
            if self._read >= step:
                self._read = 0
                for file in self._split.files:
                    forget_pages(file)
        return found

    def _ready(self, x: Tree, picks: Picks) -> Tree:
        if self._prepare is not None:
            x = self._prepare(x)
        x = mapped(lambda leaf: leaf.to(self._dtype) if leaf.is_floating_point() else leaf, x)
        if type(self._augment) is CropFlip and picks.cuts:
            return self._augment.cut(x, *picks.cuts)
        if self._augment is not None and picks.keys is not None:
            return self._augment(x, picks.keys.ravel())
        return x
