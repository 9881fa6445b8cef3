"""A data set and a partition → what each client holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.augmentation import AUGMENTATIONS, CropFlip
from quiverfl.data.dataset import Dataset, Inputs, Integers
from quiverfl.data.federated import Augment, FederatedData, Split
from quiverfl.data.partition import Partition
from quiverfl.errors import QuiverError, nearest


@dataclass(frozen=True)
class Normalize:
    """To float32, bytes on the scale of [0, 1]; then (x - mean) / std per channel (axis 1)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        unit = 255.0 if x.dtype == torch.uint8 else 1.0
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        scale = torch.tensor([1 / (unit * std) for std in self.std], device=x.device)
        shift = torch.tensor(self.black, device=x.device)
        return x.to(torch.float32) * scale.float().view(shape) + shift.float().view(shape)

    @property
    def black(self) -> tuple[float, ...]:
        """What a black pixel becomes, per channel."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))


def federate(
    dataset: Dataset, partition: Partition, augment: str | Augment | None = None
) -> FederatedData:
    """What each client holds: images stay bytes until they are used, floats are normalised now.

    `augment` is a name in AUGMENTATIONS or one's own function, applied in training alone.
    """
    channels = dataset.train_x.shape[1] if dataset.train_x.ndim > 1 else 1
    mean = dataset.mean or (0.0,) * channels
    std = dataset.std or (1.0,) * channels
    normalize = Normalize(mean, std)
    test_x, test_y = dataset.test_x, dataset.test_y
    if partition.held_out:
        test_x, test_y = dataset.train_x, dataset.train_y
    train = _split(dataset.train_x, dataset.train_y, partition.train)
    test = _split(test_x, test_y, partition.test)
    chosen = _augmentation(dataset, normalize, augment)
    if dataset.train_x.dtype == np.uint8:
        return FederatedData(train, test, dataset.classes, normalize, chosen)
    if dataset.mean:
        train, test = (replace(part, x=normalize(part.x)) for part in (train, test))
    return FederatedData(train, test, dataset.classes, None, chosen)


def _split(x: Inputs, y: Integers, shares: Sequence[Integers]) -> Split:
    rows = np.concatenate(shares)
    offsets = np.cumsum([0, *(len(share) for share in shares)]).astype(np.int64)
    return Split(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]), offsets)


def _augmentation(
    dataset: Dataset, normalize: Normalize, augment: str | Augment | None
) -> Augment | None:
    if isinstance(augment, str):
        if augment not in AUGMENTATIONS:
            raise QuiverError(
                f"unknown augmentation {augment!r}; {nearest(augment, AUGMENTATIONS)}"
            )
        augment = AUGMENTATIONS[augment]
    if augment is None:
        return None
    if isinstance(augment, CropFlip):
        if not dataset.is_image:
            raise QuiverError(
                f"random crop and flip need images [channels, height, width]; {dataset.name} has "
                f"inputs of shape {list(dataset.input_shape)}: set data.augment = 'none'."
            )
        if not augment.fill:
            return replace(augment, fill=normalize.black)
    return augment
