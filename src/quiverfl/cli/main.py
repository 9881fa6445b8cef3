"""The command `quiver`: one module per group of commands, errors as one line."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import quiverfl
from quiverfl.cli import data, peer, report, reproduce, run, sweep, theory, topology, tune
from quiverfl.errors import Diverged, QuiverError
from quiverfl.memory import keep_freed_memory

app = typer.Typer(
    help="Decentralized personalized federated learning over directed graphs.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def about(
    version: Annotated[bool, typer.Option("--version", help="Say the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"quiver {quiverfl.__version__}")
        raise typer.Exit


app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("compare")(run.compare)
app.command("report")(report.report)
app.command("sweep")(sweep.sweep)
app.command("tune")(tune.tune)
app.command("reproduce")(reproduce.reproduce)
app.command("theory")(theory.theory)
app.command("methods")(run.methods)
app.command("topologies")(topology.topologies)
app.add_typer(topology.app, name="topology")
app.add_typer(data.app, name="data")
app.add_typer(peer.app, name="peer")
app.add_typer(data.partition_app, name="partition")


def main() -> None:
    """Exit codes: 0 done, 2 something to mend, 3 training diverged, 130 interrupted (typer's)."""
    errors = Console(stderr=True, highlight=False)
    keep_freed_memory()
    try:
        app()
    except Diverged as error:
        errors.print(f"[red]diverged:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(3)
    except QuiverError as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
