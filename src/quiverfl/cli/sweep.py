"""`quiver sweep`: a grid of experiments, each in a folder of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quiverfl.cli.options import (
    DryRun,
    Events,
    ResultOptions,
    Retry,
    SweepOptions,
    expand_options,
)
from quiverfl.results import formatting
from quiverfl.support.environment import require_package
from quiverfl.sweeps.api import SweepReporter, group_cells, list_cell_rows, run_cells
from quiverfl.sweeps.display import describe_cell
from quiverfl.sweeps.estimate import Estimate, Reasons
from quiverfl.sweeps.executor import SweepExecutor
from quiverfl.sweeps.plan import Cell, SweepFolder, load_sweep


@expand_options
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with a base and a grid.")],
    options: SweepOptions,
    dry_run: DryRun = False,
    retry: Retry = False,
    tensorboard: Events = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
    *,
    files: ResultOptions,
) -> None:
    """Run a grid of experiments; started again, it resumes.

    Finished cells are skipped, interrupted ones resumed, and a cell that fails stops no other.
    """
    from quiverfl.results.tables import write_results

    if tensorboard:
        require_package("tensorboard", "--tensorboard")
    written = files.files()
    plan, folder = load_sweep(file, options.choice()), SweepFolder(options.out)
    folder.check(plan.name)
    executor = options.make_executor(plan.cells)
    quiet = options.quiet or as_json
    run_with_progress(plan.cells, folder, executor, options.estimate, quiet, dry_run, retry)
    rows = list_cell_rows(plan, folder)
    if as_json:
        print(json.dumps(rows))
    if dry_run:
        if not as_json:
            print_cells(plan.cells, folder)
        return
    finished = [cell for cell in plan.cells if folder.state(cell) == "finished"]
    if finished:
        _write_reports(plan.cells, folder, options.out / plan.name, as_json)
        write_results(group_cells(plan.cells, folder)[0], written)
    if tensorboard:
        write_cell_events(finished, folder, options.out / plan.name / "tensorboard")
    exit_unless_finished(plan.cells, folder)


class ConsoleReporter(SweepReporter):
    """Prints on standard error what a sweep is about to do, and shows its progress."""

    def __init__(self, quiet: bool) -> None:
        super().__init__(progress=not quiet)
        self._console = Console(emoji=False, stderr=True, highlight=False, quiet=quiet)
        self._printed: set[str] = set()

    def report_pending(self, cells: Sequence[Cell], pending: int, absent: Reasons) -> None:
        total = len({cell.name for cell in cells})
        self._console.print(
            f"{total} cell{'s' * (total != 1)}, {total - pending} of them done before."
        )
        for reason, of in absent.items():
            self._print(f"{len(of)} of them cannot run yet: {reason}")
        self._printed |= set(absent)

    @contextlib.contextmanager
    def report_trials(self) -> Iterator[Callable[[int, int], None]]:
        with self._console.status("estimating the time by short trials …") as status:
            yield lambda done, of: status.update(f"estimating the time: trial {done + 1} of {of} …")

    def report_estimate(self, estimate: Estimate, at_a_time: int) -> None:
        unknown = f"; {estimate.unknown} cells could not be estimated" if estimate.unknown else ""
        if estimate.unknown == len(estimate.seconds):
            reason = "" if estimate.reason in self._printed else estimate.reason
            self._console.print(f"How long it will take could not be estimated. {reason}".rstrip())
            return
        time = formatting.format_duration(estimate.total(at_a_time))
        self._console.print(
            f"about {time} with {at_a_time} at a time ({estimate.trials} short trials, "
            f"{estimate.measured} cells judged by earlier runs{unknown})."
        )

    def report_submission(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def run_with_progress(
    cells: Sequence[Cell],
    folder: SweepFolder,
    executor: SweepExecutor,
    estimate: bool,
    quiet: bool,
    dry_run: bool = False,
    retry: bool = False,
    until: Mapping[str, int] | None = None,
) -> None:
    """Run cells on the console. The command ends here if a cluster runs them later."""
    reporter = ConsoleReporter(quiet)
    try:
        run_cells(cells, folder, executor, reporter, dry_run, estimate, retry, until)
    except KeyboardInterrupt:
        Console(emoji=False, stderr=True).print(
            "interrupted; the same command resumes from the checkpoints."
        )
        raise
    if executor.submission:
        raise typer.Exit


def exit_unless_finished(cells: Sequence[Cell], folder: SweepFolder) -> None:
    """Print which cells failed, and end with the exit code of the worst."""
    failed = [cell for cell in cells if folder.state(cell) != "finished"]
    if not failed:
        return
    console = Console(emoji=False, stderr=True, highlight=False)
    for cell in failed:
        reason = folder.message(cell) or "not run"
        text = f"not finished: {describe_cell(cell)}. {reason}"
        console.print(text, markup=False, soft_wrap=True)
    diverged = all(folder.state(cell) == "diverged" for cell in failed)
    raise typer.Exit(3 if diverged else 2)


def write_cell_events(cells: Sequence[Cell], folder: SweepFolder, out: Path) -> None:
    """Write TensorBoard events of finished cells, each once."""
    from quiverfl.runs.callbacks import write_events

    for cell in cells:
        target = out / cell.name
        if not any(target.glob("*tfevents*")):
            write_events(folder.run(cell), target)


def _write_reports(cells: Sequence[Cell], folder: SweepFolder, out: Path, quiet: bool) -> None:
    """Write a page and a table of numbers for each case, and print its table."""
    from quiverfl.results.report.page import write_report
    from quiverfl.results.scores import compare_groups
    from quiverfl.results.tables import print_comparison

    console = Console(emoji=False, quiet=quiet, highlight=False)
    for case in dict.fromkeys(cell.case for cell in cells):
        of_case = [cell for cell in cells if cell.case == case]
        # What diverged is shown as such; the report says it of whatever has not finished, too.
        runs = [folder.run(cell) for cell in of_case if folder.state(cell) != "new"]
        if not any(folder.state(cell) == "finished" for cell in of_case):
            continue
        page = out / f"{formatting.make_file_name(case) or 'report'}.html"
        groups = write_report(runs, page)
        table = compare_groups(groups).to_csv(index=False)
        formatting.write_result_file(page.with_suffix(".csv"), table.encode())
        if case:
            console.print(f"\n{case}", style="bold", markup=False)
        print_comparison(console, groups)
        console.print(f"report: {page}", soft_wrap=True, markup=False)


def print_cells(cells: Sequence[Cell], folder: SweepFolder) -> None:
    for cell in cells:
        print(f"{folder.state(cell):<9} {cell.name}  {cell.label}".rstrip())
