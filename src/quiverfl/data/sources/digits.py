"""Scikit-learn's digits: 1,797 handwritten digits of 8×8 pixels that ship with the package."""

from __future__ import annotations

import numpy as np

from quiverfl.data.dataset import Dataset, channel_statistics
from quiverfl.data.sources.train_test import train_and_test

HIGHEST = 16.0


def load_digits(test_share: float = 0.25) -> Dataset:
    """1×8×8 images on the scale of [0, 1]; the split into train and test is always the same."""
    # Here because it takes a second to import and only this source needs it.
    from sklearn.datasets import load_digits as embedded

    bunch = embedded()
    x = (bunch.images[:, None] / HIGHEST).astype(np.float32)
    y = bunch.target.astype(np.int64)
    train, test = train_and_test(y, test_share)
    mean, std = channel_statistics(x[train])
    names = tuple(str(digit) for digit in range(10))
    return Dataset("digits", x[train], y[train], x[test], y[test], 10, names, mean, std)
