"""How long a sweep will take: from cells that have run, from short trials of the others.

Cells that differ in nothing that costs time (seed, learning rates, who holds which classes) take
the same. A trial is two rounds with a few clients and a few samples, scaled up to the whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quiverfl.config import Config, parse
from quiverfl.data.dataset import Dataset
from quiverfl.errors import QuiverError
from quiverfl.experiment import (
    DataShelf,
    Experiment,
    make_method,
    make_task,
    share_out,
    topology_for,
)
from quiverfl.methods.optional import adaptation
from quiverfl.results.run_files import read_lines
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell

FREE = {
    "data": ("root", "partition", "alpha", "classes_per_client", "min_samples", "seed"),
    "training": ("lr", "personal_lr", "lr_decay", "momentum", "weight_decay", "clip_norm"),
    "run": ("rounds", "seed", "common_init", "keep_local", "checkpoint_every"),
}
"""Settings that cost no time, or, for `rounds`, that are multiplied with it."""

TRIAL_CLIENTS = 10
TRIAL_WORK = 150_000_000
"""Parameters times samples of a trial: a second or so for a small model on one core."""


@dataclass(frozen=True)
class Estimate:
    """Seconds that cells still need, by name, if each ran alone; None where it is not known."""

    seconds: dict[str, float | None]
    trials: int
    measured: int
    """How many cells' costs come from runs, not from trials."""
    reason: str = ""
    """Why the first trial that could not be made could not."""

    def total(self, jobs: int) -> float:
        """With cells side by side, never less than the longest."""
        known = [seconds for seconds in self.seconds.values() if seconds is not None]
        return max(sum(known) / jobs, max(known, default=0.0))

    @property
    def unknown(self) -> int:
        return sum(seconds is None for seconds in self.seconds.values())


def estimate(
    cells: Sequence[Cell],
    places: Places,
    finished: Sequence[Cell] = (),
    threads: int = 1,
    on_trial: Callable[[int, int], None] = lambda done, of: None,
    until: Mapping[str, int] | None = None,
) -> Estimate:
    """What is left to do of some cells, with one trial per kind that has never run.

    `until` has rounds, by the names of cells, that are enough for now.
    """
    paces: dict[str, float | None] = {}
    for cell in (*finished, *cells):
        pace = recorded_pace(places, cell)
        if pace is not None:
            paces.setdefault(cost_class(cell.config), pace)
    measured = sum(cost_class(cell.config) in paces for cell in cells)
    kinds = {cost_class(cell.config): cell.config for cell in cells}
    untried = {kind: config for kind, config in kinds.items() if kind not in paces}
    data = DataShelf()
    reasons: list[str] = []
    for done, (kind, config) in enumerate(untried.items()):
        on_trial(done, len(untried))
        paces[kind], reason = _tried(config, data, threads)
        reasons += [reason] if reason else []
    enough = {cell.name: cell.config.run.rounds for cell in cells} | dict(until or {})
    seconds = {
        cell.name: _left(cell, paces[cost_class(cell.config)], places, enough[cell.name])
        for cell in cells
    }
    return Estimate(seconds, len(untried), measured, next(iter(reasons), ""))


def cost_class(config: Config) -> str:
    """The same text for configurations whose rounds take the same time."""
    tree = config.model_dump(mode="json", exclude={"overrides"})
    for section, keys in FREE.items():
        for key in keys:
            tree[section].pop(key)
    return json.dumps(tree, sort_keys=True)


def recorded_pace(places: Places, cell: Cell) -> float | None:
    """Seconds per round of a cell that has run for some rounds."""
    try:
        lines = read_lines(places.run(cell) / "rounds.jsonl")
    except QuiverError:
        return None
    seconds = [float(line["seconds"]) for line in lines if "seconds" in line]
    return float(np.mean(seconds)) if len(seconds) > 1 else None


def _left(cell: Cell, pace: float | None, places: Places, rounds: int) -> float | None:
    if pace is None:
        return None
    done = len(read_lines(places.run(cell) / "rounds.jsonl"))
    return pace * max(0, rounds - done)


def _tried(config: Config, data: DataShelf, threads: int) -> tuple[float | None, str]:
    """None and the reason where the trial cannot be made, whatever it is: no cell stops for it."""
    try:
        return trial(config, data.take(config), threads), ""
    except QuiverError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def trial(config: Config, dataset: Dataset, threads: int = 1) -> float:
    """Seconds per round of this configuration, from two rounds of a small part of it."""
    method = make_method(config)
    whole = share_out(config, dataset)
    active = int(topology_for(config, method, whole.clients)(0).active.sum())
    sizes = whole.train_counts.sum(axis=1)
    clients, samples = _trial_size(config, dataset, whole.clients, int(sizes.mean()))
    small = Experiment.of(_trial_config(config, clients, samples, threads), dataset)
    records: list[dict[str, float]] = []
    small.simulation.run(recorder=_Keeping(records))
    cost = {name: min(record[name] for record in records) for name in records[0]}
    trained = int(small.partition.train_counts.sum())
    tested = max(1, int(small.partition.test_counts.sum()))
    training = sizes.mean() * active / trained
    testing = whole.test_counts.sum() / tested
    if adaptation(method, small.task) is not None:  # what is evaluated is trained before
        testing = sizes.sum() / trained
    return float(
        cost["train_seconds"] * training
        + cost["mix_seconds"] * whole.clients / clients
        + cost["evaluate_seconds"] * testing / config.run.evaluate_every
    )


def _trial_size(config: Config, dataset: Dataset, clients: int, size: int) -> tuple[int, int]:
    """Few enough clients and samples for any model; one whole batch each where that is possible."""
    task = make_task(config, dataset)
    parameters = task.shared_layout.size + task.personal_layout.size
    most = max(8, TRIAL_WORK // max(1, parameters))
    batch = size if config.training.batch_size == "all" else config.training.batch_size
    few = max(2, min(clients, TRIAL_CLIENTS, most // min(size, batch)))
    return min(few, clients), max(2, min(size, batch, most // few))


def _trial_config(config: Config, clients: int, samples: int, threads: int) -> Config:
    tree = config.model_dump(mode="json")
    tree["data"].update(partition="iid", clients=clients, samples_per_client=samples)
    tree["data"].update(alpha=None, classes_per_client=None, min_samples=None)
    tree["data"].update(test_per_client=samples)
    tree["topology"] = {"name": "auto", "neighbors": clients - 1, "sampled": clients}
    tree["run"].update(rounds=2, evaluate_every=1, epochs_per_client=None, threads=threads)
    return parse(tree)


class _Keeping:
    def __init__(self, records: list[dict[str, float]]) -> None:
        self._records = records

    def evaluated(self, round: int, stage: str, metrics: object) -> None:
        pass

    def finished(self, record: dict[str, float]) -> None:
        names = ("train_seconds", "mix_seconds", "evaluate_seconds")
        self._records.append({name: record[name] for name in names})
