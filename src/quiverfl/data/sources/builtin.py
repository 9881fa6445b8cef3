"""Scikit-learn's digits: 1,797 handwritten digits of 8×8 pixels that ship with the package.

They are in the order in which they were written: 14 preprinted forms, one after the other, whose
first rows are FORMS. Who wrote which is not recorded (two forms may be by the same writer), but a
form has one writer, so `natural` makes clients of them.
"""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiverfl.data.dataset import Dataset, Inputs, compute_channel_statistics
from quiverfl.data.sources.arrays import split_train_test
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream
from quiverfl.types import Integers

HIGHEST = 16.0
FORMS = (0, 130, 256, 386, 516, 646, 776, 906, 1029, 1157, 1287, 1415, 1545, 1667)


def load_digits(test_share: float = 0.25) -> Dataset:
    """1×8×8 images on the scale of [0, 1]; the split into train and test is always the same."""
    rows = load_builtin()
    x = (rows[:, :-1].reshape(-1, 1, 8, 8) / HIGHEST).astype(np.float32)
    y = rows[:, -1].astype(np.int64)
    form = np.searchsorted(FORMS, np.arange(len(y)), side="right") - 1
    train, test = split_train_test(y, test_share)
    mean, std = compute_channel_statistics(x[train])
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


def load_builtin() -> NDArray[np.float64]:
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


# Made-up images: a mixture of Gaussians, one centre per class, for tests and benchmarks.


DISTANCE = 4.0


def load_synthetic(
    shape: Sequence[int] = (1, 8, 8),
    classes: int = 10,
    train: int = 5000,
    test: int = 1000,
    spread: float = 1.0,
    data_seed: int = 0,
) -> Dataset:
    """x = centre of the class + spread · noise, in float32, equally many of every class.

    Two centres lie about 4 apart however large the images are, so `spread`, the standard deviation
    of the noise, decides alone how much the classes overlap.
    """
    for name, value in {"classes": classes, "train": train}.items():
        if value < 1:
            raise QuiverError(f"data.options.{name} = {value}: it must be at least 1.")
    if not shape or min(shape) < 1:
        raise QuiverError(f"data.options.shape = {list(shape)}: every side must be at least 1.")
    if test < 0 or spread < 0:
        raise QuiverError(
            f"data.options.test = {test}, data.options.spread = {spread}: neither may be negative."
        )
    size = int(np.prod(shape))
    scale = DISTANCE / np.sqrt(2 * size)
    centres = scale * stream(data_seed, "synthetic-centres").standard_normal((classes, size))
    parts: list[tuple[Inputs, Integers]] = []
    for number, count in enumerate((train, test)):
        generator = stream(data_seed, "synthetic-examples", number)
        y = generator.permutation(np.arange(count, dtype=np.int64) % classes)
        x = centres[y] + spread * generator.standard_normal((count, size))
        parts.append((x.astype(np.float32).reshape(count, *shape), y))
    (train_x, train_y), (test_x, test_y) = parts
    names = tuple(str(label) for label in range(classes))
    return Dataset("synthetic", train_x, train_y, test_x, test_y, classes, names)
