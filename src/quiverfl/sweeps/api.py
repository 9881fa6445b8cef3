"""A sweep from Python: what `quiver sweep` does, and its results as tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiverfl.errors import QuiverError
from quiverfl.methods import method_title
from quiverfl.options import python_number, refuse_old_names
from quiverfl.runs.compare import Results, report
from quiverfl.runs.run import SavedRun, load_run
from quiverfl.seeds import check_seeds
from quiverfl.support import durable
from quiverfl.support.cards import format_thousands
from quiverfl.sweeps.display import show_sweep
from quiverfl.sweeps.estimate import Estimate, Reasons, check_cells, estimate_seconds
from quiverfl.sweeps.executor import (
    LocalPool,
    SweepExecutor,
    Watcher,
    check_inputs,
    select_pending,
)
from quiverfl.sweeps.plan import Cell, Choice, Sweep, SweepFolder, load_sweep, plan_of

if TYPE_CHECKING:
    import pandas as pd

    from quiverfl.results.groups import Group
    from quiverfl.results.run_files import RunResult


class SweepReporter:
    """Is told what a sweep is about to do; this one prints nothing but progress, if wanted."""

    def __init__(self, progress: bool = False) -> None:
        self._progress = progress

    def report_pending(self, cells: Sequence[Cell], pending: int, absent: Reasons) -> None:
        """`pending` of the cells have to run; `absent` says which of them lack their data."""

    @contextlib.contextmanager
    def report_trials(self) -> Iterator[Callable[[int, int], None]]:
        """Give a function that is called before each short trial of an estimate."""
        yield lambda done, of: None

    def report_estimate(self, estimate: Estimate, at_a_time: int) -> None: ...

    def report_submission(self, text: str) -> None:
        """The cells run later, somewhere else."""

    def show_progress(
        self, cells: Sequence[Cell], seconds: Mapping[str, float | None]
    ) -> AbstractContextManager[Watcher]:
        return show_sweep(cells, seconds, quiet=not self._progress)


def run_cells(
    cells: Sequence[Cell],
    folder: SweepFolder,
    executor: SweepExecutor,
    reporter: SweepReporter,
    dry_run: bool = False,
    estimate: bool = False,
    retry: bool = False,
    until: Mapping[str, int] | None = None,
) -> dict[str, float | None]:
    """Check the cells and run those that are not over; return the estimated seconds by name.

    Nothing runs if none of them has its data. `until` has the rounds, by the name of a cell, after
    which it is left with a checkpoint.
    """
    check_inputs(cells, folder)
    pending = select_pending(cells, folder, retry)
    absent = check_cells(pending)
    if not dry_run and pending and sum(len(of) for of in absent.values()) == len(pending):
        raise QuiverError("\n".join(absent))  # the same reasons once, not once per cell
    reporter.report_pending(cells, len(pending), absent)
    seconds: dict[str, float | None] = {}
    if not pending:
        return seconds
    with executor:
        if estimate:
            with reporter.report_trials() as on_trial:
                expected = estimate_seconds(
                    pending, folder, cells, executor.threads, on_trial, until
                )
            reporter.report_estimate(expected, executor.at_a_time)
            seconds = expected.seconds
        if not dry_run:
            with reporter.show_progress(pending, seconds) as watcher:
                executor.run(pending, folder, watcher, until)
    if executor.submission:
        reporter.report_submission(executor.submission)
    return seconds


@refuse_old_names(place="executor")
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
    executor: SweepExecutor | None = None,
) -> SweepResult:
    """Run a grid of experiments, each in a folder of its own; called again, it resumes.

    `plan` is a file of `quiver sweep`, or a dictionary with the same keys: base, methods, seeds,
    grid, case. `methods`, `seeds` and `cases` choose some of it. `settings`, such as
    {"run.rounds": 5}, win over it; None takes a key out.

    Finished cells are not repeated, diverged ones only with `retry`, and a cell that fails stops no
    other. `jobs` cells run side by side in processes of their own; `executor` may be a cluster
    instead. `dry_run` only checks the plan and lists its cells. `estimate` measures how long each
    cell would take, by short trials.
    """
    numbers = None if seeds is None else check_seeds(seeds)
    choice = Choice(methods, numbers, cases, tuple(_format_settings(settings or {})))
    if isinstance(plan, Mapping):
        sweep_plan = plan_of(python_number(plan), Path("sweep"), choice, scale)
    elif isinstance(plan, str | Path):
        sweep_plan = load_sweep(Path(plan), choice, scale)
    else:
        raise QuiverError(
            f"a sweep is a TOML file or a dictionary (base, methods, seeds, grid, case), not a "
            f"{type(plan).__name__}."
        )
    sweep_folder = SweepFolder(durable.to_path(folder, "sweep: folder"))
    sweep_folder.check()
    executor = LocalPool(jobs) if executor is None else executor
    reporter = SweepReporter(progress)
    seconds = run_cells(
        sweep_plan.cells, sweep_folder, executor, reporter, dry_run, estimate, retry
    )
    return SweepResult(sweep_plan, sweep_folder, seconds)


def _format_settings(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        yield f"{key}=" if value is None else f"{key}={json.dumps(python_number(value))}"


def list_cell_rows(plan: Sweep, folder: SweepFolder) -> list[dict[str, Any]]:
    """Return the facts about each cell: its place in the grid, its state, its folder, its error."""
    return [
        {
            "cell": cell.name,
            "case": cell.case,
            **dict(cell.point),
            "method": cell.config.method.name,
            "seed": cell.config.run.seed,
            "state": folder.state(cell),
            "folder": str(folder.run(cell)),
            "error": folder.message(cell) if folder.state(cell) != "finished" else "",
        }
        for cell in plan.cells
    ]


def group_cells(
    cells: Sequence[Cell], folder: SweepFolder
) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """The finished runs by case, and a sentence for every cell that has none.

    A group's case is the label of its cells: the sweep's own name for its place in the grid.
    """
    from quiverfl.results.groups import group_runs
    from quiverfl.results.run_files import read_run

    runs: dict[str, list[RunResult]] = {}
    missing = []
    for cell in cells:
        state = folder.state(cell)
        if state == "finished":
            runs.setdefault(cell.label, []).append(read_run(folder.run(cell)))
        else:
            why = "diverged" if state == "diverged" else "has not finished"
            case = f" on {cell.label}" if cell.label else ""
            title = method_title(cell.config.method.name)
            missing.append(f"{title}{case}, seed {cell.config.run.seed}, {why}.")
    groups = [
        replace(group, case=label, case_position=position, name=method_title(group.method))
        for position, (label, own) in enumerate(runs.items())
        for group in group_runs(own)
    ]
    return tuple(groups), tuple(missing)


@refuse_old_names(failed="failures")
@dataclass(frozen=True, eq=False, repr=False)
class SweepResult(Results):
    """The cells of a sweep: how they ended, and what came out of them."""

    plan: Sweep
    folder: SweepFolder
    seconds: Mapping[str, float | None] = field(default_factory=dict)
    """Estimated seconds of cells by name, where an estimate was asked for."""

    def title(self) -> str:
        return f"Sweep {self.plan.name}"

    def fields(self) -> dict[str, str]:
        states = [row["state"] for row in list_cell_rows(self.plan, self.folder)]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return {
            "cells": format_thousands(len(states)),
            **{k: format_thousands(v) for k, v in counts.items()},
        }

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell: case, grid settings, method, seed, state, folder and error.

        Finished cells also have their last score at each stage.
        """
        import pandas as pd

        rows = list_cell_rows(self.plan, self.folder)
        for row in rows:
            if self.seconds:
                row["seconds"] = self.seconds.get(row["cell"])
            if row["state"] == "finished":
                row |= _last_scores(load_run(row["folder"]).summary)
        return pd.DataFrame(rows)

    @cached_property
    def runs(self) -> dict[str, SavedRun]:
        """The finished runs, by the names of their cells."""
        return {cell.name: load_run(self.folder.run(cell)) for cell in self._list_finished()}

    @property
    def failures(self) -> dict[str, str]:
        """Reasons why cells did not finish, by their names, as far as they are known."""
        rows = list_cell_rows(self.plan, self.folder)
        return {r["cell"]: r["error"] for r in rows if r["state"] != "finished" and r["error"]}

    @contextlib.contextmanager
    def open_groups(self) -> Iterator[Sequence[Group]]:
        groups, _ = group_cells(self.plan.cells, self.folder)
        if not groups:
            raise QuiverError("no cell has finished yet; result.cells says why.")
        yield groups

    def report(self, out: Path | str = "report.html", case: str | None = None) -> Path:
        return report(self._case_folders(case), out)

    def _list_finished(self) -> list[Cell]:
        unique = {cell.name: cell for cell in self.plan.cells}
        return [cell for cell in unique.values() if self.folder.state(cell) == "finished"]

    def _case_folders(self, case: str | None) -> list[Path]:
        cases = list(dict.fromkeys(cell.case for cell in self.plan.cells))
        if case is None and len(cases) > 1:
            raise QuiverError(f"the sweep has several cases ({', '.join(cases)}): name one.")
        if case is not None and case not in cases:
            raise QuiverError(f"no case {case!r}; there are {', '.join(cases) or 'none'}.")
        chosen = cases[0] if case is None else case
        folders = [
            self.folder.run(cell)
            for cell in {cell.name: cell for cell in self.plan.cells}.values()
            if cell.case == chosen and self.folder.state(cell) != "new"
        ]
        if not any(cell.case == chosen for cell in self._list_finished()):
            raise QuiverError("no cell has finished yet; result.cells says why.")
        return folders


def _last_scores(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean over clients at the last evaluation, by metric and stage."""
    stages = summary["stages"].items()
    return {f"{summary['metric']}/{stage}": of["last"]["mean"] for stage, of in stages}
