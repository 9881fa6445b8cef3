"""`quiver sweep`: a grid of experiments, each in a folder of its own."""

from __future__ import annotations

import enum
import json
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quiverfl.cli import where
from quiverfl.errors import QuiverError
from quiverfl.extras import require
from quiverfl.results import numbers
from quiverfl.sweeps.checks import check_cells
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.overview import describe, overview
from quiverfl.sweeps.plan import Cell, Choice, load_sweep
from quiverfl.sweeps.pool import check_inputs, pending
from quiverfl.sweeps.swept import cell_rows
from quiverfl.sweeps.where import Outcome, Where


class Stage(enum.StrEnum):
    local = "local"
    mixed = "mixed"


Out = Annotated[Path, typer.Option(help="Folder; sweeps in the same one share finished cells.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value for every cell.")
]
Methods = Annotated[
    str | None, typer.Option(help="Comma-separated; those of the file if not given.")
]
Seeds = Annotated[str | None, typer.Option(help="Comma-separated; those of the file if not given.")]
Cases = Annotated[str | None, typer.Option(help="Semicolon-separated names of cases.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print what would run, and how long it would take.")
]
Estimated = Annotated[
    bool, typer.Option("--estimate/--no-estimate", help="Estimate the time first, by short trials.")
]
Retry = Annotated[bool, typer.Option("--retry", help="Run cells that diverged once more.")]
Events = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard event files too.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file with a base and a grid.")],
    jobs: where.Jobs = None,
    out: Out = Path("runs"),
    methods: Methods = None,
    seeds: Seeds = None,
    cases: Cases = None,
    set_: Settings = None,
    on: where.Place = where.On.local,
    address: where.Address = "local",
    cpus: where.Cpus = 1,
    gpus: where.Gpus = 0,
    memory: where.Memory = True,
    bring_back: where.BringBack = False,
    submit: where.Submit = False,
    sbatch: where.Sbatch = None,
    dry_run: DryRun = False,
    estimated: Estimated = True,
    retry: Retry = False,
    tensorboard: Events = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="The cells as JSON.")] = False,
) -> None:
    """Run a grid of experiments; started again, it resumes.

    Finished cells are skipped, interrupted ones resumed, and a cell that fails stops no other.
    """
    if tensorboard:
        require("tensorboard", "--tensorboard")
    plan = load_sweep(file, choice(methods, seeds, cases, set_))
    places = Places(out)
    place = where.chosen(
        on, plan.cells, jobs, address, cpus, gpus, memory, bring_back, submit, sbatch
    )
    carry_out(plan.cells, places, place, dry_run, estimated, retry, quiet or as_json)
    rows = cell_rows(plan, places)
    if as_json:
        print(json.dumps(rows))
    if dry_run:
        if not as_json:
            list_cells(plan.cells, places)
        return
    finished = [cell for cell in plan.cells if places.state(cell) == "finished"]
    if finished:
        _report(plan.cells, places, out / plan.name, as_json)
    if tensorboard:
        write_events(finished, places, out / plan.name / "tensorboard")
    leave(plan.cells, places)


def choice(
    methods: str | None, seeds: str | None, cases: str | None, values: Sequence[str] | None
) -> Choice:
    """The options of the command line, taken apart."""
    return Choice(
        None if methods is None else _words(methods, ","),
        None if seeds is None else _numbers(seeds),
        None if cases is None else _words(cases, ";"),
        tuple(values or ()),
    )


def carry_out(
    cells: Sequence[Cell],
    places: Places,
    place: Where,
    dry_run: bool,
    estimated: bool,
    retry: bool,
    quiet: bool,
    until: Mapping[str, int] | None = None,
) -> list[Outcome]:
    """Say how much there is to do, do it, and show progress.

    `until` has rounds, by the names of cells, that are enough for now. The command ends here if
    others do it later.
    """
    check_inputs(cells, places)
    todo = pending(cells, places, retry)
    absent = check_cells(todo)
    if not dry_run and todo and sum(len(of) for of in absent.values()) == len(todo):
        raise QuiverError("\n".join(absent))  # the same reasons once, not once per cell
    console = Console(stderr=True, highlight=False, quiet=quiet)
    names = {cell.name for cell in cells}
    console.print(f"{len(names)} cells, {len(names) - len(todo)} of them done before.")
    for reason, of in absent.items():
        console.print(f"{len(of)} of them cannot run yet: {reason}", markup=False, soft_wrap=True)
    if not todo:
        return []
    try:
        with place:
            seconds: dict[str, float | None] = {}
            if estimated:
                seconds = _estimate(todo, cells, places, place, console, absent, until)
            if dry_run:
                return []
            with overview(todo, seconds, quiet) as watcher:
                outcomes = place.run(todo, places, watcher, until)
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command resumes from the checkpoints.")
        raise
    if place.handed_over:
        console.print(place.handed_over, markup=False, soft_wrap=True)
        raise typer.Exit
    return outcomes


