"""What can be known about cells before the first of them runs.

A sweep that fails in the night on a mistake that its file shows is refused at once, and so is its
dry run. Data that is not there is no mistake: it may be elsewhere, and other cells can run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from quiverfl.config import Config
from quiverfl.data.dataset import Dataset
from quiverfl.data.partition import partition_options
from quiverfl.data.sources import check_source
from quiverfl.engine.fit import fitting
from quiverfl.errors import QuiverError
from quiverfl.experiment import DataShelf, Experiment, make_method, topology_for
from quiverfl.models import checked_factory
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
        clients = alike[0].config.data.clients
        dataset, reason = _data(alike[0].config, shelf)
        if reason:
            absent.setdefault(reason, []).extend(alike)
        for same in _grouped(alike, _method_and_graph):
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
        raise QuiverError(_told(mistakes, len(cells)))
    return absent


def check_alone(config: Config, clients: int | None) -> None:
    """What the configuration alone shows, wherever the data is."""
    data = config.data
    check_source(data.name, data.options)
    partition_options(data.partition, data.partition_options())
    checked_factory(config.model.name, config.model.options())
    method = make_method(config)
    if clients is not None:
        fitting(method, topology_for(config, method, clients)(0))


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
    run = config.run
    epochs = [run.epochs_per_client, run.epoch_groups]
    data = config.data.model_dump(exclude={"seed"})
    return [data, config.model.model_dump(), epochs, run.device]


def _method_and_graph(config: Config) -> object:
    return [config.method.model_dump(), config.topology.model_dump()]


def _told(mistakes: Reasons, total: int) -> str:
    count = sum(len(cells) for cells in mistakes.values())
    lines = []
    for reason, cells in mistakes.items():
        first = ", ".join(filter(None, (cells[0].config.method.name, cells[0].label)))
        more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        lines.append(f"{first}{more}: {reason}")
    return f"{count} of {total} cells cannot run. " + "\n".join(lines)
