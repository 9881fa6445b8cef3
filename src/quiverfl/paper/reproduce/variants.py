"""Two honest variations of every experiment: the paper's other graph, and equal participation."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeAlias

from quiverfl.errors import QuiverError
from quiverfl.experiment import make_method, topology_for
from quiverfl.paper.reproduce.catalogue import Item
from quiverfl.sweeps.plan import Cell

Directed: TypeAlias = Literal["push", "pull"]


def graph_settings(directed: Directed) -> tuple[str, ...]:
    """push: Algorithm 1. pull: what the appendix says the experiments used."""
    if directed == "push":
        return ()
    return tuple(f"overrides.{name}.topology.name=random_pull" for name in ("osgp", "dfedpgp"))


def trained_as_often(item: Item) -> Item:
    """The item with a title and a note that say so."""
    note = "Server methods had more rounds, so that every client trains as often under all methods."
    title = f"{item.title}, every client training as often"
    return replace(item, title=title, note=f"{item.note} {note}".strip())


def smoke_test(item: Item) -> Item:
    """The item at the scale that is there to try the machinery."""
    note = "A smoke test of the machinery: these numbers mean nothing."
    return replace(item, note=f"{item.note} {note}".strip())


def with_equal_participation(cell: Cell) -> Cell:
    """More rounds where only some clients train in each, so that everybody trains as often.

    The learning rate decays over the longer run as it did over the shorter one.
    """
    config = cell.config
    clients = config.data.clients
    if clients is None:
        raise QuiverError("--equal participation: set data.clients, to know how many there are.")
    active = int(topology_for(config, make_method(config), clients)(0).active.sum())
    factor = max(1, round(clients / max(1, active)))
    if factor == 1:
        return cell
    values = [
        ("run.rounds", config.run.rounds * factor),
        ("run.evaluate_every", config.run.evaluate_every * factor),
        ("training.lr_decay", config.training.lr_decay ** (1 / factor)),
    ]
    return replace(cell, config=config.with_values(values))
