"""`quiver run`, `resume`, `compare`, `methods`."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quiverfl.cli.options import Quiet, ResultOptions, expand_options, parse_seeds
from quiverfl.distributed.processes import is_first_on_machine, own_rank, world_size
from quiverfl.errors import CannotWrite, Diverged, QuiverError, QuiverWarning, Stopped
from quiverfl.methods import METHODS, Method, method_title
from quiverfl.results.formatting import format_bytes, make_file_name
from quiverfl.runs.config import Config, parse_config
from quiverfl.runs.config_files import load_config
from quiverfl.runs.progress import progress
from quiverfl.support.environment import require_package
from quiverfl.support.locks import lock_folder

# What `quiver run` and `quiver resume` do where there are several ranks.


def start_ranks(ranks: int, arguments: Sequence[str], restarts: int) -> None:
    """Run a command as this many processes of this machine; ends as they do."""
    from quiverfl.distributed.processes import launch_ranks

    if world_size() > 1:
        raise QuiverError(
            f"--ranks {ranks}: this process is one of {world_size()} ranks already: leave it out."
        )
    if restarts < 0:
        raise QuiverError(f"--max-restarts {restarts}: it must be 0 or more.")
    raise typer.Exit(launch_ranks(ranks, arguments, restarts))


def check_rank_count(ranks: int | None, clients: int | None = None, restarts: int = 0) -> None:
    if restarts and (ranks is None or ranks == 1):
        raise QuiverError(
            f"--max-restarts {restarts}: only ranks are restarted: add --ranks 2 or more, or leave "
            "it out. `quiver resume` goes on with a run that was killed."
        )
    if ranks is None:
        return
    if ranks < 1:
        raise QuiverError(f"--ranks {ranks}: it must be at least 1.")
    if clients is not None and ranks > clients:
        raise QuiverError(
            f"--ranks {ranks}: there are {clients} clients, and a rank holds at least one. Start "
            f"at most {clients} ranks."
        )


def run_on_rank(
    settings: Config | None, folder: Path, quiet: bool, stop: Callable[[], bool], continues: bool
) -> dict[str, Any]:
    """This rank's part of a run; the summary. A rank without settings takes those of rank 0."""
    from quiverfl.distributed.ranks import Ranks
    from quiverfl.distributed.run import run_on_ranks

    device = "cpu" if settings is None else settings.run.device
    with Ranks.join(device) as ranks:
        settings_tree = ranks.from_first(settings and settings.model_dump(mode="json"))
        config = parse_config(settings_tree) if settings is None else settings
        with contextlib.ExitStack() as shown:
            watcher = None
            if own_rank() == 0:
                title = method_title(config.method.name)
                watcher = shown.enter_context(progress(title, config.run.rounds, quiet))
            return run_on_ranks(ranks, config, folder, watcher, stop, continues)


def print_memory_needed(settings: Config, ranks: int) -> None:
    """`--dry-run`: what the configuration would need on this many ranks."""
    from quiverfl.distributed.memory import available_memory, predict_rank_memory

    needs = predict_rank_memory(settings)
    check_rank_count(ranks, needs.clients)
    where = f"each of {ranks} ranks" if ranks > 1 else "one process"
    print(
        f"{needs.clients} clients with {format_bytes(needs.state)} of state each, "
        f"{format_bytes(needs.examples.sum())} of examples, "
        f"{settings.run.rounds} round{'s' * (settings.run.rounds != 1)}"
    )
    print(
        f"{where}: about {format_bytes(needs.memory(ranks))} of memory, "
        f"{format_bytes(needs.training)} for each of {needs.chunk} clients in training at a time"
    )
    if ranks > 1:
        print(
            f"between ranks: each sends {format_bytes(needs.traffic(ranks))} in a round, and "
            f"{format_bytes(needs.measuring(ranks))} more in an evaluated one"
        )
    available = available_memory()
    if available is not None:
        fewest = needs.ranks_for(available)
        fit = f"at least {fewest} ranks are needed, each on a machine like this one"
        if fewest in (None, 1):
            fit = "one process fits" if fewest else "even one client to a rank does not fit"
        print(f"this machine has {format_bytes(available)} to give: {fit}")


Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set section.key=value; wins over the file.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Folder to write to.")]
RankCount = Annotated[
    int | None,
    typer.Option("--ranks", help="Divide the clients among this many processes of this machine."),
]
Restarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", help="With --ranks: how often to restart ranks that were killed."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
Stop = Callable[[], bool]
TERMINATED = 128 + signal.SIGTERM


