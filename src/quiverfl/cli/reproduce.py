"""`quiver reproduce`: a table or a figure of the paper, from training to files."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from quiverfl.cli.options import (
    DryRun,
    Events,
    ResultOptions,
    Retry,
    Stage,
    SweepOptions,
    expand_options,
)
from quiverfl.cli.sweep import (
    exit_unless_finished,
    print_cells,
    run_with_progress,
    write_cell_events,
)
from quiverfl.errors import QuiverError
from quiverfl.paper.reproduce.catalogue import (
    ITEMS,
    Item,
    add_notes,
    graph_settings,
    make_item_cells,
    rate_settings,
)
from quiverfl.paper.reproduce.catalogue import Protocol as RateProtocol
from quiverfl.support.environment import require_package
from quiverfl.sweeps.plan import Cell, SweepFolder

if TYPE_CHECKING:
    from quiverfl.paper.reproduce.write import TableOptions


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


@expand_options
def reproduce(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(ITEMS)}.")],
    options: SweepOptions,
    scale: Annotated[
        str, typer.Option(help="small, medium, paper, tiny (a smoke test), or a folder of sweeps.")
    ] = "small",
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
    dry_run: DryRun = False,
    retry: Retry = False,
    tensorboard: Events = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print as JSON what was written.")
    ] = False,
    *,
    files: ResultOptions,
) -> None:
    """Run what a table or figure of the paper needs, and write it beside the paper's numbers.

    Started again after a crash, it resumes. Tables in the same folder share their
    finished cells.
    """
    if tensorboard:
        require_package("tensorboard", "--tensorboard")
    from quiverfl.paper.reproduce.write import TableOptions  # late: it loads matplotlib

    item, written = ITEMS.find(what), files.files()
    rate_protocol: RateProtocol | None = None if protocol is None else protocol.value
    choice = options.choice(
        [*rate_settings(rate_protocol, scale, rates), *graph_settings(graph.value)]
    )
    cells = make_item_cells(item, scale, choice, equal is Equal.participation)
    places = SweepFolder(options.out)
    places.check(folder_name(what, scale, graph, equal, protocol, rates))
    if item.kind != "partition":
        executor = options.make_executor(cells)
        quiet = options.quiet or as_json
        run_with_progress(cells, places, executor, options.estimate, quiet, dry_run, retry)
    if dry_run:
        print_cells(cells, places)
        return
    item = add_notes(item, scale, rate_protocol, equal is Equal.participation)
    folder = options.out / folder_name(what, scale, graph, equal, protocol, rates)
    wanted = TableOptions(stage.value, report.value, written)
    _write(what, item, cells, places, folder, wanted, as_json)
    if item.kind == "partition":
        return
    if tensorboard:
        finished = [cell for cell in cells if places.state(cell) == "finished"]
        write_cell_events(finished, places, folder / "tensorboard")
    exit_unless_finished(cells, places)


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
    places: SweepFolder,
    folder: Path,
    options: TableOptions,
    as_json: bool,
) -> None:
    from quiverfl.paper.reproduce.write import list_written_files, write_item
    from quiverfl.results.tables import print_tables

    tables = write_item(what, item, cells, places, folder, options)
    files = [str(folder / name) for name in list_written_files(folder)]
    if as_json:
        print(json.dumps({"folder": str(folder), "files": files}))
        return
    console = Console(emoji=False, highlight=False)
    print_tables(console, tables)
    console.print(f"written: {folder}", markup=False, soft_wrap=True)


# `quiver theory`: the paper's theorem on a problem with known constants, with plots and tables.


def theory(
    out: Annotated[
        Path | None, typer.Option(help="Write a page, plots, tables and numbers into this folder.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds: fewer and shorter runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure DFedPGP's rate, what connectivity is worth, and what push-sum conserves.

    Takes about two minutes. Every number comes out of DFedPGP running on quadratics whose
    constants are known.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise QuiverError(f"--out {out}: it is a file; name a folder.")
    if out is not None:
        from quiverfl.paper.theory.page import check_folder

        check_folder(out)
    from quiverfl.paper.theory.experiments import FULL, QUICK, measure_theory
    from quiverfl.paper.theory.page import (
        all_tables,
        describe_findings,
        findings_to_json,
        write_findings,
    )
    from quiverfl.results.formatting import format_rich

    console, errors = (
        Console(emoji=False, highlight=False),
        Console(emoji=False, stderr=True, highlight=False),
    )

    def announce(text: str) -> None:
        if not as_json:
            errors.print(text, style="dim", markup=False)

    findings = measure_theory(QUICK if quick else FULL, announce)
    page = None if out is None else write_findings(findings, out)
    if as_json:
        where = None if page is None else str(page)
        print(json.dumps({"page": where, **findings_to_json(findings)}, indent=2))
        return
    for table in all_tables(findings):
        console.print(format_rich(table))
    for verdict in describe_findings(findings):
        console.print(verdict, markup=False)
    if page is not None:
        console.print(f"page: {page}", soft_wrap=True, markup=False)
