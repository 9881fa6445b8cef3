"""What can be known about cells before the first of them runs.

A sweep that fails in the night on a mistake that its file shows is refused at once, and so is its
dry run. Data that is not there is no mistake: it may be elsewhere, and other cells can run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quiverfl.data.dataset import Dataset
from quiverfl.data.partition import partition_options
from quiverfl.data.sources import check_source
from quiverfl.engine.checks.method import check_graph
from quiverfl.engine.memory import OVERHEAD, predict_memory
from quiverfl.errors import QuiverError
from quiverfl.methods.optional import adaptation_phase
from quiverfl.models import check_model
from quiverfl.results.run_files import read_lines
from quiverfl.runs.config import Config, parse_config
from quiverfl.runs.experiment import (
    DatasetCache,
    Experiment,
    make_method,
    make_run_topology,
    make_task,
    partition_data,
)
from quiverfl.sweeps.plan import Cell, SweepFolder
from quiverfl.trees import tree_leaves

Reasons = dict[str, list[Cell]]
"""Why some cells cannot run."""


def check_cells(cells: Sequence[Cell]) -> Reasons:
    """Refuse cells that would fail; those whose data is not there are returned, by the reason.

    Seeds and optimizer settings are not told apart, and what cells have in common is made once.
    """
    mistakes: Reasons = {}
    absent: Reasons = {}
    shelf = DatasetCache()
    for alike in _group_cells(cells, _data_and_model):
        clients = alike[0].config.data.clients
        dataset, reason = _data(alike[0].config, shelf)
        if reason:
            absent.setdefault(reason, []).extend(alike)
        for same in _group_cells(alike, _method_and_graph):
            config = same[0].config
            try:
                check_alone(config, clients)
                if dataset is not None:
                    experiment = Experiment.of(config, dataset)
                    experiment.simulation.check()
                    # The partition and the model are good, so for the others too.
                    clients, dataset = experiment.data.clients, None
            except QuiverError as error:
                mistakes.setdefault(str(error), []).extend(same)
            except Exception:
                # A mistake in code of the person's own: the log of the cell will have all of it.
                continue
    if mistakes:
        raise QuiverError(_describe_mistakes(mistakes, len(cells)))
    return absent


def check_alone(config: Config, clients: int | None) -> None:
    """What the configuration alone shows, wherever the data is."""
    data = config.data
    check_source(data.name, data.options)
    partition_options(data.partition, data.partition_options())
    check_model(config.model.name, config.model.options())
    method = make_method(config)
    if clients is not None:
        check_graph(method, make_run_topology(config, method, clients)(0))


def _data(config: Config, shelf: DatasetCache) -> tuple[Dataset | None, str]:
    """The data, or why it is not there; a mistake in the person's own function says it later."""
    try:
        return shelf.take(config), ""
    except QuiverError as error:
        return None, str(error)
    except Exception:
        return None, ""


def _group_cells(cells: Iterable[Cell], key: Callable[[Config], object]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(key(cell.config), default=str), []).append(cell)
    return list(groups.values())


def _data_and_model(config: Config) -> object:
    run = config.run
    epochs = [run.epochs_per_client, run.epoch_groups]
    data = config.data.model_dump(exclude={"seed"})
    return [data, config.model.model_dump(), epochs, run.device]


def _method_and_graph(config: Config) -> object:
    return [config.method.model_dump(), config.topology.model_dump()]


def _describe_mistakes(mistakes: Reasons, total: int) -> str:
    count = sum(len(cells) for cells in mistakes.values())
    lines = []
    for reason, cells in mistakes.items():
        first = ", ".join(filter(None, (cells[0].config.method.name, cells[0].label)))
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        lines.append(f"{first}{more}: {reason}")
    return f"{count} of {total} cells cannot run. " + "\n".join(lines)


# How long a sweep will take: from cells that have run, from short trials of the others.
#
# Cells that differ in nothing that costs time (seed, learning rates, who holds which classes)
# take the same. A trial is two rounds with a few clients and a few samples, scaled up to the
# whole.


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


