"""What clients tell of themselves where the topology looks, and what they have been told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.context import ClientGroup, PhaseContext
from quiverfl.engine.evaluation import metrics_of
from quiverfl.engine.history import Record
from quiverfl.engine.lifting import lift_point
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.seeds import hashed
from quiverfl.task import Point
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.recorded import as_text
from quiverfl.topologies.view import Looks, Told, View

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Sight:
    """The view of all clients, and what those of one shard say of the round they are in."""

    def __init__(
        self, looks: Looks, context: PhaseContext, method: Method, ids: Integers, clients: int
    ) -> None:
        self.looks, self.view = looks, View.nothing(looks, clients)
        self.telling: Told = np.full((len(ids), looks.width), np.nan, dtype=np.float32)
        """[rows, width]. A client that does not train says again what it said last."""
        self._context, self._personal, self._ids = context, lift_point(method.personal), ids

    def begin(self, state: Any, group: ClientGroup) -> Callable[[Any], None]:
        """Before clients train: their loss. What is returned wants the state they reach."""
        point = self._personal(state)
        if self.looks.loss:
            self.telling[group.rows, 0] = self._losses(point, group)
        return partial(self._note, point, group)

    def _losses(self, point: Point, group: ClientGroup) -> Floats:
        """On the clients' training data."""
        context, company = self._context, group.company
        if company is not None:
            group = replace(group, company=replace(company, test=company.train))
        found = metrics_of(
            context.task, context.program(), context.executor, context.examples, point, group
        )
        return found["loss"]

    def _note(self, begun: Point, group: ClientGroup, state: Any) -> None:
        """How far they came, and a sketch of where to."""
        if not (self.looks.norm or self.looks.sketch):
            return
        moved = (self._personal(state).shared - begun.shared).to("cpu", torch.float64).numpy()
        place = int(self.looks.loss)
        if self.looks.norm:
            self.telling[group.rows, place] = [np.sqrt(row @ row) for row in moved]
        if self.looks.sketch:
            # Row by row, each sum in the order of coordinates: the same wherever a client is.
            self.telling[group.rows, place + int(self.looks.norm) :] = [
                sketched(row, self._buckets, self._signs, self.looks.sketch) for row in moved
            ]

    @cached_property
    def _drawn(self) -> npt.NDArray[np.uint64]:
        size = self._context.task.shared_layout.size
        return hashed(self.looks.seed, "sketch", np.arange(size))

    @cached_property
    def _buckets(self) -> Integers:
        return ((self._drawn >> np.uint64(1)) % np.uint64(max(1, self.looks.sketch))).astype(
            np.int64
        )

    @cached_property
    def _signs(self) -> Floats:
        return np.where(self._drawn & np.uint64(1), 1.0, -1.0)

    def hear(self, round: int, graph: Graph, telling: Told) -> Record:
        """Everybody remembers what it was told; the record has who told whom."""
        self.view = self.view.after(round, graph, telling)
        return {"links": as_text(graph)}

    def rows(self) -> dict[str, Tensor]:
        """What this shard's clients know."""
        known = self.view.arrays()
        return {name: torch.from_numpy(array[self._ids]) for name, array in known.items()}

    def restore(self, known: Mapping[str, Tensor]) -> None:
        """Take back what this shard's clients knew."""
        arrays: dict[str, Any] = {n: array.copy() for n, array in self.view.arrays().items()}
        for name, array in arrays.items():
            rows = known.get(name)
            if rows is None or tuple(rows.shape) != (len(self._ids), *array.shape[1:]):
                raise QuiverError(
                    "the checkpoint does not have what clients told each other as this topology "
                    "looks at it: it was made with another topology or number of clients."
                )
            array[self._ids] = rows.cpu().numpy()
        self.view = View(self.looks, **arrays)
        self.telling = self.view.told[self._ids, self._ids].copy()


def sketched(row: Floats, buckets: Integers, signs: Floats, count: int) -> Floats:
    """A count sketch: every coordinate with its sign, added up in its bucket."""
    sums: Floats = np.bincount(buckets, weights=signs * row, minlength=count).astype(np.float64)
    return sums
