"""Scikit-learn's digits: 1,797 handwritten digits of 8×8 pixels that ship with the package.

They are in the order in which they were written: 14 preprinted forms, one after the other, whose
first rows are FORMS. Who wrote which is not recorded (two forms may be by the same writer), but a
form has one writer, so `natural` makes clients of them.
"""

from __future__ import annotations

import gzip
import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiverfl.data.dataset import Dataset, channel_statistics
from quiverfl.data.sources.train_test import train_and_test

HIGHEST = 16.0
FORMS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667)


def load_digits(test_share: float = 0.25) -> Dataset:
    """1×8×8 images on the scale of [0, 1]; the split into train and test is always the same."""
    rows = embedded()
    x = (rows[:, :-1].reshape(-1, 1, 8, 8) / HIGHEST).astype(np.float32)
    y = rows[:, -1].astype(np.int64)
    form = np.searchsorted(FORMS, np.arange(len(y)), side="right") - 1
    train, test = train_and_test(y, test_share)
    mean, std = channel_statistics(x[train])
    names = tuple(str(digit) for digit in range(10))
    parts = (x[train], y[train], x[test], y[test])
    dataset = Dataset("digits", *parts, 10, names, mean, std)
    # The forms follow from the rows, so the digest without them says as much; runs that were made
    # before they were known have it.
    return replace(
        dataset,
        train_owner=form[train],
        test_owner=form[test],
        owner_names=tuple(f"form {number}" for number in range(1, len(FORMS) + 1)),
        known_digest=dataset.digest,
    )


def embedded() -> NDArray[np.float64]:
    """64 pixels and the digit in each row.

    Read from the file in scikit-learn, since importing that takes a second of every run's start.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt", encoding="ascii") as lines:
                return np.loadtxt(lines, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
