"""The records of long runs are cells of today's presets, and finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiverfl.paper.reproduce.catalogue import find_item
from quiverfl.paper.reproduce.rates import rate_settings
from quiverfl.paper.reproduce.selection import item_cells
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell, Choice

RECORDS = Path(__file__).parents[2] / "results"
SEEDS = range(4)


def known() -> dict[str, Cell]:
    """Every cell of the medium scale that a record may be of, by its name."""
    rates = rate_settings("paper", "medium", None)
    choice = Choice(seeds=tuple(SEEDS), values=tuple(rates))
    items = ("table1", "unreliable")
    cells = [cell for name in items for cell in item_cells(find_item(name), "medium", choice)]
    return {cell.name: cell for cell in cells}


@pytest.fixture(scope="module")
def cells() -> dict[str, Cell]:
    return known()


def test_every_record_is_a_finished_cell_of_a_preset(cells: dict[str, Cell]) -> None:
    """A preset that is changed has other cells: its records would be found by nobody."""
    records = sorted(path.name for path in (RECORDS / "cells").iterdir())
    places = Places(RECORDS)
    assert records
    assert [name for name in records if name not in cells] == []
    assert {places.state(cells[name]) for name in records} == {"finished"}
