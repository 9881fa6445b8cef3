"""Made-up images: a mixture of Gaussians, one centre per class, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quiverfl.data.dataset import Dataset, Inputs, Integers
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream

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
