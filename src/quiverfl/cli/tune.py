"""`quiver tune`: run the same number of tries for every method and print the best."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quiverfl.cli.options import Stage, SweepOptions, expand_options
from quiverfl.cli.sweep import exit_unless_finished, run_with_progress
from quiverfl.methods import method_title
from quiverfl.results.formatting import DASH, write_result_file
from quiverfl.support.output_folders import refuse_other_file
from quiverfl.sweeps.executor import SweepExecutor
from quiverfl.sweeps.plan import Cell, GridPoint, Sweep, SweepFolder, load_sweep
from quiverfl.sweeps.tune import (
    Bracket,
    RankedTry,
    Rules,
    Try,
    TunedMethod,
    count_rounds,
    fit_decay,
    format_overrides,
    make_brackets,
    rank_tries,
    run_brackets,
    select_tuned,
)

RankedBracket = tuple[Bracket, list[RankedTry]]


@expand_options
def tune(
    file: Annotated[Path, typer.Argument(help="A sweep whose data has a validation part.")],
    options: SweepOptions,
    stage: Annotated[Stage, typer.Option(help="The stage that is judged.")] = Stage.local,
    as_json: Annotated[bool, typer.Option("--json", help="Print all tries as JSON.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Write the overrides here: `reproduce --rates` reads them.")
    ] = None,
) -> None:
    """Run every try, and print the best of each method as overrides for a configuration.

    Tries are judged by the last evaluated round, on samples set aside from the training data;
    over several cases by their mean. A sweep with a section [tuning] drops the worse tries early,
    repeats close ones with further seeds, and says which choices stay within the noise.
    """
    plan, folder = fit_decay(load_sweep(file, options.choice())), SweepFolder(options.out)
    folder.check()
    if write is not None:
        for path in (write, same_rates_file(write)):
            refuse_other_file(path, "--write", b"[overrides.")
    select_tuned(plan.cells, folder, stage.value, "last")  # refuses test data before anything runs
    executor = options.make_executor(plan.cells)
    if plan.tuning is not None:
        run_race(plan, folder, stage.value, executor, options, as_json, write)
        return
    run_with_progress(plan.cells, folder, executor, options.estimate, options.quiet or as_json)
    tuned = select_tuned(plan.cells, folder, stage.value, "last")
    if as_json:
        print(json.dumps([_tuned_to_json(method) for method in tuned]))
    else:
        console = Console(emoji=False, highlight=False)
        console.print(_grid_table(tuned, stage.value))
        if len({len(method.tries) for method in tuned}) > 1:
            console.print("The methods had different numbers of tries.", style="bold")
        print(format_overrides(tuned))
    if write is not None:
        write_result_file(write, format_overrides(tuned).encode())
    # A try that diverges is a result; a try that could not run is a failure.
    exit_unless_finished([c for c in plan.cells if folder.state(c) != "diverged"], folder)


def run_race(
    plan: Sweep,
    folder: SweepFolder,
    stage: str,
    executor: SweepExecutor,
    options: SweepOptions,
    as_json: bool,
    write: Path | None,
) -> None:
    """Race the tries of a sweep with a section [tuning], print the result, and write it."""
    rules = Rules.read(plan.tuning or {})
    brackets = make_brackets(plan.cells, folder, stage)

    def run(until: Mapping[str, int], cells: Sequence[Cell]) -> None:
        quiet = options.quiet or as_json
        run_with_progress(cells, folder, executor, options.estimate, quiet, until=until)

    run_brackets(brackets, rules, run)
    ranked = [(bracket, rank_tries(bracket, rules)) for bracket in brackets]
    runs, rounds = count_rounds(plan.cells, folder)
    all_rounds = sum(cell.config.run.rounds for cell in plan.cells)
    single, paired = choose_overrides(ranked, pairs=False), choose_overrides(ranked, pairs=True)
    if as_json:
        budget = {"runs": runs, "rounds": rounds, "rounds_of_the_whole_grid": all_rounds}
        print(json.dumps({"contests": [_ranked_to_json(*one) for one in ranked], "budget": budget}))
    else:
        console = Console(emoji=False, highlight=False)
        console.print(_race_table(ranked, stage))
        for line in describe_choices(ranked):
            console.print(line, markup=False, soft_wrap=True)
        tries = sum(len(bracket.tries) for bracket in brackets if len(bracket.methods) == 1)
        console.print(
            f"{tries} tries in {runs} runs: {rounds:,} rounds; all of them to the end with every "
            f"seed would be {all_rounds:,}."
        )
        if rules.rounds is not None:
            console.print(
                f"lr_decay is for runs of {rules.rounds} rounds; a shorter race ends with the same "
                "learning rate."
            )
        print(single)
        if paired:
            print(f"# The same rates for methods that differ in the graph alone:\n{paired}")
    if write is not None:
        write_result_file(write, single.encode())
        if paired:
            write_result_file(same_rates_file(write), paired.encode())
    started = [cell for cell in plan.cells if folder.failure(cell).exists()]
    exit_unless_finished([c for c in started if folder.state(c) != "diverged"], folder)


def same_rates_file(write: Path) -> Path:
    """Return the file of the choices for methods that differ in the graph alone."""
    return write.with_name(f"{write.stem}-same-rates{write.suffix}")


def choose_overrides(ranked: Sequence[RankedBracket], pairs: bool) -> str:
    """Format the choices as sections of a configuration, of single methods or of pairs."""
    chosen = [
        TunedMethod(method, (Try(tries[0].point, {"": tries[0].score}),))
        for bracket, tries in ranked
        if (len(bracket.methods) > 1) is pairs
        for method in bracket.methods
    ]
    return format_overrides(chosen)


def describe_choices(ranked: Sequence[RankedBracket]) -> list[str]:
    """Say of each choice whether it is inside the noise, or at the edge of what was tried."""
    lines = []
    for bracket, tries in ranked:
        name, best = _bracket_title(bracket), tries[0]
        if math.isnan(best.score):
            lines.append(f"{name}: no try has a score.")
            continue
        near = [one for one in tries[1:] if one.inside_the_noise and one.rounds == best.rounds]
        if near:
            others = "; ".join(
                f"{_format_point(one.point)} "
                f"({-100 * one.behind:+.2f} ± {100 * one.error:.2f} points)"
                for one in near
            )
            lines.append(
                f"{name}: inside the noise after {best.seeds} seed{'s' * (best.seeds > 1)}; "
                f"{_format_point(best.point)} is no better than {others}."
            )
        edge = TunedMethod(
            name, tuple(Try(one.point, {"": one.score}) for one in tries)
        ).at_the_edge()
        if edge:
            keys = ", ".join(key.rsplit(".", 1)[-1] for key in edge)
            lines.append(f"{name}: {keys} is at the edge of what was tried.")
    return lines


def _make_table(names: Sequence[str], numbers: Sequence[str], fold: bool = False) -> Table:
    """Make an empty table; "best", and with `fold` the numbers, wrap on narrow terminals."""
    table = Table(box=None, pad_edge=False)
    for title in names:
        table.add_column(title, no_wrap=True)
    table.add_column("best")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=not fold)
    return table


def _race_table(ranked: Sequence[RankedBracket], stage: str) -> Table:
    numbers = (f"score,\n{stage}", "seeds", "next\nbest", "±\nerror")
    table = _make_table(("method", "tries", "diverged"), numbers)
    for bracket, tries in ranked:
        best, rest = tries[0], [one for one in tries[1:] if one.rounds == tries[0].rounds]
        second = rest[0] if rest else None
        table.add_row(
            escape(_bracket_title(bracket)),
            str(len(tries)),
            str(sum(one.diverged for one in tries)),
            escape(_format_point(best.point)),
            DASH if math.isnan(best.score) else f"{100 * best.score:.2f}",
            str(best.seeds),
            DASH if second is None else f"{-100 * second.behind:+.2f}",
            DASH if second is None else f"{100 * second.error:.2f}",
        )
    return table


def _grid_table(tuned: Sequence[TunedMethod], stage: str) -> Table:
    cases = list(tuned[0].tries[0].scores)
    numbers = [*(f"{case}\n{stage}".strip() for case in cases), "next best"]
    table = _make_table(("method", "tries", "diverged", "not run"), numbers, fold=True)
    for method in tuned:
        diverged = sum(one.diverged for one in method.tries)
        missing = sum(math.isnan(one.mean) and not one.diverged for one in method.tries)
        counts = [str(count) for count in (len(method.tries), diverged, missing)]
        table.add_row(escape(method_title(method.method)), *counts, *_best_columns(method, cases))
    return table


def _best_columns(method: TunedMethod, cases: Sequence[str]) -> list[str]:
    """Return the best point, its scores, and how far behind the next is."""
    if method.best is None:
        return ["none has a score", *(DASH for _ in cases), DASH]
    tries, scores = method.tries, method.best.scores
    point = _format_point(method.best.point, edge=method.at_the_edge())
    second = tries[1].mean - method.best.mean if len(tries) > 1 else math.nan
    behind = DASH if math.isnan(second) else f"{second:+.4f}"
    return [point, *(f"{scores[case]:.4f}" for case in cases), behind]


def _bracket_title(bracket: Bracket) -> str:
    return " and ".join(method_title(method) for method in bracket.methods)


def _format_point(point: GridPoint, edge: Sequence[str] = ()) -> str:
    return ", ".join(
        f"{key.rsplit('.', 1)[-1]} {value}{' (edge)' if key in edge else ''}"
        for key, value in point
    )


def _ranked_to_json(bracket: Bracket, ranked: Sequence[RankedTry]) -> dict[str, Any]:
    tries = [
        {
            "point": dict(one.point),
            "rounds": one.rounds,
            "seeds": one.seeds,
            "score": _json_number(one.score),
            "behind": _json_number(one.behind),
            "error": _json_number(one.error),
            "inside_the_noise": one.inside_the_noise and one.point != ranked[0].point,
            "diverged": one.diverged,
        }
        for one in ranked
    ]
    return {"methods": list(bracket.methods), "tries": tries}


def _tuned_to_json(method: TunedMethod) -> dict[str, object]:
    tries = [
        {
            "point": dict(one.point),
            "scores": {case: _json_number(score) for case, score in one.scores.items()},
            "mean": _json_number(one.mean),
            "diverged": one.diverged,
        }
        for one in method.tries
    ]
    return {"method": method.method, "tries": tries}


def _json_number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