def estimate_seconds(
    cells: Sequence[Cell],
    folder: SweepFolder,
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
        pace = recorded_pace(folder, cell)
        if pace is not None:
            paces.setdefault(cost_class(cell.config), pace)
    measured = sum(cost_class(cell.config) in paces for cell in cells)
    kinds = {cost_class(cell.config): cell.config for cell in cells}
    untried = {kind: config for kind, config in kinds.items() if kind not in paces}
    data = DatasetCache()
    reasons: list[str] = []
    for done, (kind, config) in enumerate(untried.items()):
        on_trial(done, len(untried))
        paces[kind], reason = _try_cell(config, data, threads)
        reasons += [reason] if reason else []
    enough = {cell.name: cell.config.run.rounds for cell in cells} | dict(until or {})
    seconds = {
        cell.name: _seconds_left(cell, paces[cost_class(cell.config)], folder, enough[cell.name])
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


def recorded_pace(folder: SweepFolder, cell: Cell) -> float | None:
    """Seconds per round of a cell that has run for some rounds."""
    try:
        lines = read_lines(folder.run(cell) / "rounds.jsonl")
    except QuiverError:
        return None
    seconds = [float(line["seconds"]) for line in lines if "seconds" in line]
    return float(np.mean(seconds)) if len(seconds) > 1 else None


def _seconds_left(cell: Cell, pace: float | None, folder: SweepFolder, rounds: int) -> float | None:
    if pace is None:
        return None
    done = len(read_lines(folder.run(cell) / "rounds.jsonl"))
    return pace * max(0, rounds - done)


def _try_cell(config: Config, data: DatasetCache, threads: int) -> tuple[float | None, str]:
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
    whole = partition_data(config, dataset)
    active = int(make_run_topology(config, method, whole.clients)(0).active.sum())
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
    if adaptation_phase(method, small.task) is not None:  # what is evaluated is trained before
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
    batch = config.training.batch_size or size
    few = max(2, min(clients, TRIAL_CLIENTS, most // min(size, batch)))
    return min(few, clients), max(2, min(size, batch, most // few))


def _trial_config(config: Config, clients: int, samples: int, threads: int) -> Config:
    tree = config.model_dump(mode="json")
    tree["data"].update(partition="iid", clients=clients, samples_per_client=samples)
    tree["data"].update(alpha=None, classes_per_client=None, min_samples=None)
    tree["data"].update(test_per_client=samples)
    tree["data"] = {k: v for k, v in tree["data"].items() if not k.startswith("unseen")}
    tree["topology"] = {"name": "auto", "neighbors": clients - 1, "sampled": clients}
    tree["run"].update(rounds=2, evaluate_every=1, epochs_per_client=None, threads=threads)
    return parse_config(tree)


class _Keeping:
    def __init__(self, records: list[dict[str, float]]) -> None:
        self._records = records

    def on_evaluation(self, round: int, stage: str, metrics: object) -> None:
        pass

    def on_round_end(self, record: dict[str, float]) -> None:
        names = ("train_seconds", "mix_seconds", "evaluate_seconds")
        self._records.append({name: record[name] for name in names})


# How much memory cells need, for a cluster to place them by.


MARGIN = 1.25


def memory_needed(cells: Sequence[Cell]) -> dict[str, int]:
    """Bytes by the name of the cell; those whose data is not here are not in it.

    The data set itself is loaded once more beside the clients' shares of it.
    """
    shelf, needs = DatasetCache(), dict[str, int | None]()
    for cell in cells:
        kind = cost_class(cell.config)
        if kind not in needs:
            needs[kind] = _predict_need(cell, shelf)
    needed = {cell.name: needs[cost_class(cell.config)] for cell in cells}
    return {name: bytes_ for name, bytes_ in needed.items() if bytes_ is not None}


def _predict_need(cell: Cell, shelf: DatasetCache) -> int | None:
    try:
        dataset = shelf.take(cell.config)
        one = Experiment.of(cell.config, dataset).simulation
        footprint = predict_memory(
            one.task,
            one.data,
            one.method,
            one.training,
            one.settings,
            transforms=one.transforms,
            report_spec=one.topology.reports,
        )
    except Exception:  # data or code that is not here: the cell itself will say it
        return None
    mapped = cell.config.data.mapped
    inputs = () if mapped else (dataset.train_x, dataset.test_x)
    loaded = sum(a.nbytes for _, a in tree_leaves((*inputs, dataset.train_y, dataset.test_y)))
    return int(MARGIN * (footprint.total + loaded)) + OVERHEAD
