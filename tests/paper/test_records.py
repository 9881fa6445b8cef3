"""The records of long runs are cells of today's presets, and what the docs say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
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
from quiverfl.results.statistics import holm, p_value
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
GRAPHS = Runs("graphs", Choice(seeds=FOUR, values=PAPER))
GRAPH_CASES = ("2 neighbours", "10 neighbours, 50 % of links fail", "10 neighbours")
GRAPH_NAMES = {
    (("topology.name", "auto"),): "random push, the paper's step",
    (("topology.name", "balanced_push"),): "balanced push",
    (("topology.name", "random_pull"),): "pull",
    (("topology.name", "random_regular"),): "undirected",
    (("topology.name", "random_push"), ("method.step", "debiased")): "random push, debiased step",
}
CIFAR_100 = Runs("table1", Choice(("fedper", "fedrep"), (0,), ("CIFAR-100 Dir-0.3",), values=PAPER))
TABLES = {
    "Table 1, tuned rates": Runs("table1", Choice(seeds=FOUR, values=TUNED)),
    "Table 1, the paper's rates": Runs("table1", Choice(seeds=TWO_SEEDS, values=PAPER)),
    "unreliable": Runs("unreliable", Choice(seeds=TWO_SEEDS, values=PAPER)),
    "Table 6": Runs(
        "table6", Choice(values=("model.kernels=compiled",)), "small", "results-small.md"
    ),
}
"""Whose tables stand in the docs as they are."""
RUNS = {
    **TABLES,
    "graphs": GRAPHS,
    "time": Runs("time", Choice(seeds=TWO_SEEDS, cases=("compute and links 10×",), values=PAPER)),
    "CIFAR-100": CIFAR_100,
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


def graph_tables(case: str) -> list[str]:
    """Lines of a case's two tables: every graph and step, and what they gain on random pushes."""
    asked = Choice(seeds=FOUR, cases=(case,), values=PAPER)
    arms: dict[str, dict[int, Path]] = {}
    for cell in make_item_cells(ITEMS.find("graphs"), "medium", asked):
        if PLACES.state(cell) == "finished":
            runs = arms.setdefault(GRAPH_NAMES[cell.point], {})
            runs[cell.config.run.seed] = RECORDS / "cells" / cell.name
    lines, gains = [], {}
    last = {name: {seed: _last(f) for seed, f in runs.items()} for name, runs in arms.items()}
    base = last["random push, the paper's step"]
    common = set.intersection(*(set(runs) for runs in arms.values()))
    for name, runs in arms.items():
        scores = np.array([last[name][seed] for seed in common])
        means, spreads = 100 * scores.mean(axis=0), 100 * scores.std(axis=0, ddof=1)
        stages = [f"{m:.2f} ± {s:.2f}" for m, s in zip(means, spreads, strict=True)]
        rounds = [pd.read_parquet(runs[seed] / "rounds.parquet") for seed in common]
        low, high = min(r.mu_min.min() for r in rounds), max(r.mu_max.max() for r in rounds)
        mu = f"{low:.2f} … {high:.2f}" if low < 1 - 1e-9 else "1"
        apart = np.mean([r.consensus.mean() for r in rounds])
        cells = (name, len(common), *stages, mu, f"{apart:.2g}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if last[name] is not base:
            gains[name] = np.array([100 * (last[name][seed] - base[seed]) for seed in runs])
    p = iter(holm([p_value(gain[:, stage]) for gain in gains.values() for stage in (0, 1)]))
    for name, gain in gains.items():
        stages = [
            f"{gain[:, stage].mean():+.2f} ± {gain[:, stage].std(ddof=1):.2f} | {next(p):.2g}"
            for stage in (0, 1)
        ]
        lines.append(f"| {name} | {len(gain)} | {' | '.join(stages)} |".replace("-", "−"))
    return lines


def _last(folder: Path) -> np.ndarray:
    """Accuracy of the last round at both stages."""
    stages = json.loads((folder / "summary.json").read_text())["stages"]
    return np.array([stages[stage]["last"]["mean"] for stage in STAGES])


@pytest.mark.parametrize("case", GRAPH_CASES)
def test_the_graphs_in_the_docs_are_those_of_the_records(case: str) -> None:
    text = (RECORDS.parent / "docs" / "explanation" / "results.md").read_text()
    assert [line for line in graph_tables(case) if line not in text] == []


def test_the_docs_say_how_many_runs_are_recorded() -> None:
    """Of the medium scale; those with devices are another page's."""
    elsewhere = {cell.name for name in ("Table 6", "time") for cell in RUNS[name].cells}
    count = sum(path.name not in elsewhere for path in (RECORDS / "cells").iterdir())
    text = (RECORDS.parent / "docs" / "explanation" / "results.md").read_text()
    assert f"{count} finished runs of this scale" in text


def test_the_single_runs_in_the_docs_are_those_of_the_records() -> None:
    """With one seed each they are in no table."""
    text = " ".join((RECORDS.parent / "docs" / "explanation" / "results.md").read_text().split())
    titles = {"fedper": "FedPer", "fedrep": "FedRep"}
    for cell in CIFAR_100.cells:
        local, mixed = 100 * _last(RECORDS / "cells" / cell.name)
        assert f"{titles[cell.config.method.name]} {local:.1f} and {mixed:.1f}" in text
