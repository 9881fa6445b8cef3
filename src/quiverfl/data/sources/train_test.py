"""Train and test for sources that come in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.data.dataset import Integers
from quiverfl.errors import QuiverError
from quiverfl.seeds import stream


def train_and_test(groups: npt.NDArray[Any], test_share: float) -> tuple[Integers, Integers]:
    """Positions for training and for testing, the same share of every group, always the same.

    Groups are classes or owners, by any value; each keeps something for training. The split
    belongs to the data set, not to an experiment, so it does not depend on its seed.
    """
    if not 0 <= test_share < 1:
        raise QuiverError(f"data.options.test_share = {test_share}: it must be in [0, 1).")
    chosen = np.zeros(len(groups), dtype=bool)
    _, numbers = np.unique(groups, return_inverse=True)
    for number in range(int(numbers.max(initial=-1)) + 1):
        members = np.flatnonzero(numbers == number)
        order = stream(0, "train-and-test", number).permutation(members)
        chosen[order[: min(round(test_share * len(members)), len(members) - 1)]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