def run(
    config: Annotated[Path, typer.Argument(help="A TOML configuration.")],
    set_: Settings = None,
    out: Out = None,
    tensorboard: Annotated[
        bool,
        typer.Option("--tensorboard", help="Write event files into the run folder as it goes."),
    ] = False,
    quiet: Quiet = False,
    json_: AsJson = False,
    count: RankCount = None,
    restarts: Restarts = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what the run needs, on --ranks ranks.")
    ] = False,
) -> None:
    """Run one experiment into a folder of its own."""
    if tensorboard:
        require_package("tensorboard", "--tensorboard")
    chosen = [*(set_ or ()), *(["track.tensorboard=true"] if tensorboard else [])]
    settings = load_config(config, chosen)
    _warn_of_overrides(settings)
    check_rank_count(count, settings.data.clients, restarts)
    if dry_run:
        print_memory_needed(settings, count or 1)
        return
    name = f"{config.stem}-{make_file_name(settings.method.name)}-{settings.identity()[:8]}"
    folder = out or Path("runs") / name
    if count is not None and count > 1:
        _refuse_unfinished(folder)
        options = [f"--set={text}" for text in chosen] + _output_flags(quiet, json_)
        start_ranks(count, ["run", str(config), "--out", str(folder), *options], restarts)
    if world_size() == 1:
        _refuse_unfinished(folder)
    run_and_print(settings, folder, quiet, json_)


def _warn_of_overrides(settings: Config) -> None:
    """What a file says of one method where several are compared is not what one run does."""
    name = settings.method.name
    sections = settings.overrides.get(name, {})
    keys = [f"{section}.{key}" for section, values in sections.items() for key in values]
    if keys:
        text = (
            f"[overrides.{name}] ({', '.join(keys)}) holds where methods are compared and changes "
            "nothing here: use `quiver compare`, or write the keys into their sections."
        )
        warnings.warn(text, QuiverWarning, stacklevel=2)


def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of an interrupted run.")],
    quiet: Quiet = False,
    json_: AsJson = False,
    count: RankCount = None,
    restarts: Restarts = 0,
) -> None:
    """Resume an interrupted run; the numbers are those of an uninterrupted one."""
    from quiverfl.runs.folder import RunFolder

    existing = RunFolder(folder)
    if own_rank() > 0:  # the folder is rank 0's, and may be on its machine alone
        run_and_print(None, folder, quiet, json_, continues=True)
        return
    settings = existing.config()
    if existing.is_finished() and not (quiet or json_):
        Console(emoji=False, stderr=True).print(f"{folder} is finished already: nothing to resume.")
    check_rank_count(count, settings.data.clients, restarts)
    if count is not None and count > 1 and not existing.is_finished():
        start_ranks(count, ["resume", str(folder), *_output_flags(quiet, json_)], restarts)
    run_and_print(settings, folder, quiet, json_, continues=True)


@expand_options
def compare(
    config: Annotated[Path, typer.Argument(help="A TOML configuration.")],
    methods: Annotated[str, typer.Option(help="Comma-separated names, or `all`.")] = "all",
    seeds: Annotated[
        str | None, typer.Option(help="0,1,2, or 0-4, or 5 for the first five.")
    ] = None,
    set_: Settings = None,
    out: Out = None,
    quiet: Quiet = False,
    json_: AsJson = False,
    *,
    files: ResultOptions,
) -> None:
    """Run several methods on the same data, model and seeds; a table and an HTML report."""
    from quiverfl.results.report.page import write_report
    from quiverfl.results.tables import print_comparison, write_results
    from quiverfl.runs.compare import cell_title, check_methods, plan_comparison, run_comparison

    settings = load_config(config, set_ or ())
    names = "all" if methods == "all" else _split_methods(methods)
    numbers = [settings.run.seed] if seeds is None else parse_seeds(seeds)
    folder = out or Path("runs") / f"{config.stem}-comparison"
    written = files.files()
    cells = plan_comparison(settings, check_methods(names), numbers, folder)
    hint = "run the same `quiver compare` command again: it continues from the last checkpoints."

    def run(label: str, cell: Config) -> dict[str, Any]:
        title = cell_title(cell, len(numbers) > 1)
        try:
            return _run(cell, folder / label, title, quiet or json_, stop)
        except Diverged as error:
            error.run = None  # it would keep every state alive
            raise

    # One comparison at a time: the table and the report are made of all its runs.
    with lock_folder(folder), _explain_how_to_continue(lambda: hint) as stop:
        try:
            summaries, diverged = run_comparison(cells, run)
        except CannotWrite as problem:
            raise CannotWrite.of(problem.place, problem.reason, hint.rstrip(".")) from problem
        page = folder / "report.html"
        groups = write_report([folder / label for label, _ in cells], page)
        write_results(groups, written)
    if json_:
        print(json.dumps(summaries))
    else:
        print_comparison(Console(emoji=False), groups)
        Console(emoji=False).print(f"report: [bold]{page}[/bold]", soft_wrap=True)
    for error in diverged.values():
        raise error


