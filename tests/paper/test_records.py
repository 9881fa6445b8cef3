"""The records of long runs are cells of today's presets, and what docs/results.md says of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quiverfl.paper.reproduce.catalogue import find_item
from quiverfl.paper.reproduce.collect import collect
from quiverfl.paper.reproduce.paper_tables import accuracy_table, difference_table
from quiverfl.paper.reproduce.rates import rate_settings
from quiverfl.paper.reproduce.selection import item_cells
from quiverfl.results.table_formats import markdown
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell, Choice

RECORDS = Path(__file__).parents[2] / "results"
PLACES = Places(RECORDS)
SEEDS = range(4)
STAGES = ("local", "mixed")
RATES = {
    "the paper's": rate_settings("paper", "medium", None),
    "a smaller one": ("training.lr=0.03",),
}
"""What was set on the command line for them."""


def medium(settings: Sequence[str]) -> list[Cell]:
    """Every cell of Table 1 at this scale that a record may be of."""
    return item_cells(find_item("table1"), "medium", Choice(seeds=SEEDS, values=settings))


def test_every_record_is_a_finished_cell_of_a_preset() -> None:
    """A preset that is changed has other cells: its records would be found by nobody."""
    cells = {cell.name: cell for settings in RATES.values() for cell in medium(settings)}
    records = sorted(path.name for path in (RECORDS / "cells").iterdir())
    assert records
    assert [name for name in records if name not in cells] == []
    assert {PLACES.state(cells[name]) for name in records} == {"finished"}


@pytest.mark.parametrize("rates", RATES)
def test_the_numbers_in_the_docs_are_those_of_the_records(rates: str) -> None:
    """Every line of the tables that the records make stands in docs/results.md."""
    recorded = [cell for cell in medium(RATES[rates]) if PLACES.state(cell) == "finished"]
    results, item = collect(recorded, PLACES), find_item("table1")
    text = (RECORDS.parent / "docs" / "results.md").read_text()
    for table in (
        accuracy_table(item, results, STAGES),
        difference_table(item, results, STAGES),
    ):
        assert table is not None
        rows = [line for line in markdown(table).splitlines() if line.startswith("|")]
        assert len(rows) > 4
        assert [row for row in rows if row not in text] == []
