"""The examples of a shard's clients, ready to be gathered into batches of stacked clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.augmentation import CropFlip
from quiverfl.data.federated import FederatedData, Split
from quiverfl.engine.byte_images import ByteImages
from quiverfl.engine.picks import Picks, moved
from quiverfl.seeds import Hashes
from quiverfl.trees import Tree, mapped

Integers = npt.NDArray[np.int64]


class Examples:
    """One split. Inputs that are floats already are cast once; others when they are gathered."""

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

        x = mapped(lambda leaf: cast(leaf, data.prepare is None), split.x)
        self._split = replace(split, x=x, y=mapped(cast, split.y))
        self._prepare, self._augment = data.prepare, data.augment
        self._dtype, self._device = dtype, device
        self._data = data
        self._images: ByteImages | None = None

    def laid_out(self, image_format: torch.memory_format) -> Examples:
        """The same, which hands images over in this format; numbers do not depend on it."""
        if isinstance(self._split.x, Tensor):
            self._images = ByteImages.of(self._split.x, self._data, self._dtype, image_format)
        return self

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
        places = torch.from_numpy(self._split.offsets[rows][:, None] + samples)
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

        if self._images is not None:
            x: Tree = self._images.take(places.numpy(), picks.keys)
        else:
            x = self._ready(mapped(taken, self._split.x), picks)
        return mapped(shaped, x), mapped(lambda leaf: shaped(taken(leaf)), self._split.y)

    def _ready(self, x: Tree, picks: Picks) -> Tree:
        if self._prepare is not None:
            x = self._prepare(x)
        x = mapped(lambda leaf: leaf.to(self._dtype) if leaf.is_floating_point() else leaf, x)
        if type(self._augment) is CropFlip and picks.cuts:
            return self._augment.cut(x, *picks.cuts)
        if self._augment is not None and picks.keys is not None:
            return self._augment(x, picks.keys.ravel())
        return x
