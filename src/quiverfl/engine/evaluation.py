"""Metrics of stacked models on the test splits of their clients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quiverfl.engine.context import Group
from quiverfl.engine.examples import Examples
from quiverfl.engine.programs import Executor, Program
from quiverfl.engine.workers import stop_if_halted
from quiverfl.task import Point, Task

Metrics = dict[str, npt.NDArray[np.float64]]
Integers = npt.NDArray[np.int64]

SLAB = 512
"""Samples per client that pass through the model at once, at most."""
TOGETHER = 12_800
"""Samples of all clients together that do: their activations must find room."""


def metrics_of(
    task: Task,
    program: Program,
    executor: Executor,
    examples: Examples,
    point: Point,
    group: Group,
) -> Metrics:
    """Mean metric and loss over each client's own samples; NaN for a client without any."""
    rows = group.rows
    sizes = examples.sizes[rows]
    everyone = sizes if group.company is None else group.company.test
    functions = {**task.metrics, "loss": task.loss}
    sums = {name: torch.zeros(len(rows), dtype=torch.float64) for name in functions}
    slab = min(SLAB, max(1, TOGETHER // max(1, len(everyone))))
    for begin in range(0, int(sizes.max(initial=0)), slab):
        stop_if_halted()
        here = np.flatnonzero(sizes > begin)
        width = int(min(everyone.max() - begin, slab))
        samples = np.minimum(np.arange(begin, begin + width), sizes[here][:, None] - 1)
        inside = torch.from_numpy(np.arange(begin, begin + width) < sizes[here][:, None]).double()
        x, y = examples.gather(rows[here], samples)
        some = point if len(here) == len(rows) else Point(*(part[here] for part in point))
        outputs = executor.see(program, some, x).outputs.flatten(0, 1)
        for name, function in functions.items():
            values = function(outputs, y.flatten(0, 1)).view(inside.shape).double().cpu()
            sums[name][here] += torch.linalg.vecdot(values, inside)
    with np.errstate(invalid="ignore"):
        return {
            name: total.numpy() / np.where(sizes, sizes, np.nan) for name, total in sums.items()
        }


def join(found: Metrics, part: Metrics, rows: Integers, clients: int) -> None:
    """Write the metrics of some rows into the metrics of all."""
    for name, values in part.items():
        found.setdefault(name, np.full(clients, np.nan))[rows] = values


def select(metrics_of_row: dict[str, float]) -> Metrics:
    return {name: np.array([value]) for name, value in metrics_of_row.items()}
