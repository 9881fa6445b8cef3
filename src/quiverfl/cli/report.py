"""`quiver report`, `quiver export` and `quiver extend`: what to do with runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from quiverfl.cli.options import Quiet, ResultOptions, Stage, expand_options
from quiverfl.cli.run import AsJson, run_and_print
from quiverfl.errors import QuiverError
from quiverfl.support.environment import require_package
from quiverfl.support.output_folders import refuse_foreign

if TYPE_CHECKING:
    from quiverfl.results.groups import Group
    from quiverfl.results.run_files import RunResult


@expand_options
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, or of folders of runs.", metavar="DIR…")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The HTML file. By default report.html in the folder, if it is one."),
    ] = None,
    stage: Annotated[
        Stage, typer.Option(help="The stage to show first; the other one is always shown too.")
    ] = Stage.local,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write TensorBoard event files below this folder too.")
    ] = None,
    devices: Annotated[
        Path | None,
        typer.Option(help="A TOML file with [devices] and [network]: give the runs their times."),
    ] = None,
    waits: Annotated[
        str | None,
        typer.Option(help='With --devices: who is waited for, "graph" (unless given) or "all".'),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    *,
    files: ResultOptions,
) -> None:
    """Compare runs: one HTML file that needs no network, and a table.

    Finished, running and crashed runs can all be reported on. Runs that differ only in their seed
    are put together.
    """
    from quiverfl.results.report.page import write_report
    from quiverfl.results.tables import print_comparison, print_differences, write_results

    if tensorboard is not None:
        require_package("tensorboard", "--tensorboard")
        refuse_foreign(tensorboard, _holds_events, "choose another --tensorboard")
    written = files.files()
    if waits is not None and devices is None:
        raise QuiverError(f"--waits {waits}: it goes with --devices FILE, which gives the times.")
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise QuiverError(f"--out {out}: what is written is one HTML file; let it end in .html.")
    page = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    prepare = None if devices is None else _retiming(devices, waits or "graph")
    groups = write_report(folders, page, stage.value, prepare=prepare)
    write_results(groups, written, stage.value)
    if tensorboard is not None:
        _write_events(groups, tensorboard)
    if as_json:
        document = {"report": str(page), "rows": _rows(groups), "differences": _differences(groups)}
        print(json.dumps(document))
        return
    console = Console(emoji=False)
    print_comparison(console, groups, stage.value)
    print_differences(console, groups, stage.value)
    console.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)


def _retiming(path: Path, waits: str) -> Callable[[RunResult], RunResult]:
    """Gives a run the seconds and joules of the devices that a file describes."""
    from quiverfl.clock.settings import read_sections
    from quiverfl.runs.config_files import read_toml
    from quiverfl.runs.retime import retime_result

    if waits not in ("graph", "all"):
        raise QuiverError(f'--waits {waits}: write "graph" or "all".')
    tree = read_toml(path, f"{path}: no such file.")
    sections = read_sections(tree, str(path))
    return lambda run: retime_result(run, *sections, waits)


def _holds_events(folder: Path) -> bool:
    """Whether it is a folder of TensorBoard's, which several programs may write below."""
    return any(folder.rglob("*tfevents*"))


def _write_events(groups: list[Group], folder: Path) -> None:
    from quiverfl.runs.callbacks import write_events

    for group in groups:
        for run in group.runs:
            write_events(run.path, folder / f"{group.label}-seed{run.seed}")


def _differences(groups: list[Group]) -> list[dict[str, object]]:
    """Paired differences within each case at both stages, p also corrected for their number."""
    from quiverfl.results.statistics import case_differences

    frame = case_differences(groups)
    rows: list[dict[str, object]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def _rows(groups: list[Group]) -> list[dict[str, object]]:
    from quiverfl.results.scores import compare_groups

    frame = compare_groups(groups)
    rows: list[dict[str, object]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def export(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    client: Annotated[int, typer.Option(help="Number of the client, from 0.")] = 0,
    stage: Annotated[
        Stage, typer.Option(help="The model after the last communication, or before it.")
    ] = Stage.mixed,
    out: Annotated[Path | None, typer.Option("--out", help="A file NAME.safetensors.")] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write ONNX beside it, too.")] = False,
    program: Annotated[
        bool, typer.Option("--program", help="Write a torch.export program (.pt2), too.")
    ] = False,
) -> None:
    """Write a client's personal model with its normalisation, its labels and how to load it."""
    from quiverfl.runs.export import export_client
    from quiverfl.runs.folder import RunFolder

    path = out or folder / f"client-{client}.safetensors"
    wanted: list[tuple[Literal["program", "onnx"], bool]] = [("program", program), ("onnx", onnx)]
    also = [kind for kind, asked in wanted if asked]
    for line in export_client(RunFolder(folder), client, stage.value, path, also):
        print(line)


def extend(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    rounds: Annotated[int, typer.Option(help="The total number of rounds.")],
    quiet: Quiet = False,
    json_: AsJson = False,
) -> None:
    """Give a run more rounds than it was planned for, and resume it."""
    from quiverfl.runs.folder import RunFolder

    run_and_print(RunFolder(folder).extend(rounds), folder, quiet, json_)
