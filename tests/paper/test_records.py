"""The records of long runs are cells of today's presets, and what the docs say of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from quiverfl.paper.reproduce.catalogue import (
    ITEMS,
    graph_settings,
    make_item_cells,
    rate_settings,
)
from quiverfl.paper.reproduce.scores import collect_results
from quiverfl.paper.reproduce.tables import accuracy_table, difference_table
from quiverfl.results.formatting import format_markdown
from quiverfl.sweeps.plan import Cell, Choice, SweepFolder

RECORDS = Path(__file__).parents[2] / "results"
PLACES = SweepFolder(RECORDS)
TWO_SEEDS, FOUR = range(2), range(4)
STAGES = ("local", "mixed")


class Runs(NamedTuple):
    """What `quiver reproduce` was asked for, and the page that has its tables."""

    item: str
    asked: Choice
    scale: str = "medium"
    page: str = "results.md"

    @property
    def cells(self) -> list[Cell]:
        return make_item_cells(ITEMS.find(self.item), self.scale, self.asked)

    def tables(self) -> list[str]:
        """Accuracies and differences of what is recorded, as in the docs."""
        recorded = [cell for cell in self.cells if PLACES.state(cell) == "finished"]
        results, item = collect_results(recorded, PLACES), ITEMS.find(self.item)
        tables = accuracy_table(item, results, STAGES), difference_table(item, results, STAGES)
        return [_rows(format_markdown(table)) for table in tables if table is not None]


def _rows(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


PAPER, TUNED = (rate_settings(whose, "medium", None) for whose in ("paper", "tuned"))
NEIGHBORS = [(*PAPER, f"topology.neighbors={count}") for count in (2, 5)]
EARLIER = ("overrides.local.training.lr=0.02", "overrides.dispfl.training.lr_decay=0.95")
PAIR = ("dfedavgmp", "dfedpgp")
UNRELIABLE = ("CIFAR-10 Dir-0.3", "70 % online", "40 % online")
UNRELIABLE += ("20 % of links fail", "50 % of links fail")
GRAPHS = Runs("graphs", Choice(seeds=FOUR, cases=("2 neighbours",), values=PAPER))
GRAPH_NAMES = (
    "random push, the paper's step",
    "balanced push",
    "pull",
    "undirected",
    "random push, debiased step",
)
TABLES = {
    "Table 1, tuned rates": Runs("table1", Choice(seeds=FOUR, values=TUNED)),
    "Table 1, the paper's rates": Runs("table1", Choice(seeds=TWO_SEEDS, values=PAPER)),
    "unreliable": Runs("unreliable", Choice(seeds=TWO_SEEDS, cases=UNRELIABLE, values=PAPER)),
    "Table 6": Runs(
        "table6", Choice(values=("model.kernels=compiled",)), "small", "results-small.md"
    ),
}
"""Whose tables stand in the docs as they are."""
RUNS = {
    **TABLES,
    "graphs, 2 neighbours": GRAPHS,
    "unreliable, more seeds": Runs("unreliable", Choice(PAIR, FOUR, values=PAPER)),
    "a smaller rate": Runs("table1", Choice(seeds=TWO_SEEDS, values=("training.lr=0.03",))),
    "an earlier race": Runs("table1", Choice(seeds=TWO_SEEDS, values=(*TUNED, *EARLIER))),
    "pull": Runs("table1", Choice(seeds=TWO_SEEDS, values=(*PAPER, *graph_settings("pull")))),
    **{
        f"{few[-1]}, {way}": Runs(
            "table1", Choice(seeds=TWO_SEEDS, values=(*few, *graph_settings(way)))
        )
        for few in NEIGHBORS
        for way in ("push", "pull")
    },
}


def test_every_record_is_a_finished_cell_of_a_preset() -> None:
    """A preset that is changed has other cells: its records would be found by nobody."""
    cells = {cell.name: cell for runs in RUNS.values() for cell in runs.cells}
    records = sorted(path.name for path in (RECORDS / "cells").iterdir())
    assert records
    assert [name for name in records if name not in cells] == []
    assert {PLACES.state(cells[name]) for name in records} == {"finished"}


@pytest.mark.parametrize("runs", TABLES.values(), ids=list(TABLES))
def test_the_numbers_in_the_docs_are_those_of_the_records(runs: Runs) -> None:
    """Every table that the records make stands on its page, to the letter."""
    text = (RECORDS.parent / "docs" / "explanation" / runs.page).read_text()
    tables = runs.tables()
    assert len(tables) == 2
    assert min(len(table.splitlines()) for table in tables) > 4
    assert [table for table in tables if table not in text] == []


def test_the_graphs_in_the_docs_are_those_of_the_records() -> None:
    """The item's one row, turned: a line for each graph."""
    text = (RECORDS.parent / "docs" / "explanation" / GRAPHS.page).read_text()
    numbers = [cell.strip() for cell in GRAPHS.tables()[0].splitlines()[-1].split("|")[2:-1]]
    lines = [
        f"| {name} | {local} | {mixed} |"
        for name, local, mixed in zip(GRAPH_NAMES, numbers[::2], numbers[1::2], strict=True)
    ]
    assert [line for line in lines if line not in text] == []
