"""Train and test for sources that come as one heap."""

from __future__ import annotations

import numpy as np

from quiverfl.data.dataset import Integers
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream


def train_and_test(labels: Integers, test_share: float) -> tuple[Integers, Integers]:
    """Positions for training and for testing, the same share of every class, always the same.

    The split belongs to the data set, not to an experiment, so it does not depend on its seed.
    """
    if not 0 <= test_share < 1:
        raise QuiverError(f"data.options.test_share = {test_share}: it must be in [0, 1).")
    test: list[Integers] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = stream(0, "train-and-test", int(label)).permutation(members)
        test.append(order[: round(test_share * len(members))])
    chosen = np.sort(np.concatenate(test)) if test else np.empty(0, dtype=np.int64)
    rest = np.setdiff1d(np.arange(len(labels)), chosen)
    return rest, chosen
