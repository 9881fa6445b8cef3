"""Types that have no better home: arrays by what they hold, stages and metrics."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
AnyArray: TypeAlias = npt.NDArray[Any]

Stage: TypeAlias = Literal["local", "mixed"]
"""`local`: right after local training. `mixed`: right after communication."""

Metrics: TypeAlias = dict[str, Floats]
"""One number per client for every metric; NaN for a client without test data."""
