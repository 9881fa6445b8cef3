"""Crop and flip: equal to a plain loop, fair, and a pure function of the keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quiverfl.data.augmentation import AUGMENTATIONS, CropFlip
from quiverfl.seeds import key_hashes


def plain_loop(augment: CropFlip, x: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """One image and one pixel after the other."""
    images, channels, height, width = x.shape
    places = 2 * augment.padding + 1
    out = torch.empty_like(x)
    for n in range(images):
        key = int(keys[n])
        down = (key % 2**24) * places // 2**24
        right = (key // 2**24 % 2**24) * places // 2**24
        flip = augment.flip and key >= 2**63
        for c in range(channels):
            fill = augment.fill[c] if augment.fill else 0.0
            for i in range(height):
                for j in range(width):
                    row = i + down - augment.padding
                    column = (width - 1 - j if flip else j) + right - augment.padding
                    inside = 0 <= row < height and 0 <= column < width
                    out[n, c, i, j] = x[n, c, row, column] if inside else fill
    return out


@settings(max_examples=25, deadline=None)
@given(
    images=st.integers(1, 4),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    padding=st.integers(0, 3),
    flip=st.booleans(),
    filled=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equals_a_plain_loop(
    images: int, shape: tuple[int, int, int], padding: int, flip: bool, filled: bool, seed: int
) -> None:
    fill = tuple(float(-c - 1) for c in range(shape[0])) if filled else ()
    augment = CropFlip(padding, flip, fill)
    x = torch.randn(images, *shape, generator=torch.Generator().manual_seed(seed))
    keys = key_hashes(seed, "test", np.arange(images))
    before = x.clone()
    assert torch.equal(augment(x, keys), plain_loop(augment, x, keys))
    assert torch.equal(x, before)


def test_memory_layout_does_not_matter() -> None:
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    keys = key_hashes(0, "test", np.arange(5))
    last = x.to(memory_format=torch.channels_last)
    assert torch.equal(CropFlip()(x, keys), CropFlip()(last, keys))


def test_a_sample_depends_on_its_own_key_alone() -> None:
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    keys = key_hashes(0, "test", np.arange(6))
    together = CropFlip()(x, keys)
    apart = torch.cat([CropFlip()(x[i : i + 1], keys[i : i + 1]) for i in range(6)])
    assert torch.equal(together, apart)


def test_every_shift_and_both_directions_are_equally_likely() -> None:
    down, right, flips = CropFlip().draw_offsets(key_hashes(3, "test", np.arange(81_000)))
    cells = np.bincount(down * 9 + right, minlength=81)
    assert cells.sum() == 81_000
    # 1,000 expected per place; the standard deviation is 31.
    assert cells.min() > 1_000 - 5 * 32
    assert cells.max() < 1_000 + 5 * 32
    assert abs(flips.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(down, right)[0, 1]) < 0.02
    assert abs(np.corrcoef(down, flips)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("name", "padding", "flip"), [("crop_flip", 4, True), ("crop", 4, False), ("flip", 0, True)]
)
def test_the_names(name: str, padding: int, flip: bool) -> None:
    assert AUGMENTATIONS[name] == CropFlip(padding, flip)
