"""`quiver tune`: the best of the same number of tries for every method."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quiverfl.cli import where
from quiverfl.cli.sweep import (
    Cases,
    Estimated,
    Methods,
    Out,
    Quiet,
    Seeds,
    Settings,
    Stage,
    carry_out,
    choice,
    leave,
)
from quiverfl.cli.tune_race import run_race
from quiverfl.methods import method_title
from quiverfl.results.numbers import NOTHING
from quiverfl.results.output_files import replace_file
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import load_sweep

if TYPE_CHECKING:
    from quiverfl.sweeps.tuning import Tuned


def tune(
    file: Annotated[Path, typer.Argument(help="A sweep whose data sets a validation part aside.")],
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
    stage: Annotated[Stage, typer.Option(help="The stage that is judged.")] = Stage.local,
    estimated: Estimated = True,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="All tries as JSON.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the overrides here: `reproduce --rates` reads them.")
    ] = None,
) -> None:
    """Run every try, and print the best of each method as overrides for a configuration.

    Tries are judged by the last evaluated round, on samples set aside from the training data;
    over several cases by their mean. A sweep with a section [tuning] drops the worse tries early,
    repeats close ones with further seeds, and says which choices stay within the noise.
    """
    from quiverfl.sweeps.racing import fitted
    from quiverfl.sweeps.tuning import as_overrides, tuned

    plan, places = fitted(load_sweep(file, choice(methods, seeds, cases, set_))), Places(out)
    tuned(plan.cells, places, stage.value, "last")  # refuses test data before anything runs
    place = where.chosen(
        on, plan.cells, jobs, address, cpus, gpus, memory, bring_back, submit, sbatch
    )
    if plan.tuning is not None:
        run_race(plan, places, stage.value, place, estimated, quiet, as_json, write)
        return
    carry_out(plan.cells, places, place, False, estimated, False, quiet or as_json)
    found = tuned(plan.cells, places, stage.value, "last")
    if as_json:
        print(json.dumps([_row(one) for one in found]))
    else:
        console = Console(highlight=False)
        console.print(_table(found, stage.value))
        if len({len(one.tries) for one in found}) > 1:
            console.print("The methods had different numbers of tries.", style="bold")
        print(as_overrides(found))
    if write is not None:
        replace_file(write, as_overrides(found).encode())
    # That a try diverges is an answer; that one could not be run is not.
    leave([cell for cell in plan.cells if places.state(cell) != "diverged"], places)


def _table(found: Sequence[Tuned], stage: str) -> Table:
    cases = list(found[0].tries[0].scores)
    table = Table(box=None, pad_edge=False)
    for title in ("method", "tries", "diverged", "not run"):
        table.add_column(title, no_wrap=True)
    table.add_column("best")  # this and the names of cases are folded where a terminal is narrow
    for case in cases:
        table.add_column(f"{case}\n{stage}".strip(), justify="right")
    table.add_column("next best", justify="right")
    for one in found:
        diverged = sum(a_try.diverged for a_try in one.tries)
        missing = sum(math.isnan(a_try.mean) and not a_try.diverged for a_try in one.tries)
        counts = [str(count) for count in (len(one.tries), diverged, missing)]
        table.add_row(escape(method_title(one.method)), *counts, *_best(one, cases))
    return table


def _best(one: Tuned, cases: Sequence[str]) -> list[str]:
    """The best point, its scores, and how far behind the next is."""
    if one.best is None:
        return ["none has a score", *(NOTHING for _ in cases), NOTHING]
    edge = one.at_the_edge()
    shown = ", ".join(
        f"{key.rsplit('.', 1)[-1]} {value}{' (edge)' if key in edge else ''}"
        for key, value in one.best.point
    )
    second = one.tries[1].mean - one.best.mean if len(one.tries) > 1 else math.nan
    scores = [f"{one.best.scores[case]:.4f}" for case in cases]
    return [shown, *scores, NOTHING if math.isnan(second) else f"{second:+.4f}"]


def _row(one: Tuned) -> dict[str, object]:
    tries = [
        {
            "point": dict(one_try.point),
            "scores": {case: _number(score) for case, score in one_try.scores.items()},
            "mean": _number(one_try.mean),
            "diverged": one_try.diverged,
        }
        for one_try in one.tries
    ]
    return {"method": one.method, "tries": tries}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
