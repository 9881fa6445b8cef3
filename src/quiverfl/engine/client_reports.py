"""Reports of clients to each other, from which an adaptive topology chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.collective import World
from quiverfl.engine.evaluation import compute_metrics
from quiverfl.engine.history import Record
from quiverfl.engine.local.context import ClientGroup, PhaseContext
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method
from quiverfl.seeds import key_hashes
from quiverfl.task import Params
from quiverfl.topologies.analysis import graph_to_text
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.reports import ReportSpec, ReportValues, ReportView
from quiverfl.types import Floats, Integers


class ReportExchange:
    """Reports that each client has received, and those of this shard's clients in this round."""

    def __init__(
        self, spec: ReportSpec, context: PhaseContext, method: Method, ids: Integers, clients: int
    ) -> None:
        self.spec, self.view = spec, ReportView.empty(spec, clients)
        self.outgoing: ReportValues = np.full((len(ids), spec.width), np.nan, dtype=np.float32)
        """[rows, width]. A client that does not train repeats its last report."""
        self._context, self._personal, self._ids = context, vmap_clients(method.personal), ids

    def record_losses(self, state: Any, group: ClientGroup) -> Callable[[Any], None]:
        """Record each client's loss before training.

        Returns a callback that records its update from the trained state.
        """
        point = self._personal(state)
        if self.spec.loss:
            self.outgoing[group.rows, 0] = self._losses(point, group)
        return partial(self._record_updates, point, group)

    def _losses(self, point: Params, group: ClientGroup) -> Floats:
        """Each client's loss on its own training data."""
        context, full_group = self._context, group.full_group
        if full_group is not None:
            group = replace(group, full_group=replace(full_group, test=full_group.train))
        metrics = compute_metrics(context, context.examples, point, group)
        return metrics["loss"]

    def _record_updates(self, before: Params, group: ClientGroup, state: Any) -> None:
        """Record the update's norm, a sketch of the update, and one of the model, as asked for."""
        if not (self.spec.norm or self.spec.sketch or self.spec.model):
            return
        models = self._personal(state).shared
        updates = (models - before.shared).cpu().double().numpy()
        place = int(self.spec.loss)
        if self.spec.norm:
            self.outgoing[group.rows, place] = [np.sqrt(row @ row) for row in updates]
            place += 1
        if self.spec.sketch:
            columns = slice(place, place + self.spec.sketch)
            self.outgoing[group.rows, columns] = self._sketch(updates, self.spec.sketch)
        if self.spec.model:
            columns = slice(self.spec.width - self.spec.model, None)
            rows = models.cpu().double().numpy()
            self.outgoing[group.rows, columns] = self._sketch(rows, self.spec.model)

    def _sketch(self, rows: Floats, count: int) -> list[Floats]:
        """Sketch row by row, each sum in the order of coordinates: the same bits on any rank."""
        buckets = ((self._hashes >> np.uint64(1)) % np.uint64(count)).astype(np.int64)
        return [count_sketch(row, buckets, self._signs, count) for row in rows]

    @cached_property
    def _hashes(self) -> npt.NDArray[np.uint64]:
        size = self._context.task.shared_layout.size
        return key_hashes(self.spec.seed, "sketch", np.arange(size))

    @cached_property
    def _signs(self) -> Floats:
        return np.where(self._hashes & np.uint64(1), 1.0, -1.0)

    @classmethod
    def make(
        cls, spec: ReportSpec | None, context: PhaseContext, method: Method, world: World
    ) -> ReportExchange | None:
        """The reports of a world's clients; None where the topology asks for none."""
        if spec is None:
            return None
        return cls(spec, context, method, world.ids, len(world.all_ids))

    def exchange(self, round: int, graph: Graph, world: World) -> Record:
        """Give every client the reports of the senders of its messages; record the links."""
        outgoing = world.gather(torch.from_numpy(self.outgoing)).numpy()
        self.view = self.view.with_messages(round, graph, outgoing)
        return {"links": graph_to_text(graph)}

    def rows(self) -> dict[str, Tensor]:
        """The reports that this shard's clients have received."""
        known = self.view.arrays()
        return {name: torch.from_numpy(array[self._ids]) for name, array in known.items()}

    def share(self, world: World) -> None:
        """Gather received reports from all ranks, after each restored those of its clients."""
        known = {name: world.gather(own).numpy() for name, own in self.rows().items()}
        self.view = ReportView.from_arrays(self.spec, known)

    def restore(self, known: Mapping[str, Tensor]) -> None:
        """Restore the reports that this shard's clients had received."""
        arrays: dict[str, Any] = {n: array.copy() for n, array in self.view.arrays().items()}
        for name, array in arrays.items():
            rows = known.get(name)
            if rows is None or tuple(rows.shape) != (len(self._ids), *array.shape[1:]):
                raise QuiverError(
                    "the checkpoint lacks the client reports that this topology needs: it was "
                    "made with another topology or number of clients."
                )
            array[self._ids] = rows.cpu().numpy()
        self.view = ReportView.from_arrays(self.spec, arrays)
        self.outgoing = self.view.values[self._ids, self._ids].copy()


def count_sketch(row: Floats, buckets: Integers, signs: Floats, count: int) -> Floats:
    """A count sketch: every coordinate with its sign, added up in its bucket."""
    sums: Floats = np.bincount(buckets, weights=signs * row, minlength=count).astype(np.float64)
    return sums
