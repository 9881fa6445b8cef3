"""What can be known about cells before the first of them runs.

A sweep that fails in the night on a mistake that its file shows is refused at once, and so is its
dry run. Data that is not there is no mistake: it may be elsewhere, and other cells can run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from quiverfl.config import Config
from quiverfl.data.dataset import Dataset
from quiverfl.data.partition import partition_options
from quiverfl.data.sources import check_source
from quiverfl.engine.rounds import checked
from quiverfl.errors import QuiverError
from quiverfl.experiment import DataShelf, Experiment, make_method, topology_for
from quiverfl.models import check_model
from quiverfl.sweeps.plan import Cell

Reasons = dict[str, list[Cell]]
"""Why some cells cannot run."""


def check_cells(cells: Sequence[Cell]) -> Reasons:
    """Refuse cells that would fail; those whose data is not there are returned, by the reason.

    Seeds and optimizer settings are not told apart, and what cells have in common is made once.
    """
    mistakes: Reasons = {}
    absent: Reasons = {}
    shelf = DataShelf()
    for alike in _grouped(cells, _data_and_model):
        dataset, reason = _data(alike[0].config, shelf)
        if reason:
            absent.setdefault(reason, []).extend(alike)
        made: Experiment | None = None
        for same in _grouped(alike, _method_and_graph):
            try:
                check_alone(same[0].config)
                if dataset is not None:
                    made = _together(same[0].config, dataset, made)
            except QuiverError as error:
                mistakes.setdefault(str(error), []).extend(same)
            except Exception:
                # A mistake in code of the person's own: the log of the cell will have all of it.
                continue
    if mistakes:
        raise QuiverError(_told(mistakes, len(cells)))
    return absent


def check_alone(config: Config) -> None:
    """What the configuration alone shows, wherever the data is."""
    data = config.data
    check_source(data.name, data.options)
    partition_options(data.partition, data.partition_options())
    check_model(config.model.name, config.model.options())
    method = make_method(config)
    if data.clients is not None:
        checked(method, topology_for(config, method, data.clients)(0))


def _together(config: Config, dataset: Dataset, made: Experiment | None) -> Experiment:
    """The whole experiment; the partition and the model of one with the same are taken over."""
    if made is None:
        experiment = Experiment.of(config, dataset)
    else:
        method = make_method(config)
        topology = topology_for(config, method, made.data.clients)
        experiment = replace(made, config=config, method=method, topology=topology)
    experiment.check()
    return experiment


def _data(config: Config, shelf: DataShelf) -> tuple[Dataset | None, str]:
    """The data, or why it is not there; a mistake in the person's own function says it later."""
    try:
        return shelf.take(config), ""
    except QuiverError as error:
        return None, str(error)
    except Exception:
        return None, ""


def _grouped(cells: Iterable[Cell], key: Callable[[Config], object]) -> list[list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(key(cell.config), default=str), []).append(cell)
    return list(groups.values())


def _data_and_model(config: Config) -> object:
    return [config.data.model_dump(exclude={"seed"}), config.model.model_dump()]


def _method_and_graph(config: Config) -> object:
    run = config.run
    epochs = [run.epochs_per_client, run.epoch_groups]
    return [config.method.model_dump(), config.topology.model_dump(), epochs, run.device]


def _told(mistakes: Reasons, total: int) -> str:
    count = sum(len(cells) for cells in mistakes.values())
    lines = []
    for reason, cells in mistakes.items():
        first = ", ".join(filter(None, (cells[0].config.method.name, cells[0].label)))
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        lines.append(f"{first}{more}: {reason}")
    return f"{count} of {total} cells cannot run. " + "\n".join(lines)
