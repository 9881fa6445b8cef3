"""The last locally trained model of the clients that do not train now: what stage `local` shows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from quiverfl.engine.evaluation import Metrics
from quiverfl.task import Point

Integers = npt.NDArray[np.int64]


class LocalModels:
    """By row; and their metrics, so that a model which did not change is evaluated once."""

    def __init__(self) -> None:
        self.points: dict[int, Point] = {}
        self.metrics: dict[int, dict[str, float]] = {}

    def remember(self, rows: Integers, stacked: Point) -> None:
        for place, row in enumerate(rows):
            self.points[int(row)] = Point(*(part[place].clone() for part in stacked))

    def forget(self, rows: Integers) -> None:
        for row in rows:
            self.points.pop(int(row), None)
            self.metrics.pop(int(row), None)

    def replacing(self, rows: Integers, current: Callable[[Integers], Point]) -> Point:
        """The models of these rows: remembered ones, and for the others what they are now."""
        remembered = [int(row) in self.points for row in rows]
        if not any(remembered):
            return current(rows)
        points = [
            self.points[int(row)] if kept else Point(*(part[0] for part in current(row[None])))
            for row, kept in zip(rows, remembered, strict=True)
        ]
        return Point(*(torch.stack(parts) for parts in zip(*points, strict=True)))

    def evaluated(self, found: Metrics) -> None:
        for row in self.points:
            self.metrics[row] = {name: float(values[row]) for name, values in found.items()}
