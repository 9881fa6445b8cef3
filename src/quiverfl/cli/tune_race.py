"""`quiver tune` of a sweep with a section [tuning]: a race, and what can be said after it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quiverfl.cli.sweep import carry_out, leave
from quiverfl.methods import method_title
from quiverfl.results.numbers import NOTHING
from quiverfl.results.output_files import replace_file
from quiverfl.sweeps.layout import Places
from quiverfl.sweeps.plan import Cell, Point, Sweep
from quiverfl.sweeps.racing import (
    Contest,
    Rules,
    Standing,
    contests,
    race,
    rounds_run,
    standings,
)
from quiverfl.sweeps.tuning import Try, Tuned, as_overrides
from quiverfl.sweeps.where import Where

Outcome = tuple[Contest, list[Standing]]


def run_race(
    plan: Sweep,
    places: Places,
    stage: str,
    place: Where,
    estimated: bool,
    quiet: bool,
    as_json: bool,
    write: Path | None,
) -> None:
    """Race, print what came out of it, and write it down where that is wanted."""
    rules = Rules.read(plan.tuning or {})
    found = contests(plan.cells, places, stage)

    def run(until: Mapping[str, int], cells: Sequence[Cell]) -> None:
        carry_out(cells, places, place, False, estimated, False, quiet or as_json, until)

    race(found, rules, run)
    outcomes = [(contest, standings(contest, rules)) for contest in found]
    begun, rounds = rounds_run(plan.cells, places)
    whole = sum(cell.config.run.rounds for cell in plan.cells)
    alone = overrides(outcomes, pairs=False)
    together = overrides(outcomes, pairs=True)
    if as_json:
        budget = {"runs": begun, "rounds": rounds, "rounds_of_the_whole_grid": whole}
        print(json.dumps({"contests": [_record(*one) for one in outcomes], "budget": budget}))
    else:
        console = Console(highlight=False)
        console.print(_table(outcomes, stage))
        for line in verdicts(outcomes):
            console.print(line, markup=False, soft_wrap=True)
        console.print(
            f"{sum(len(c.tries) for c in found if len(c.methods) == 1)} tries in {begun} runs: "
            f"{rounds:,} rounds; all of them to the end with every seed would be {whole:,}."
        )
        if rules.rounds is not None:
            console.print(
                f"lr_decay is for runs of {rules.rounds} rounds; a shorter race ends with the same "
                "learning rate."
            )
        print(alone)
        if together:
            print(f"# The same rates for methods that differ in the graph alone:\n{together}")
    if write is not None:
        replace_file(write, alone.encode())
        if together:
            ablation = write.with_name(f"{write.stem}-same-rates{write.suffix}")
            replace_file(ablation, together.encode())
    begun_cells = [cell for cell in plan.cells if places.failure(cell).exists()]
    leave([cell for cell in begun_cells if places.state(cell) != "diverged"], places)


def overrides(outcomes: Sequence[Outcome], pairs: bool) -> str:
    """The choices as sections of a configuration, of single methods or of pairs."""
    chosen = [
        Tuned(method, (Try(ranked[0].point, {"": ranked[0].score}),))
        for contest, ranked in outcomes
        if (len(contest.methods) > 1) is pairs
        for method in contest.methods
    ]
    return as_overrides(chosen)


def verdicts(outcomes: Sequence[Outcome]) -> list[str]:
    """A sentence about every choice: clear, inside the noise, or at the edge of what was tried."""
    lines = []
    for contest, ranked in outcomes:
        name, best = _name(contest), ranked[0]
        if math.isnan(best.score):
            lines.append(f"{name}: no try has a score.")
            continue
        near = [one for one in ranked[1:] if one.inside_the_noise and one.rounds == best.rounds]
        if near:
            others = "; ".join(
                f"{_point(one.point)} ({-100 * one.behind:+.2f} ± {100 * one.error:.2f} points)"
                for one in near
            )
            lines.append(
                f"{name}: inside the noise after {best.seeds} seed{'s' * (best.seeds > 1)}; "
                f"{_point(best.point)} is no better than {others}."
            )
        edge = Tuned(name, tuple(Try(one.point, {"": one.score}) for one in ranked)).at_the_edge()
        if edge:
            keys = ", ".join(key.rsplit(".", 1)[-1] for key in edge)
            lines.append(f"{name}: {keys} is at the edge of what was tried.")
    return lines


def _table(outcomes: Sequence[Outcome], stage: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("method", "tries", "diverged"):
        table.add_column(title, no_wrap=True)
    table.add_column("best")  # folded where a terminal is narrow
    for title in (f"score,\n{stage}", "seeds", "next\nbest", "±\nerror"):
        table.add_column(title, justify="right", no_wrap=True)
    for contest, ranked in outcomes:
        best, rest = ranked[0], [one for one in ranked[1:] if one.rounds == ranked[0].rounds]
        second = rest[0] if rest else None
        table.add_row(
            escape(_name(contest)),
            str(len(ranked)),
            str(sum(one.diverged for one in ranked)),
            escape(_point(best.point)),
            NOTHING if math.isnan(best.score) else f"{100 * best.score:.2f}",
            str(best.seeds),
            NOTHING if second is None else f"{-100 * second.behind:+.2f}",
            NOTHING if second is None else f"{100 * second.error:.2f}",
        )
    return table


def _name(contest: Contest) -> str:
    return " and ".join(method_title(method) for method in contest.methods)


def _point(point: Point) -> str:
    return ", ".join(f"{key.rsplit('.', 1)[-1]} {value}" for key, value in point)


def _record(contest: Contest, ranked: Sequence[Standing]) -> dict[str, Any]:
    tries = [
        {
            "point": dict(one.point),
            "rounds": one.rounds,
            "seeds": one.seeds,
            "score": _number(one.score),
            "behind": _number(one.behind),
            "error": _number(one.error),
            "inside_the_noise": one.inside_the_noise and one.point != ranked[0].point,
            "diverged": one.diverged,
        }
        for one in ranked
    ]
    return {"methods": list(contest.methods), "tries": tries}


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
