"""`quiver run`, `resume`, `compare`, `methods`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quiverfl.callbacks.progress import progress
from quiverfl.cli import ranks
from quiverfl.config import Config, load_config
from quiverfl.distributed.rank_environment import own_rank, speaks, world_size
from quiverfl.errors import Diverged, QuiverError, Stopped
from quiverfl.extras import require
from quiverfl.locks import alone
from quiverfl.methods import METHODS, Method, find_method, method_title
from quiverfl.results.output_files import file_name

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; wins over the file.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write to.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
RankCount = Annotated[
    int | None,
    typer.Option("--ranks", help="Divide the clients among this many processes of this machine."),
]
Restarts = Annotated[
    int, typer.Option("--max-restarts", help="With --ranks: start again if one is killed.")
]
AsJson = Annotated[bool, typer.Option("--json", help="The summary as JSON on standard output.")]
Stop = Callable[[], bool]
TERMINATED = 128 + signal.SIGTERM


def run(
    config: Annotated[Path, typer.Argument(help="A TOML configuration.")],
    set_: Settings = None,
    out: Out = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write event files into the run folder.")
    ] = False,
    quiet: Quiet = False,
    json_: AsJson = False,
    count: RankCount = None,
    restarts: Restarts = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would need, on --ranks ranks.")
    ] = False,
) -> None:
    """Run one experiment into a folder of its own."""
    if tensorboard:
        require("tensorboard", "--tensorboard")
    settings = load_config(config, set_ or ())
    ranks.check_count(count, settings.data.clients)
    if dry_run:
        ranks.say_needs(settings, count or 1)
        return
    name = f"{config.stem}-{file_name(settings.method.name)}-{settings.identity()[:8]}"
    folder = out or Path("runs") / name
    if count is not None and count > 1:
        _refuse_unfinished(folder)
        options = [f"--set={text}" for text in set_ or ()] + _flags(quiet, json_)
        options += ["--tensorboard"] if tensorboard else []
        ranks.start(count, ["run", str(config), "--out", str(folder), *options], restarts)
    if world_size() == 1:
        _refuse_unfinished(folder)
    finish(settings, folder, quiet, json_)
    if tensorboard and own_rank() == 0:
        from quiverfl.results.tensorboard import write_events

        write_events(folder, folder / "tensorboard")


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of an interrupted run.")],
    quiet: Quiet = False,
    json_: AsJson = False,
    count: RankCount = None,
    restarts: Restarts = 0,
) -> None:
    """Resume an interrupted run; the numbers are those of an uninterrupted one."""
    from quiverfl.run_folder import RunFolder

    existing = RunFolder(folder)
    if own_rank() > 0:  # the folder is rank 0's, and may be on its machine alone
        finish(None, folder, quiet, json_, continues=True)
        return
    settings = existing.config()
    if existing.finished() and not (quiet or json_):
        Console(stderr=True).print(f"{folder} is finished already: nothing to resume.")
    ranks.check_count(count, settings.data.clients)
    if count is not None and count > 1:
        ranks.start(count, ["resume", str(folder), *_flags(quiet, json_)], restarts)
    finish(settings, folder, quiet, json_, continues=True)


def compare(
    config: Annotated[Path, typer.Argument(help="A TOML configuration.")],
    methods: Annotated[str, typer.Option(help="Comma-separated names, or `all`.")] = "all",
    seeds: Annotated[str | None, typer.Option(help="Comma-separated seeds.")] = None,
    set_: Settings = None,
    out: Out = None,
    quiet: Quiet = False,
    json_: AsJson = False,
) -> None:
    """Run several methods on the same data, model and seeds; a table and an HTML report."""
    from quiverfl.comparison import cells_of, check_cells
    from quiverfl.results.html_report import write_report
    from quiverfl.results.terminal import print_comparison

    settings = load_config(config, set_ or ())
    names = list(METHODS) if methods == "all" else _names(methods)
    numbers = [settings.run.seed] if seeds is None else _numbers(seeds)
    folder = out or Path("runs") / f"{config.stem}-comparison"
    cells = cells_of(settings, names, numbers)
    check_cells(cells, folder)
    again = "run the same `quiver compare` command again: it continues from the last checkpoints."
    # One comparison at a time: the table and the report are made of all its runs.
    with alone(folder), _told_how_to_continue(lambda: again) as stop:
        summaries, diverged = _run_all(cells, folder, len(numbers) > 1, quiet or json_, stop)
        page = folder / "report.html"
        groups = write_report([folder / label for label, _ in cells], page)
    if json_:
        print(json.dumps(summaries))
    else:
        print_comparison(Console(), groups)
        Console().print(f"report: [bold]{page}[/bold]", soft_wrap=True)
    if diverged:
        raise diverged[0]


def _run_all(
    cells: list[tuple[str, Config]], folder: Path, several: bool, quiet: bool, stop: Stop
) -> tuple[dict[str, Any], list[Diverged]]:
    from quiverfl.comparison import shown_title

    summaries: dict[str, Any] = {}
    diverged: list[Diverged] = []
    for label, cell in cells:
        try:
            shown = shown_title(cell, several)
            summaries[label] = _run(cell, folder / label, shown, quiet, stop)
        except Diverged as error:  # the others are still worth having
            error.run = None  # it and the traceback would keep every state alive
            diverged.append(error.with_traceback(None))
    return summaries, diverged


def methods(json_: AsJson = False) -> None:
    """The methods, their options and the topology they are usually run on."""
    from quiverfl.methods.options import options_of

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "title": method.title,
            "topology": method.topology,
            "options": options_of(method),
            "summary": (_module_doc(method).splitlines() or [""])[0],
        }
        for name, method in ((name, make()) for name, make in METHODS.items())
    ]
    if json_:
        print(json.dumps(rows))
        return
    table = Table("name", "what it does", "usual topology", "options", box=None, pad_edge=False)
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        table.add_row(row["name"], row["summary"], row["topology"], options)
    Console().print(table)


def _flags(quiet: bool, json_: bool) -> list[str]:
    return ["--quiet"] * quiet + ["--json"] * json_


def finish(
    settings: Config | None, folder: Path, quiet: bool, json_: bool, continues: bool = False
) -> None:
    """Without settings they are rank 0's."""
    from quiverfl.run_folder import RunFolder

    def again() -> str:
        if not RunFolder(folder).holds_run():
            return "nothing was written yet: run the same command again."
        return f"`quiver resume {folder}` continues from the last checkpoint."

    with _told_how_to_continue(again) as stop:
        summary = _run_anywhere(settings, folder, quiet or json_, stop, continues)
    if own_rank() > 0:
        return
    if json_:
        print(json.dumps(summary))
        return
    console = Console()
    for stage, reports in summary["stages"].items():
        last = reports["last"]
        console.print(
            f"last round, stage {stage}: {summary['metric']} {last['mean']:.4f} ± "
            f"{last['std']:.4f}, worst 10 % of clients {last['worst10']:.4f}"
        )
    console.print(f"run folder: [bold]{folder}[/bold]", soft_wrap=True)


