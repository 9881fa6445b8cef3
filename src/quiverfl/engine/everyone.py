"""What an exchange needs of all clients' rows, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from quiverfl.engine.mixing import NARROWEST, mix
from quiverfl.topologies.graph import Graph


class Everyone(Protocol):
    """Given the rows that are here, an answer about the rows of all, the same to the bit wherever
    they are. On several ranks all of them must ask the same, in the same order."""

    def mix(self, graph: Graph, leaf: Tensor, multiple: int = NARROWEST) -> Tensor:
        """What the rows that are here receive, as `mixing.mix` says it."""

    def rows(self, own: Tensor) -> Tensor:
        """Everybody's rows, in the order of clients."""

    def summed(
        self, flat: Tensor, width: int, work: Callable[[Tensor], Tensor], total: Tensor
    ) -> Tensor:
        """`total` + Σ work(everybody's rows of `width` columns), added in the order of columns."""


class Here:
    """All clients are in one place."""

    def mix(self, graph: Graph, leaf: Tensor, multiple: int = NARROWEST) -> Tensor:
        return mix(graph, leaf, multiple)

    def rows(self, own: Tensor) -> Tensor:
        return own

    def summed(
        self, flat: Tensor, width: int, work: Callable[[Tensor], Tensor], total: Tensor
    ) -> Tensor:
        for columns in torch.split(flat, width, dim=1):
            total = total + work(columns)
        return total


HERE = Here()