def _estimate(
    todo: Sequence[Cell],
    cells: Sequence[Cell],
    places: Places,
    place: Where,
    console: Console,
    said: Container[str],
    until: Mapping[str, int] | None = None,
) -> dict[str, float | None]:
    from quiverfl.sweeps.estimate import estimate

    with console.status("estimating the time by short trials …") as status:
        found = estimate(
            todo,
            places,
            cells,
            place.threads,
            lambda done, of: status.update(f"estimating the time: trial {done + 1} of {of} …"),
            until,
        )
    unknown = f"; {found.unknown} cells could not be estimated" if found.unknown else ""
    if found.unknown == len(todo):
        reason = "" if found.reason in said else found.reason
        console.print(f"How long it will take could not be estimated. {reason}".rstrip())
        return found.seconds
    console.print(
        f"about {numbers.duration(found.total(place.at_a_time))} with {place.at_a_time} at a time "
        f"({found.trials} short trials, {found.measured} cells judged by earlier runs{unknown})."
    )
    return found.seconds


def leave(cells: Sequence[Cell], places: Places) -> None:
    """Say which cells failed, and end with the exit code of the worst."""
    failed = [cell for cell in cells if places.state(cell) != "finished"]
    if not failed:
        return
    console = Console(stderr=True, highlight=False)
    for cell in failed:
        reason = places.message(cell) or "not run"
        console.print(f"not finished: {describe(cell)}. {reason}", markup=False, soft_wrap=True)
    diverged = all(places.state(cell) == "diverged" for cell in failed)
    raise typer.Exit(3 if diverged else 2)


def write_events(cells: Sequence[Cell], places: Places, folder: Path) -> None:
    """TensorBoard events of finished cells, each once."""
    from quiverfl.results.tensorboard import write_events as write

    for cell in cells:
        target = folder / cell.name
        if not any(target.glob("*tfevents*")):
            write(places.run(cell), target)


def _report(cells: Sequence[Cell], places: Places, folder: Path, quiet: bool) -> None:
    """A page, a table and the numbers of each case."""
    from quiverfl.results.html_report import write_report
    from quiverfl.results.output_files import file_name, replace_file
    from quiverfl.results.scores import comparison
    from quiverfl.results.terminal import print_comparison

    console = Console(quiet=quiet, highlight=False)
    for case in dict.fromkeys(cell.case for cell in cells):
        own = [cell for cell in cells if cell.case == case]
        # What diverged is shown as such; the report says it of whatever has not finished, too.
        runs = [places.run(cell) for cell in own if places.state(cell) != "new"]
        if not any(places.state(cell) == "finished" for cell in own):
            continue
        name = file_name(case) or "report"
        groups = write_report(runs, folder / f"{name}.html")
        numbers_file = folder / f"{name}.csv"
        replace_file(numbers_file, comparison(groups).to_csv(index=False).encode())
        if case:
            console.print(f"\n{case}", style="bold", markup=False)
        print_comparison(console, groups)
        page = folder / f"{name}.html"
        console.print(f"report: {page}", soft_wrap=True, markup=False)


def list_cells(cells: Sequence[Cell], places: Places) -> None:
    for cell in cells:
        print(f"{places.state(cell):<9} {cell.name}  {cell.label}".rstrip())


def _words(text: str, separator: str) -> list[str]:
    words = [word.strip() for word in text.split(separator) if word.strip()]
    if not words:
        raise QuiverError(f"{text!r}: name at least one, separated by {separator!r}.")
    return list(dict.fromkeys(words))


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise QuiverError(f"--seeds {text!r}: write whole numbers, such as 0,1,2.") from None
