"""Metrics of stacked models on the test splits of their clients."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.context import ClientGroup
from quiverfl.engine.examples import Examples
from quiverfl.engine.programs import Executor, Program, flat
from quiverfl.engine.workers import stop_if_halted
from quiverfl.objectives import AnyMetric, Metric, PerSample
from quiverfl.task import Point, Task
from quiverfl.trees import Tree, mapped

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
    group: ClientGroup,
) -> Metrics:
    """Metrics and loss over each client's own samples; NaN for a client without any."""
    rows = group.rows
    sizes = examples.sizes[rows]
    everyone = sizes if group.company is None else group.company.test
    tallies = {
        name: _tally(metric, len(rows))
        for name, metric in {**task.metrics, "loss": task.loss}.items()
    }
    slab = min(SLAB, max(1, TOGETHER // max(1, len(everyone))))
    for begin in range(0, int(sizes.max(initial=0)), slab):
        stop_if_halted()
        here = np.flatnonzero(sizes > begin)
        width = int(min(everyone.max() - begin, slab))
        samples = np.minimum(np.arange(begin, begin + width), sizes[here][:, None] - 1)
        inside = torch.from_numpy(np.arange(begin, begin + width) < sizes[here][:, None]).double()
        x, y = examples.gather(rows[here], samples)
        some = point if len(here) == len(rows) else Point(*(part[here] for part in point))
        outputs, targets = flat(executor.see(program, some, x).outputs), flat(y)
        for tally in tallies.values():
            tally.add(outputs, targets, here, inside)
    with np.errstate(invalid="ignore"):
        return {name: tally.values(sizes) for name, tally in tallies.items()}


class _Tally(Protocol):
    """What has been seen of some clients' samples for one metric."""

    def add(self, outputs: Tree, targets: Tree, here: Integers, inside: Tensor) -> None:
        """Samples [k · n, …] of the clients `here`; `inside` [k, n] is 0 for padding."""

    def values(self, sizes: Integers) -> npt.NDArray[np.float64]: ...


def _tally(metric: AnyMetric, clients: int) -> _Tally:
    if not isinstance(metric, Metric):
        return _Mean(metric, clients)
    return _All(metric, clients) if metric.value is None else _Sums(metric, clients)


class _Mean:
    def __init__(self, metric: PerSample, clients: int) -> None:
        self._metric = metric
        self._sums = torch.zeros(clients, dtype=torch.float64)

    def add(self, outputs: Tree, targets: Tree, here: Integers, inside: Tensor) -> None:
        values = self._metric(outputs, targets).view(inside.shape).double().cpu()
        self._sums[here] += torch.linalg.vecdot(values, inside)

    def values(self, sizes: Integers) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self._sums.numpy() / np.where(sizes, sizes, np.nan)
        return found


class _Sums:
    def __init__(self, metric: Metric, clients: int) -> None:
        self._metric, self._clients = metric, clients
        self._sums: Tensor | None = None

    def add(self, outputs: Tree, targets: Tree, here: Integers, inside: Tensor) -> None:
        shares = self._metric.of(outputs, targets).double().cpu()
        sums = torch.einsum("kns,kn->ks", shares.view(*inside.shape, -1), inside)
        if self._sums is None:
            self._sums = sums.new_zeros(self._clients, sums.shape[1])
        self._sums[here] += sums

    def values(self, sizes: Integers) -> npt.NDArray[np.float64]:
        assert self._metric.value is not None
        if self._sums is None:
            return np.full(self._clients, np.nan)
        found = self._metric.value(self._sums).numpy()
        return np.where(sizes, found, np.nan)


class _All:
    """Keeps what the models said of every sample until all have been seen."""

    def __init__(self, metric: Metric, clients: int) -> None:
        self._metric = metric
        self._seen: list[list[tuple[Tree, Tree]]] = [[] for _ in range(clients)]

    def add(self, outputs: Tree, targets: Tree, here: Integers, inside: Tensor) -> None:
        width = inside.shape[1]
        for place, client in enumerate(here):
            rows = slice(place * width, place * width + int(inside[place].sum()))
            self._seen[client].append((_cut(outputs, rows), _cut(targets, rows)))

    def values(self, sizes: Integers) -> npt.NDArray[np.float64]:
        return np.array([self._value(seen) for seen in self._seen], dtype=np.float64)

    def _value(self, seen: list[tuple[Tree, Tree]]) -> float:
        if not seen:
            return float("nan")
        outputs, targets = (
            mapped(lambda *slabs: torch.cat(slabs), *trees) for trees in zip(*seen, strict=True)
        )
        return float(self._metric.of(outputs, targets))


def _cut(tree: Tree, rows: slice) -> Tree:
    return mapped(lambda leaf: leaf[rows].cpu(), tree)


def join(found: Metrics, part: Metrics, rows: Integers, clients: int) -> None:
    """Write the metrics of some rows into the metrics of all."""
    for name, values in part.items():
        found.setdefault(name, np.full(clients, np.nan))[rows] = values


def select(metrics_of_row: dict[str, float]) -> Metrics:
    return {name: np.array([value]) for name, value in metrics_of_row.items()}
