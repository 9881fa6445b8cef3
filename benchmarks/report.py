"""The result of a run: a JSON file, a table in the terminal, the table in the documentation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure, from_record

QUESTIONS = ("limit", "others", "growth")
"""How close to the limit, how much faster than the others, how it grows: a table each."""
INSTEAD = "instead"
"""What a user would pick instead: a run's time, memory and lines of code."""
END = "<!-- measured: end -->"
WORKS = "ABCDEFGHT"
COLORS = {"pass": "green", "short": "red", "skipped": "yellow", "–": "dim"}


def write(path: Path, figures: Iterable[Figure], about: dict[str, Any]) -> None:
    """Put the figures into the file; those of an earlier run that were not measured now stay.

    Every figure keeps the description of the run it was measured in.
    """
    records = {_figure(record).key: record for record in _read(path)}
    records.update({figure.key: {**figure.record(), "run": about} for figure in figures})
    ordered = sorted(records.values(), key=lambda record: _order(record["work"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": ordered}, indent=1, ensure_ascii=False) + "\n")


def show(path: Path, about: dict[str, Any]) -> None:
    """The table of everything in the file; figures of other runs say so."""
    table = Table("work", "figure", "measured", "target", "", box=None, pad_edge=False)
    for record in _read(path):
        figure = _figure(record)
        color = COLORS[figure.verdict]
        verdict = f"[{color}]{figure.verdict}[/{color}]"
        notes = [figure.note] if figure.note else []
        notes += [f"an earlier run, {record['run']['date']}"] if record["run"] != about else []
        name = figure.name + (f" [dim]({'; '.join(notes)})[/dim]" if notes else "")
        table.add_row(figure.work, name, _value(figure), _target(figure), verdict)
    Console().print(table)


def render(result: Path, document: Path, mixed: bool = False) -> None:
    """Replace the tables of the document by those of the result.

    Figures of several editions stand in one table only if that is asked for; each then says which.
    """
    records = _read(result)
    if not records:
        raise SystemExit(f"{result}: no figures there; run `python -m benchmarks` first.")
    editions: dict[str, set[str]] = {}
    for record in records:
        editions.setdefault(_edition(record), set()).add(record["work"])
    if len(editions) > 1 and not mixed:
        listed = "; ".join(f"{e}: {', '.join(sorted(w))}" for e, w in sorted(editions.items()))
        raise SystemExit(
            f"{result} has figures of {len(editions)} editions ({listed}). Measure the older ones "
            "again with --only, or say --mixed: every row then names its edition."
        )
    text = document.read_text()
    mixed = len(editions) > 1
    for question in QUESTIONS:
        some = [record for record in records if _question(_figure(record)) == question]
        text = _replace(text, question, table(some, mixed), document)
    text = _replace(text, INSTEAD, table_instead(records), document)
    document.write_text(_replace(text, "runs", describe_runs(records), document))


def begin_mark(part: str) -> str:
    return f"<!-- measured: {part} -->"


def _replace(text: str, part: str, content: str, document: Path) -> str:
    """What stands between a part's mark and the next end, anew."""
    begin = begin_mark(part)
    if begin not in text or END not in text.split(begin, 1)[1]:
        raise SystemExit(f"{document}: the marks {begin} and {END} are missing.")
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{content}{END}{rest.split(END, 1)[1]}"


def _question(figure: Figure) -> str:
    if figure.work == "fedrep":
        return INSTEAD
    if "naive" in figure.name or figure.work == "frameworks":
        return "others"
    grows = figure.work in ("E", "G", "H", "threads") or "per client" in figure.name
    return "growth" if grows or "memory," in figure.name else "limit"


def table(records: list[dict[str, Any]], mixed: bool) -> str:
    titles = ["work", "figure", "measured", "target", "", *(["edition"] if mixed else [])]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for record in records:
        figure = _figure(record)
        name = figure.name + (f" ({figure.note})" if figure.note else "")
        cells = [figure.work, name, _value(figure), _target(figure), figure.verdict]
        lines.append("| " + " | ".join([*cells, *([_edition(record)] if mixed else [])]) + " |")
    return "\n".join(lines) + "\n"


def table_instead(records: list[dict[str, Any]]) -> str:
    lines = ["| with | processor time / Quiver's | memory | lines |", "|---|---:|---:|---:|"]
    for record in records:
        figure = _figure(record)
        if _question(figure) != INSTEAD:
            continue
        name, found = figure.name.removeprefix("FedRep: ").removesuffix(" / Quiver"), figure.details
        if figure.value is None:
            lines.append(f"| {name}: {figure.note} | – | – | – |")
            continue
        cells = f"{figure.value:.2f} | {found['megabytes']:,.0f} MB | {found['lines']}"
        lines.append(f"| {name} {found['version']} | {cells} |")
    return "\n".join(lines) + "\n"


def describe_runs(records: list[dict[str, Any]]) -> str:
    """Where and when the works were measured."""
    works: dict[str, set[str]] = {}
    for record in records:
        works.setdefault(_sentence(record["run"]), set()).add(record["work"])
    lines = []
    for sentence, some in works.items():
        lines += textwrap.wrap(f"{', '.join(sorted(some, key=_order))}: {sentence}", 100)
        lines.append("")
    return "\n".join(lines)


def _edition(record: dict[str, Any]) -> str:
    return _name_edition(record["run"]["machine"])


def _name_edition(machine: dict[str, Any]) -> str:
    """Version and commit of what was measured; runs of before said no commit."""
    return f"{machine['quiverfl']} ({machine.get('commit', 'unknown')})"


def _sentence(run: dict[str, Any]) -> str:
    machine = run["machine"]
    quick = ", quick" if run["quick"] else ""
    return (
        f"measured {run['date']} on {machine['processor']} ({machine['instructions']}), "
        f"{machine['cores']} cores, {machine['memory']}, {machine['system']}. "
        f"Python {machine['python']}, torch {machine['torch']} with {run['threads']} threads. "
        f"Quiver {_name_edition(machine)}{quick}. {run['clock'].capitalize()} time, load "
        f"{run['load']} at the start."
    )


def _value(figure: Figure) -> str:
    return "–" if figure.value is None else f"{figure.value:.2f} {figure.unit}".strip()


def _target(figure: Figure) -> str:
    if figure.bound is None:
        return "–"
    return f"{figure.bound} {figure.target:g} {figure.unit}".strip()


def _order(work: str) -> tuple[int, str]:
    return (WORKS.index(work) if work in WORKS else len(WORKS), work)


def _figure(record: dict[str, Any]) -> Figure:
    return from_record({name: value for name, value in record.items() if name != "run"})


def _read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["figures"] if path.exists() else []
    return found
