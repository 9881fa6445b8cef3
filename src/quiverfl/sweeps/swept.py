"""A sweep from Python: what `quiver sweep` does, and its results as tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiverfl.card import Shown, thousands
from quiverfl.comparison import grouped, report
from quiverfl.errors import QuiverError
from quiverfl.saved_runs import SavedRun, load_run
from quiverfl.sweeps.checks import check_cells
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.overview import overview
from quiverfl.sweeps.plan import Cell, Choice, Sweep, load_sweep, plan_of
from quiverfl.sweeps.pool import LocalPool, check_inputs, pending
from quiverfl.sweeps.where import Where

if TYPE_CHECKING:
    import pandas as pd


def sweep(
    plan: Path | str | Mapping[str, Any],
    folder: Path | str = "runs",
    *,
    jobs: int = 1,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    cases: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    scale: str | None = None,
    dry_run: bool = False,
    estimate: bool = False,
    retry: bool = False,
    progress: bool = False,
    place: Where | None = None,
) -> Swept:
    """Run a grid of experiments, each in a folder of its own; called again, it resumes.

    `plan` is a file of `quiver sweep`, or a dictionary of what stands in one: base, methods, seeds,
    grid, case. `methods`, `seeds` and `cases` choose some of it, `settings` (such as
    {"run.rounds": 5}; None takes a key out) win over it.

    Finished cells are not repeated, diverged ones only with `retry`, and a cell that fails stops no
    other. `jobs` run side by side in processes of their own; `place` may be a cluster instead.
    `dry_run` only checks, and says which cells there are; `estimate` how long each would take, by
    short trials.
    """
    choice = Choice(methods, seeds, cases, tuple(_texts(settings or {})))
    if isinstance(plan, Mapping):
        found = plan_of(dict(plan), Path("sweep"), choice, scale)
    elif isinstance(plan, str | Path):
        found = load_sweep(Path(plan), choice, scale)
    else:
        raise QuiverError(
            f"a sweep is a TOML file or a dictionary (base, methods, seeds, grid, case), not a "
            f"{type(plan).__name__}."
        )
    places = Places(Path(folder))
    check_inputs(found.cells, places)
    todo = pending(found.cells, places, retry)
    absent = check_cells(todo)
    if not dry_run and todo and sum(len(of) for of in absent.values()) == len(todo):
        raise QuiverError("\n".join(absent))
    where = LocalPool(jobs) if place is None else place
    seconds: dict[str, float | None] = {}
    with where if todo else contextlib.nullcontext():
        if estimate and todo:
            from quiverfl.sweeps.estimate import estimate as estimated

            seconds = estimated(todo, places, found.cells, where.threads).seconds
        if todo and not dry_run:
            with overview(todo, seconds, quiet=not progress) as watcher:
                where.run(todo, places, watcher)
    return Swept(found, places, seconds)


def _texts(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        yield f"{key}=" if value is None else f"{key}={json.dumps(value)}"


def cell_rows(plan: Sweep, places: Places) -> list[dict[str, Any]]:
    """What there is to know about each cell."""
    return [
        {
            "cell": cell.name,
            "case": cell.case,
            **dict(cell.point),
            "method": cell.config.method.name,
            "seed": cell.config.run.seed,
            "state": places.state(cell),
            "folder": str(places.run(cell)),
            "error": places.message(cell) if places.state(cell) != "finished" else "",
        }
        for cell in plan.cells
    ]


@dataclass(frozen=True, eq=False, repr=False)
class Swept(Shown):
    """The cells of a sweep: how they ended, and what came out of them."""

    plan: Sweep
    places: Places
    seconds: Mapping[str, float | None] = field(default_factory=dict)
    """How long cells would take, by name, where that was estimated."""

    def title(self) -> str:
        return f"Sweep {self.plan.name}"

    def facts(self) -> dict[str, str]:
        states = [row["state"] for row in cell_rows(self.plan, self.places)]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return {"cells": thousands(len(states)), **{k: thousands(v) for k, v in counts.items()}}

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per cell: its case, its place in the grid, method, seed, state, folder, error;
        and, of finished ones, the last score at each stage."""
        import pandas as pd

        rows = cell_rows(self.plan, self.places)
        for row in rows:
            if self.seconds:
                row["seconds"] = self.seconds.get(row["cell"])
            if row["state"] == "finished":
                row |= _scores(load_run(row["folder"]).summary)
        return pd.DataFrame(rows)

    @cached_property
    def runs(self) -> dict[str, SavedRun]:
        """The finished runs, by the names of their cells."""
        return {cell.name: load_run(self.places.run(cell)) for cell in self._finished()}

    @property
    def failed(self) -> dict[str, str]:
        """Why cells did not finish, by their names, as far as it is known."""
        rows = cell_rows(self.plan, self.places)
        return {r["cell"]: r["error"] for r in rows if r["state"] != "finished" and r["error"]}

    def comparison(self, case: str | None = None) -> pd.DataFrame:
        """One row per method and place in the grid: both stages, bytes, steps, seconds.

        Of one case, where the sweep has several.
        """
        from quiverfl.results.scores import comparison

        with grouped(self._folders(case)) as groups:
            return comparison(groups)

    def report(self, out: Path | str = "report.html", case: str | None = None) -> Path:
        return report(self._folders(case), out)

    def _finished(self) -> list[Cell]:
        unique = {cell.name: cell for cell in self.plan.cells}
        return [cell for cell in unique.values() if self.places.state(cell) == "finished"]

    def _folders(self, case: str | None) -> list[Path]:
        cases = list(dict.fromkeys(cell.case for cell in self.plan.cells))
        if case is None and len(cases) > 1:
            raise QuiverError(f"the sweep has several cases ({', '.join(cases)}): name one.")
        if case is not None and case not in cases:
            raise QuiverError(f"no case {case!r}; there are {', '.join(cases) or 'none'}.")
        chosen = cases[0] if case is None else case
        folders = [
            self.places.run(cell)
            for cell in {cell.name: cell for cell in self.plan.cells}.values()
            if cell.case == chosen and self.places.state(cell) != "new"
        ]
        if not any(cell.case == chosen for cell in self._finished()):
            raise QuiverError("no cell has finished yet; swept.table says why.")
        return folders


def _scores(summary: Mapping[str, Any]) -> dict[str, float]:
    """The mean over clients at the last evaluation, by metric and stage."""
    stages = summary["stages"].items()
    return {f"{summary['metric']}/{stage}": of["last"]["mean"] for stage, of in stages}
