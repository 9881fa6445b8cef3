"""`quiver reproduce`: a table or a figure of the paper, from training to files."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from quiverfl.cli import where
from quiverfl.cli.sweep import (
    Cases,
    DryRun,
    Estimated,
    Events,
    Methods,
    Out,
    Quiet,
    Retry,
    Seeds,
    Settings,
    Stage,
    carry_out,
    choice,
    leave,
    list_cells,
    write_events,
)
from quiverfl.extras import require
from quiverfl.paper.reproduce.catalogue import ITEMS, Item, find_item
from quiverfl.paper.reproduce.rates import Protocol as Whose
from quiverfl.paper.reproduce.rates import named, rate_settings
from quiverfl.paper.reproduce.selection import item_cells
from quiverfl.paper.reproduce.variants import (
    graph_settings,
    smoke_test,
    trained_as_often,
)
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell

if TYPE_CHECKING:
    from quiverfl.paper.reproduce.write import Shown
    from quiverfl.results.table_formats import Table


class Report(enum.StrEnum):
    last = "last"
    best = "best"
    last10 = "last10"


class Graph(enum.StrEnum):
    push = "push"
    pull = "pull"


class Protocol(enum.StrEnum):
    paper = "paper"
    tuned = "tuned"


class Equal(enum.StrEnum):
    rounds = "rounds"
    participation = "participation"


def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(ITEMS)}.")],
    scale: Annotated[
        str, typer.Option(help="small, medium, paper, tiny (a smoke test), or a folder of sweeps.")
    ] = "small",
    methods: Methods = None,
    seeds: Seeds = None,
    cases: Cases = None,
    out: Out = Path("runs"),
    jobs: where.Jobs = None,
    stage: Annotated[Stage, typer.Option(help="Which accuracy comes first.")] = Stage.local,
    report: Annotated[Report, typer.Option(help="Which rounds count.")] = Report.last,
    graph: Annotated[
        Graph, typer.Option(help="For DFedPGP and OSGP: Algorithm 1 pushes, the appendix pulls.")
    ] = Graph.push,
    equal: Annotated[
        Equal,
        typer.Option(help="participation: server methods get more rounds, to train as often."),
    ] = Equal.rounds,
    protocol: Annotated[
        Protocol | None,
        typer.Option(
            help="Whose learning rates: the paper's for all methods, or tuned ones. "
            "The scale's own unless given."
        ),
    ] = None,
    rates: Annotated[
        Path | None, typer.Option(help="Tuned rates: what `quiver tune --write` wrote.")
    ] = None,
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print as JSON what was written.")
    ] = False,
) -> None:
    """Run what a table or figure of the paper needs, and write it beside the paper's numbers.

    Started again after a crash, it resumes. Tables in the same folder share their
    finished cells.
    """
    if tensorboard:
        require("tensorboard", "--tensorboard")
    from quiverfl.paper.reproduce.write import Shown  # late: it loads matplotlib

    item = find_item(what)
    whose: Whose | None = None if protocol is None else protocol.value
    given = [*rate_settings(whose, scale, rates), *graph_settings(graph.value), *(set_ or ())]
    wanted = choice(methods, seeds, cases, given)
    cells = item_cells(item, scale, wanted, equal is Equal.participation)
    places = Places(out)
    if item.kind != "partition":
        place = where.chosen(
            on, cells, jobs, address, cpus, gpus, memory, bring_back, submit, sbatch
        )
        carry_out(cells, places, place, dry_run, estimated, retry, quiet or as_json)
    if dry_run:
        list_cells(cells, places)
        return
    if equal is Equal.participation:
        item = trained_as_often(item)
    if scale == "tiny":
        item = smoke_test(item)
    item = named(item, whose)
    folder = out / folder_name(what, scale, graph, equal, protocol, rates)
    _write(what, item, cells, places, folder, Shown(stage.value, report.value), as_json)
    if item.kind == "partition":
        return
    if tensorboard:
        finished = [cell for cell in cells if places.state(cell) == "finished"]
        write_events(finished, places, folder / "tensorboard")
    leave(cells, places)


def folder_name(
    what: str,
    scale: str,
    graph: Graph,
    equal: Equal,
    protocol: Protocol | None = None,
    rates: Path | None = None,
) -> str:
    parts = [what, Path(scale).name]
    parts += ["pull"] if graph is Graph.pull else []
    parts += ["equal-participation"] if equal is Equal.participation else []
    parts += [protocol.value] if protocol is not None else []
    parts += [rates.stem] if rates is not None else []
    return "-".join(filter(None, parts))


def _write(
    what: str,
    item: Item,
    cells: Sequence[Cell],
    places: Places,
    folder: Path,
    how: Shown,
    as_json: bool,
) -> None:
    from quiverfl.paper.reproduce.write import per_case, write, written_files

    tables = write(what, item, cells, places, folder, how)
    files = [str(folder / name) for name in written_files(folder)]
    if as_json:
        print(json.dumps({"folder": str(folder), "files": files}))
        return
    console = Console(highlight=False)
    if item.kind != "partition" and not _fit(console, tables):
        tables = per_case(what, item, cells, places, how)
    print_tables(console, tables)
    console.print(f"written: {folder}", markup=False, soft_wrap=True)


def _fit(console: Console, tables: Sequence[Table]) -> bool:
    from rich.measure import Measurement

    from quiverfl.results.table_formats import rich

    wide = console.options.update(width=10_000)
    drawn = (rich(table, caption=False) for table in tables)
    return all(Measurement.get(console, wide, one).maximum <= console.width for one in drawn)


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    """A caption that several tables share is printed once, below the last of them.

    One that is too wide would have no room for names: its parts are printed below each other.
    """
    from quiverfl.results.table_formats import rich

    cut = [[table] if _fit(console, [table]) else table.parts() for table in tables]
    tables = [part for parts in cut for part in parts]
    for place, table in enumerate(tables):
        console.print(rich(replace(table, caption=""), caption=False))
        if table.caption not in [later.caption for later in tables[place + 1 :]]:
            console.print(table.caption, style="dim", markup=False)
            console.print()
