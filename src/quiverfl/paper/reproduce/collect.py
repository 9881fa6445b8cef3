"""From cells to results: the finished runs of each case, put together by method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quiverfl.errors import QuiverError
from quiverfl.methods import METHODS, method_title
from quiverfl.results.groups import Group, group_runs
from quiverfl.results.run_files import RunResult, read_run
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell


@dataclass(frozen=True, eq=False)
class CaseResult:
    """One column of a table: a group of runs per method, in the order of the paper's tables."""

    label: str
    groups: tuple[Group, ...]

    def group(self, method: str) -> Group | None:
        return next((group for group in self.groups if group.method == method), None)


@dataclass(frozen=True, eq=False)
class Results:
    cases: tuple[CaseResult, ...]
    missing: tuple[str, ...]
    """A sentence for every cell without a finished run."""
    family: Results | None = None
    """All results of the item, where these are some of its cases: what p is corrected for."""

    def alone(self, case: CaseResult) -> Results:
        return Results((case,), self.missing, self.family or self)

    def methods(self) -> list[str]:
        """Those with a result anywhere: Quiver's in their order, then your own."""
        found = sorted({group.method for group in self.all_groups()})
        known = [name for name in METHODS if name in found]
        return known + [name for name in found if name not in METHODS]

    def one_each(self) -> list[Group]:
        """A group of each method, wherever it comes from."""
        return list({group.method: group for group in reversed(self.all_groups())}.values())

    def all_groups(self) -> list[Group]:
        return [group for case in self.cases for group in case.groups]


def collect(cells: Sequence[Cell], places: Places) -> Results:
    """Read what has finished; say what has not."""
    runs: dict[str, list[RunResult]] = {}
    missing = []
    for cell in cells:
        state = places.state(cell)
        if state == "finished":
            runs.setdefault(cell.label, []).append(read_run(places.run(cell)))
        else:
            why = "diverged" if state == "diverged" else "has not finished"
            name = method_title(cell.config.method.name)
            place = f" on {cell.label}" if cell.label else ""
            missing.append(f"{name}{place}, seed {cell.config.run.seed}, {why}.")
    if not runs:
        raise QuiverError(f"nothing has finished yet. {' '.join(missing[:3])}")
    cases = [CaseResult(label, tuple(group_runs(found))) for label, found in runs.items()]
    return Results(tuple(cases), tuple(missing))
