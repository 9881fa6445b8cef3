"""Byte images taken in one go are bit for bit what is prepared and augmented step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quiverfl.data.augmentation import AUGMENTATIONS, CropFlip
from quiverfl.data.federated import FederatedData
from quiverfl.data.normalize import Normalize
from quiverfl.engine.byte_images import SOURCE, ByteImages
from quiverfl.engine.examples import Examples
from quiverfl.native.library import why_not
from quiverfl.seeds import hashed

NORMALIZE = Normalize((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))


def images(augment: CropFlip | None) -> FederatedData:
    draw = np.random.default_rng(0)
    pairs = [
        (draw.integers(0, 256, (20, 3, 9, 7), dtype=np.uint8), draw.integers(0, 10, 20))
        for _ in range(3)
    ]
    if augment is not None:
        augment = replace(augment, fill=NORMALIZE.black)
    return FederatedData.from_arrays(pairs, pairs, classes=10, prepare=NORMALIZE, augment=augment)


@pytest.mark.parametrize("name", list(AUGMENTATIONS))
@pytest.mark.parametrize("augmented", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_equal_to_the_last_bit(
    name: str, augmented: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("quiverfl.engine.byte_images.why_not", lambda *_: "none here")
    elif why_not(*SOURCE) is not None:
        pytest.skip("no C compiler")
    data = images(AUGMENTATIONS[name])
    cpu = torch.device("cpu")
    plain = Examples(data.train, data, torch.float32, cpu)
    last = Examples(data.train, data, torch.float32, cpu).laid_out(torch.channels_last)
    rows = np.array([2, 0])
    samples = np.random.default_rng(1).integers(0, 20, (2, 40))
    keys = hashed(5, "augment", np.arange(80).reshape(2, 40)) if augmented else None
    x, y = plain.gather(rows, samples, keys)
    fast, labels = last.gather(rows, samples, keys)
    assert torch.equal(fast, x)
    assert torch.equal(labels, y)
    assert fast[0].is_contiguous(memory_format=torch.channels_last)


def test_only_where_the_numbers_are_the_same() -> None:
    data = images(CropFlip())
    x, last = data.train.x, torch.channels_last
    assert ByteImages.of(x, data, torch.float32, last) is not None
    assert ByteImages.of(x, data, torch.float64, last) is None
    assert ByteImages.of(x, data, torch.float32, torch.contiguous_format) is None
    assert ByteImages.of(x.float(), data, torch.float32, last) is None
    grey = replace(data, augment=CropFlip(fill=(0.0, 0.0, 0.0)))
    assert ByteImages.of(x, grey, torch.float32, last) is None
    own = replace(data, augment=lambda x, keys: x)
    assert ByteImages.of(x, own, torch.float32, last) is None
    assert ByteImages.of(x, replace(data, prepare=torch.Tensor.float), torch.float32, last) is None


def test_an_image_that_is_not_there_is_refused() -> None:
    data = images(CropFlip())
    found = ByteImages.of(data.train.x, data, torch.float32, torch.channels_last)
    assert found is not None
    for place in (-1000, 60):
        with pytest.raises(IndexError):
            found.take(np.array([0, place]), None)
