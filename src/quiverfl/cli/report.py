"""`quiver report`: what some runs came to, as a page and in the terminal."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from quiverfl.errors import QuiverError
from quiverfl.extras import require

if TYPE_CHECKING:
    from quiverfl.results.groups import Group


class Stage(enum.StrEnum):
    local = "local"
    mixed = "mixed"


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
    table: Annotated[
        list[Path] | None,
        typer.Option(help="Write the table too: .md, .csv or .tex; may be given again."),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write TensorBoard event files below this folder too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Compare runs: one HTML file that needs no network, and a table.

    Finished, running and crashed runs can all be reported on. Runs that differ only in their seed
    are put together.
    """
    from quiverfl.results.html_report import write_report
    from quiverfl.results.terminal import print_comparison, print_differences

    if tensorboard is not None:
        require("tensorboard", "--tensorboard")
    for path in table or []:
        _check_table(path)
    page = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    groups = write_report(folders, page, stage.value)
    for path in table or []:
        _write_table(groups, path, stage.value)
    if tensorboard is not None:
        _write_events(groups, tensorboard)
    if as_json:
        found = {"report": str(page), "rows": _rows(groups), "differences": _differences(groups)}
        print(json.dumps(found))
        return
    console = Console()
    print_comparison(console, groups, stage.value)
    print_differences(console, groups, stage.value)
    console.print(f"report: {page}", soft_wrap=True, markup=False, highlight=False)


def _check_table(path: Path) -> None:
    """Before anything is written."""
    if path.suffix not in (".md", ".csv", ".tex"):
        raise QuiverError(f"--table {path}: its name must end in .md, .csv or .tex.")


def _write_table(groups: list[Group], path: Path, stage: str) -> None:
    from quiverfl.results import table_formats
    from quiverfl.results.output_files import replace_file
    from quiverfl.results.scores import comparison
    from quiverfl.results.summary import STAGES
    from quiverfl.results.tables import comparison_table, difference_table, reference_of

    stages = (stage, *(other for other in STAGES if other != stage))
    shown = [comparison_table(groups, stages=stages)]
    if (found := reference_of(groups)) is not None:
        shown.append(difference_table(*found, stages=stages))
    if path.suffix == ".md":
        text = "\n".join(map(table_formats.markdown, shown))
    elif path.suffix == ".tex":
        text = "\n".join(map(table_formats.latex, shown))
    else:
        text = comparison(groups).to_csv(index=False)
    replace_file(path, text.encode())


def _write_events(groups: list[Group], folder: Path) -> None:
    from quiverfl.results.tensorboard import write_events

    for group in groups:
        for run in group.runs:
            write_events(run.path, folder / f"{group.label}-seed{run.seed}")


def _differences(groups: list[Group]) -> list[dict[str, object]]:
    """Paired differences at both stages, p also corrected for their number."""
    import pandas as pd

    from quiverfl.results.paired import holm, paired_differences
    from quiverfl.results.summary import STAGES
    from quiverfl.results.tables import reference_of

    found = reference_of(groups)
    if found is None:
        return []
    frames = [paired_differences(*found, stage).assign(stage=stage) for stage in STAGES]
    frame = pd.concat(frames, ignore_index=True)
    frame["p_holm"] = holm(frame["p"].tolist())
    rows: list[dict[str, object]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows


def _rows(groups: list[Group]) -> list[dict[str, object]]:
    from quiverfl.results.scores import comparison

    frame = comparison(groups)
    rows: list[dict[str, object]] = json.loads(frame.to_json(orient="records", double_precision=15))
    return rows
