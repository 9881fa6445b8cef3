"""Your data: a function that returns a Dataset. Replace the made-up one."""

import numpy as np

from quiverfl.data.dataset import Dataset


def load() -> Dataset:
    """Points around four centres, two of each class."""
    random = np.random.default_rng(0)
    centres = random.normal(0, 2, size=(4, 6))

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        which = random.integers(0, 4, count)
        x = centres[which] + random.normal(size=(count, 6))
        return x.astype(np.float32), (which % 2).astype(np.int64)

    train_x, train_y = draw(800)
    test_x, test_y = draw(400)
    return Dataset("points", train_x, train_y, test_x, test_y, classes=2)
