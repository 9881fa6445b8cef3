"""How much memory cells need, for a cluster to place them by."""

from __future__ import annotations

from collections.abc import Sequence

from quiverfl.engine.footprint import OVERHEAD, predict
from quiverfl.experiment import DataShelf, Experiment
from quiverfl.sweeps.estimate import cost_class
from quiverfl.sweeps.plan import Cell
from quiverfl.trees import leaves

MARGIN = 1.25


def memory_needed(cells: Sequence[Cell]) -> dict[str, int]:
    """Bytes by the name of the cell; those whose data is not here are not in it.

    The data set itself is loaded once more beside the clients' shares of it.
    """
    shelf, found = DataShelf(), dict[str, int | None]()
    for cell in cells:
        kind = cost_class(cell.config)
        if kind not in found:
            found[kind] = _needed(cell, shelf)
    needed = {cell.name: found[cost_class(cell.config)] for cell in cells}
    return {name: bytes_ for name, bytes_ in needed.items() if bytes_ is not None}


def _needed(cell: Cell, shelf: DataShelf) -> int | None:
    try:
        dataset = shelf.take(cell.config)
        one = Experiment.of(cell.config, dataset).simulation
        footprint = predict(
            one.task,
            one.data,
            one.method,
            one.training,
            one.settings,
            transforms=one.transforms,
            looks=one.topology.looks,
        )
    except Exception:  # data or code that is not here: the cell itself will say it
        return None
    mapped = cell.config.data.mapped
    inputs = () if mapped else (dataset.train_x, dataset.test_x)
    loaded = sum(a.nbytes for _, a in leaves((*inputs, dataset.train_y, dataset.test_y)))
    return int(MARGIN * (footprint.total + loaded)) + OVERHEAD
