"""The state of methods that average without a denominator."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PlainState(NamedTuple):
    u: Tensor  # shared parameters
    v: Tensor  # personal parameters
