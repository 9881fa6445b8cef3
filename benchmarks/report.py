"""The result of a run: a JSON file, a table in the terminal, the table in the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure, from_record

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
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
    """Replace what stands between the two marks of the document by the table of the result.

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
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{document}: the marks {BEGIN} and {END} are missing.")
    head, rest = text.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    document.write_text(f"{head}{BEGIN}\n{markdown(records)}{END}{tail}")


def markdown(records: list[dict[str, Any]]) -> str:
    mixed = len({_edition(record) for record in records}) > 1
    titles = ["work", "figure", "measured", "target", "", *(["edition"] if mixed else [])]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for record in records:
        figure = _figure(record)
        name = figure.name + (f" ({figure.note})" if figure.note else "")
        cells = [figure.work, name, _value(figure), _target(figure), figure.verdict]
        lines.append("| " + " | ".join([*cells, *([_edition(record)] if mixed else [])]) + " |")
    runs = {json.dumps(record["run"], sort_keys=True): record["run"] for record in records}
    lines.append("")
    for run in runs.values():
        works = sorted({r["work"] for r in records if r["run"] == run}, key=_order)
        lines.append(f"{', '.join(works)}: {_sentence(run)}")
        lines.append("")
    return "\n".join(lines)


def _edition(record: dict[str, Any]) -> str:
    """Version and commit of what was measured; runs of before said no commit."""
    about = record["run"]["machine"]
    return f"{about['quiverfl']} ({about.get('commit', 'unknown')})"


def _sentence(run: dict[str, Any]) -> str:
    machine = run["machine"]
    return (
        f"measured {run['date']} on {machine['processor']} ({machine['instructions']}), "
        f"{machine['cores']} cores, {machine['memory']}, {machine['system']}; "
        f"Python {machine['python']}, torch {machine['torch']} with {run['threads']} threads, "
        f"quiverfl {machine['quiverfl']}, commit {machine.get('commit', 'unknown')}; "
        f"{run['clock']} time, load {run['load']} at the start"
        + ("; quick" if run["quick"] else "")
        + "."
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
