"""The examples of a shard's clients, ready to be gathered into batches of stacked clients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData, Split
from quiverfl.engine.byte_images import ByteImages
from quiverfl.seeds import Hashes

Integers = npt.NDArray[np.int64]


class Examples:
    """One split. Inputs that are floats already are cast once; others when they are gathered."""

    def __init__(
        self,
        split: Split,
        data: FederatedData,
        dtype: torch.dtype,
        device: torch.device,
        image_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """`image_format` is how images are best handed over; numbers do not depend on it."""

        def cast(tensor: Tensor) -> Tensor:
            whole = tensor.is_floating_point() and data.prepare is None
            return tensor.to(device=device, dtype=dtype if whole else None)

        y = split.y.to(device=device, dtype=dtype if split.y.is_floating_point() else None)
        self._split = replace(split, x=cast(split.x), y=y)
        self._prepare, self._augment = data.prepare, data.augment
        self._dtype, self._device = dtype, device
        self._images = ByteImages.of(self._split.x, data, dtype, image_format)

    @property
    def sizes(self) -> Integers:
        return self._split.sizes

    @property
    def augmented(self) -> bool:
        return self._augment is not None

    def gather(
        self, rows: Integers, samples: Integers, keys: Hashes | None = None
    ) -> tuple[Tensor, Tensor]:
        """Inputs and targets [k, n, …] of the samples [k, n] of the clients in these rows."""
        flat = (self._split.offsets[rows][:, None] + samples).ravel()
        places = torch.from_numpy(flat).to(self._device)
        if self._images is not None:
            x = self._images.take(flat, keys)
        else:
            x = self._ready(self._split.x.index_select(0, places), keys)
        y = self._split.y.index_select(0, places)
        return x.view(*samples.shape, *x.shape[1:]), y.view(*samples.shape, *y.shape[1:])

    def _ready(self, x: Tensor, keys: Hashes | None) -> Tensor:
        if self._prepare is not None:
            x = self._prepare(x)
        x = x.to(self._dtype) if x.is_floating_point() else x
        if self._augment is not None and keys is not None:
            x = self._augment(x, keys.ravel())
        return x
