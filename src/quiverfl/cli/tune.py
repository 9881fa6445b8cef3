"""`quiver tune`: the best of the same number of tries for every method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from quiverfl.cli.sweep import (
    Cases,
    Estimated,
    Jobs,
    Methods,
    Out,
    Quiet,
    Seeds,
    Settings,
    Stage,
    carry_out,
    choice,
)
from quiverfl.sweeps.places import Places
from quiverfl.sweeps.plan import load_sweep

if TYPE_CHECKING:
    from quiverfl.sweeps.tuning import Tuned


def tune(
    file: Annotated[Path, typer.Argument(help="A sweep whose data sets a validation part aside.")],
    jobs: Jobs = 2,
    out: Out = Path("runs"),
    methods: Methods = None,
    seeds: Seeds = None,
    cases: Cases = None,
    set_: Settings = None,
    stage: Annotated[Stage, typer.Option(help="The stage that is judged.")] = Stage.local,
    estimated: Estimated = True,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="All tries as JSON.")] = False,
) -> None:
    """Run every try, and print the best of each method as overrides for a configuration.

    Tries are judged by the last evaluated round, on samples set aside from the training data;
    over several cases by their mean.
    """
    from quiverfl.sweeps.tuning import as_overrides, tuned

    plan, places = load_sweep(file, choice(methods, seeds, cases, set_)), Places(out)
    tuned(plan.cells, places, stage.value, "last")  # refuses test data before anything runs
    carry_out(plan.cells, places, jobs, False, estimated, False, quiet or as_json)
    found = tuned(plan.cells, places, stage.value, "last")
    if as_json:
        typer.echo(json.dumps([_row(one) for one in found]))
        return
    console = Console(highlight=False)
    console.print(_table(found, stage.value))
    counts = {len(one.tries) for one in found}
    if len(counts) > 1:
        console.print("The methods had different numbers of tries.", style="bold")
    typer.echo(as_overrides(found))


def _table(found: Sequence[Tuned], stage: str) -> Table:
    cases = list(found[0].best.scores)
    table = Table("method", "tries", "diverged", "best", box=None, pad_edge=False)
    for case in cases:
        table.add_column(f"{case}\n{stage}".strip(), justify="right")
    table.add_column("next best", justify="right")
    for one in found:
        edge = one.at_the_edge()
        shown = ", ".join(
            f"{key.rsplit('.', 1)[-1]} {value}{' (edge)' if key in edge else ''}"
            for key, value in one.best.point
        )
        scores = [f"{one.best.scores[case]:.4f}" for case in cases]
        second = f"{one.tries[1].mean - one.best.mean:+.4f}" if len(one.tries) > 1 else ""
        failed = sum(a_try.mean != a_try.mean for a_try in one.tries)
        table.add_row(one.method, str(len(one.tries)), str(failed), shown, *scores, second)
    return table


def _row(one: Tuned) -> dict[str, object]:
    tries = [{"point": dict(t.point), "scores": t.scores, "mean": t.mean} for t in one.tries]
    return {"method": one.method, "tries": tries}