def methods(json_: AsJson = False) -> None:
    """The methods, their options and the topology they are usually run on."""
    from quiverfl.options import read_options

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "title": method.title,
            "topology": method.topology,
            "options": read_options(method),
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
    Console(emoji=False).print(table)


def _output_flags(quiet: bool, json_: bool) -> list[str]:
    return ["--quiet"] * quiet + ["--json"] * json_


def run_and_print(
    settings: Config | None, folder: Path, quiet: bool, json_: bool, continues: bool = False
) -> None:
    """Without settings they are rank 0's."""
    from quiverfl.runs.folder import RunFolder

    def how_to_continue() -> str:
        if not RunFolder(folder).holds_run():
            return "nothing was written yet: run the same command again."
        return f"`quiver resume {folder}` continues from the last checkpoint."

    with _explain_how_to_continue(how_to_continue) as stop:
        summary = _run_on_rank_or_here(settings, folder, quiet or json_, stop, continues)
    if own_rank() > 0:
        return
    if json_:
        print(json.dumps(summary))
        return
    untested, clients = _count_untested(folder)
    console = Console(emoji=False)
    unseen = summary.get("unseen", {}).get("stages", {})
    for stage, reports in {**summary["stages"], **unseen}.items():
        last = reports["last"]
        console.print(
            f"last round, stage {stage}: {summary['metric']} {last['mean']:.4f} ± "
            f"{last['std']:.4f}, worst 10 % of clients {last['worst10']:.4f}"
        )
    if untested:
        console.print(f"{untested} of {clients} clients have no test data and are in no mean.")
    console.print(f"run folder: [bold]{folder}[/bold]", soft_wrap=True)


def _count_untested(folder: Path) -> tuple[int, int]:
    """How many clients have no test data, and how many there are."""
    import numpy as np

    from quiverfl.results.run_files import read_partition

    offsets = read_partition(folder / "partition.npz").get("test_offsets", np.zeros(1, np.int64))
    sizes = np.diff(offsets)
    return int((sizes == 0).sum()), len(sizes)


def _run_on_rank_or_here(
    settings: Config | None, folder: Path, quiet: bool, stop: Stop, continues: bool
) -> dict[str, Any]:
    """In this process, or on the ranks that it is one of."""
    if world_size() > 1:
        return run_on_rank(settings, folder, quiet, stop, continues)
    assert settings is not None
    return _run(settings, folder, method_title(settings.method.name), quiet, stop)


def _run(settings: Config, folder: Path, label: str, quiet: bool, stop: Stop) -> dict[str, Any]:
    from quiverfl.runs.experiment import run_in_folder

    with progress(label, settings.run.rounds, quiet) as watcher:
        return run_in_folder(settings, folder, watcher, stop=stop)


@contextlib.contextmanager
def _explain_how_to_continue(how_to_continue: Callable[[], str]) -> Iterator[Stop]:
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
        _print_error(f"interrupted; {how_to_continue()}")
        raise
    except Stopped as stopped:
        _print_error(f"stopped by SIGTERM after round {stopped.rounds}; {how_to_continue()}")
        raise typer.Exit(TERMINATED) from stopped
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_error(words: str) -> None:
    if not is_first_on_machine():
        return
    Console(emoji=False, stderr=True, highlight=False).print(escape(words), soft_wrap=True)


def _refuse_unfinished(folder: Path) -> None:
    from quiverfl.runs.folder import RunFolder

    existing = RunFolder(folder)
    if existing.has_results() and not existing.is_finished():
        with existing.lock():  # or it is not interrupted: whoever is at work is named
            existing.refuse_unfinished()


def _split_methods(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise QuiverError("--methods: name at least one method, or `all`.")
    return list(dict.fromkeys(names))


def _module_doc(method: Method) -> str:
    return sys.modules[type(method).__module__].__doc__ or ""
