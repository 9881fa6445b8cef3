"""`quiver ls`, `quiver show` and `quiver watch`: what is in a folder of runs."""

from __future__ import annotations

import json
import math
import webbrowser
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiverfl.cli.run import AsJson
from quiverfl.cli.server import make_server
from quiverfl.errors import QuiverError
from quiverfl.results import formatting as numbers
from quiverfl.results.report.overview import RunFinder, RunState, count_states
from quiverfl.results.summary import STAGES, UNSEEN_STAGES

COLORS = {"running": "cyan", "finished": "green", "interrupted": "yellow"}
Folder = Annotated[Path, typer.Argument(help="A folder with runs in it, at any depth.")]


def ls(
    folder: Folder = Path("runs"),
    json_: AsJson = False,
) -> None:
    """What runs there are below a folder: state, rounds, last scores, time."""
    runs = RunFinder(folder).read()
    if json_:
        print(json.dumps([one.as_dict() for one in runs]))
        return
    if not runs:
        raise QuiverError(f"{folder} holds no run: `quiver run` and `quiver compare` write some.")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for title in ("rounds", *STAGES, "took", "left"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in runs:
        table.add_row(*_make_row(one))
    console = Console(emoji=False, highlight=False)
    console.print(table)
    for one in runs:
        if one.error:
            console.print(f"{one.name}: {one.error}", markup=False, soft_wrap=True)
    counts = ", ".join(f"{count} {state}" for state, count in count_states(runs).items())
    console.print(f"{counts}. `quiver show RUN` has the details of one.", soft_wrap=True)


def _make_row(one: RunState) -> list[str | Text]:
    done, planned = (0, None) if one.run is None else (one.run.done_rounds, one.run.planned_rounds)
    scores = [one.score(stage) for stage in STAGES]
    left = one.seconds_left
    return [
        Text(one.name),
        Text(one.state, style=COLORS.get(one.state, "red")),
        f"{done} of {planned}" if planned is not None else str(done),
        *("" if s is None else numbers.format_score(s, one.metric) for s in scores),
        numbers.format_duration(one.seconds) if one.seconds else "",
        "" if left is None else numbers.format_duration(left),
    ]


def show(
    folder: Annotated[Path, typer.Argument(help="The folder of a run.")],
    json_: AsJson = False,
) -> None:
    """One run: what it is, how far it came, its scores and costs, and what can be done next."""
    from quiverfl.results.run_files import is_run

    if not folder.exists():
        raise QuiverError(f"{folder}: no such folder. `quiver ls` lists the runs below runs/.")
    if not is_run(folder):
        raise QuiverError(f"{folder} is not a run folder: `quiver ls {folder}` lists those below.")
    found = RunFinder(folder).read()
    if len(found) != 1:
        raise QuiverError(f"{folder}/config.json describes no run: put it back, or run it again.")
    one = found[0]
    if one.run is None:
        raise QuiverError(one.error)
    if json_:
        print(json.dumps({**one.as_dict(), "config": one.run.config}))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in _describe(one).items():
        table.add_row(Text(name, style="dim"), Text(text, overflow="fold"))
    Console(emoji=False, highlight=False).print(table)


def _describe(one: RunState) -> dict[str, str]:
    """Facts about a run by name; what it does not say is left out."""
    from quiverfl.results.report.page import describe_data
    from quiverfl.results.scores import COSTS
    from quiverfl.results.summary import sum_costs

    run = one.run
    assert run is not None
    planned = "?" if run.planned_rounds is None else run.planned_rounds
    early = run.finished and run.done_rounds < (run.planned_rounds or 0)
    given = run.topology_options.items()
    options = [f"{key} {value}" for key, value in given if key != "name" and value is not None]
    facts = {
        "state": one.state + (f": {one.error}" if one.error else ""),
        "method": run.title,
        "data": f"{describe_data(run)}, {run.clients} clients",
        "model": str(run.config.get("model", {}).get("name", "unknown")),
        "topology": ", ".join([run.topology, *options]),
        "seed": str(run.seed),
        "rounds": f"{run.done_rounds} of {planned}{', ended by run.patience' if early else ''}",
    }
    for stage in (*STAGES, *UNSEEN_STAGES):
        score = one.score(stage)
        if score is not None:
            percent = " %" if numbers.is_percentage(one.metric) else ""
            text = f"{numbers.format_score(score, one.metric)}{percent}"
            facts[f"{one.metric}, {stage}"] = text
    costs = sum_costs(run.rounds)
    formats = dict(zip(COSTS, (numbers.format_bytes,) * 2 + (numbers.format_count,), strict=False))
    names = {"bytes": "bytes", "busiest_bytes": "busiest node, a round", "steps": "local steps"}
    facts |= {names[key]: write(costs[key]) for key, write in formats.items()}
    facts["took"] = numbers.format_duration(one.seconds)
    left = one.seconds_left
    if left is not None:
        facts["time left"] = numbers.format_duration(left)
    for name in ("started", "command"):
        if run.environment.get(name):
            facts[name] = str(run.environment[name])
    facts["next"] = {
        "finished": f"quiver report {run.path}, quiver export {run.path}",
        "running": f"quiver watch {run.path}",
        "diverged": "a smaller training.lr, in a new folder",
    }.get(one.state, f"quiver resume {run.path}")
    return facts


def watch(
    folder: Folder = Path("runs"),
    port: Annotated[int, typer.Option(help="On 127.0.0.1; 0 takes any.")] = 8620,
    every: Annotated[float, typer.Option(help="Seconds between two looks at the files.")] = 2.0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page with live curves, rounds, time left and failures of every run below a folder."""
    if not 0 < every < math.inf:
        raise QuiverError(f"--every {every:g}: it must be more than 0 seconds, and finite.")
    server = make_watch_server(RunFinder(folder), port, every)
    address = f"http://127.0.0.1:{server.server_address[1]}/"
    print(f"{address} (Ctrl-C ends it)", flush=True)
    if open_:
        webbrowser.open(address)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


def make_watch_server(finder: RunFinder, port: int, every: float) -> ThreadingHTTPServer:
    """Serve the page on loopback, and a word that changes with the files; it changes nothing."""
    from quiverfl.results.report.watch import make_watch_page

    return make_server(
        {
            "/": lambda: ("text/html; charset=utf-8", make_watch_page(finder, every), {}),
            "/version": lambda: ("text/plain", finder.version(), {}),
        },
        port,
    )