def _run_anywhere(
    settings: Config | None, folder: Path, quiet: bool, stop: Stop, continues: bool
) -> dict[str, Any]:
    """In this process, or on the ranks that it is one of."""
    if world_size() > 1:
        return ranks.run_here(settings, folder, quiet, stop, continues)
    assert settings is not None
    return _run(settings, folder, method_title(settings.method.name), quiet, stop)


def _run(settings: Config, folder: Path, label: str, quiet: bool, stop: Stop) -> dict[str, Any]:
    from quiverfl.experiment import run_in_folder

    with progress(label, settings.run.rounds, quiet) as watcher:
        return run_in_folder(settings, folder, watcher, stop=stop)


@contextlib.contextmanager
def _told_how_to_continue(again: Callable[[], str]) -> Iterator[Stop]:
    """Ctrl-C ends a run at once, SIGTERM after the round it is in: both say how to continue it.

    A second SIGTERM ends the process at once; that loses no more than the rounds since the last
    checkpoint.
    """
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        asked.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked.is_set
    except KeyboardInterrupt:
        _say(f"interrupted; {again()}")
        raise
    except Stopped as stopped:
        _say(f"stopped by SIGTERM after round {stopped.rounds}; {again()}")
        raise typer.Exit(TERMINATED) from stopped
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(words: str) -> None:
    if not speaks():
        return
    Console(stderr=True, highlight=False).print(escape(words), soft_wrap=True)


def _refuse_unfinished(folder: Path) -> None:
    from quiverfl.run_folder import RunFolder

    existing = RunFolder(folder)
    if existing.started() and not existing.finished():
        with existing.alone():  # or it is not interrupted: whoever is at work is named
            existing.refuse_unfinished()


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        find_method(name)
    if not names:
        raise QuiverError("--methods: name at least one method, or `all`.")
    return list(dict.fromkeys(names))


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise QuiverError(f"--seeds {text!r}: write whole numbers, such as 0,1,2.") from None


def _module_doc(method: Method) -> str:
    return sys.modules[type(method).__module__].__doc__ or ""
