"""The report: runs in one HTML file that needs nothing else and no network.

Everything is in the page as still pictures and tables; its script, which is in the page too, makes
them answer to the mouse.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from quiverfl.errors import QuiverError
from quiverfl.results import palette, report_sections, report_setup
from quiverfl.results.constant_answers import constant_answer_notes
from quiverfl.results.groups import Group, group_runs
from quiverfl.results.html import Markup, tag
from quiverfl.results.output_files import replace_file
from quiverfl.results.run_files import RunResult, find_runs
from quiverfl.results.summary import STAGES
from quiverfl.results.tables import unfinished

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{}'"
"""Even if a file's content got into the page as HTML, a browser would load nothing, and run
nothing but the script whose digest this is."""

GENERATOR = "Quiver"
MOST_COMMANDS = 8
LONGEST_TITLE = 80
"""Where experiments are counted in the title, not named."""


def write_report(folders: Sequence[Path], out: Path, stage: str = "local") -> list[Group]:
    """Read the runs of some folders and write one page about them.

    An earlier report is replaced; any other file in its place is left alone.
    """
    if out.exists() and not _is_report(out):
        raise QuiverError(f"{out} exists and is not a report of Quiver: choose another --out.")
    groups = group_runs(find_runs(folders))
    replace_file(out, page(groups, stage).encode("utf-8"))
    return groups


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return tag("meta", name="generator", content=GENERATOR).encode() in file.read(2000)


def page(groups: Sequence[Group], stage: str = "local") -> str:
    """The whole page; the named stage comes first, the other beside it."""
    stages = (stage, *(other for other in STAGES if other != stage))
    parts = {
        "Results": report_sections.results(groups, stages),
        "Learning curves": report_sections.curves(groups, stages),
        "Clients": report_sections.clients(groups, stages),
        "Data": report_setup.partition(groups),
        "Graph": report_setup.topology(groups),
        "Push-sum weight": report_sections.mass(groups),
        "Configuration": report_setup.configuration(groups),
    }
    names = ("results", "curves", "clients", "data", "graph", "mass", "configuration")
    links = [tag("a", title, href=f"#{n}") for title, n in zip(parts, names, strict=True)]
    return document(
        title_of(groups),
        _header(groups),
        tag("nav", *links, aria_label="Contents"),
        _notes(groups),
        tag("main", *parts.values()),
        _footer(groups),
    )


def document(title: str, *body: str) -> str:
    """A page that looks like a report, whatever is in it."""
    script = f'"use strict";\n(() => {{\n{_resource("charts.js")}{_resource("report.js")}}})();\n'
    content = tag("body", *body, tag("script", Markup(script)))
    whole = tag("html", _head(title, script), content, lang="en")
    return f"<!doctype html>\n{whole}\n"


def _resource(name: str) -> str:
    return resources.files("quiverfl.results").joinpath(name).read_text(encoding="utf-8")


def _head(title: str, script: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = _POLICY.format(digest)
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        tag("meta", name="generator", content=GENERATOR),
        tag("title", title),
        tag("style", Markup(palette.theme() + _resource("report.css"))),
    )


def title_of(groups: Sequence[Group]) -> str:
    labels = [group.label for group in groups]
    names = labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
    data = list(dict.fromkeys(_data_name(group.first) for group in groups))
    if len(labels) > 4 or len(names) > LONGEST_TITLE:
        different = len({group.method for group in groups}) == len(groups)
        names = f"{len(labels)} {'methods' if different else 'experiments'}"
    return f"{names} on {', '.join(data)}"


def _header(groups: Sequence[Group]) -> Markup:
    runs = [run for group in groups for run in group.runs]
    facts = {
        "clients": _several(run.clients for run in runs),
        "rounds": _several(run.planned_rounds or run.done_rounds for run in runs),
        "seeds": _several(len(group.runs) for group in groups),
        "partition": _several(partition_words(run) for run in runs),
        "model": _several(run.config.get("model", {}).get("name", "unknown") for run in runs),
    }
    listed = [tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items()]
    return tag(
        "header",
        tag("p", "Quiver report", class_="eyebrow"),
        tag("h1", title_of(groups)),
        tag("dl", *listed, class_="facts"),
    )


def notes_of(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before comparing."""
    notes = [*unfinished(groups), *constant_answer_notes(groups)]
    pulled = [group.label for group in groups if group.first.topology == "random_pull"]
    if pulled:
        notes.append(
            f"{', '.join(pulled)} used random_pull: the paper's theorem does not cover it. "
            "μ stays 1 and the mean of u is not conserved."
        )
    for what in ("data", "model", "training"):
        if len({str(group.first.config.get(what)) for group in groups}) > 1:
            notes.append(f"The {what} settings differ between these experiments (see the end).")
    if len({group.first.planned_rounds for group in groups}) > 1:
        notes.append("These experiments do not have the same number of rounds.")
    for group in groups:
        notes += [
            f"{run.path.name} is left out: {group.label} with seed {run.seed} is here already."
            for run in group.left_out
        ]
    if len(groups) > 1 and all(len(group.runs) == 1 for group in groups):
        notes.append("One seed each: small differences may be chance; run several seeds.")
    return notes


def _notes(groups: Sequence[Group]) -> Markup:
    notes = notes_of(groups)
    return tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else Markup()


def _footer(groups: Sequence[Group]) -> Markup:
    runs = [run for group in groups for run in group.runs]
    made = "one run folder" if len(runs) == 1 else f"{len(runs)} run folders"
    version = _several(_version(run) for run in runs)
    words = f"Made from {made} written by Quiver {version}{_when(runs)}."
    commands = dict.fromkeys(str(c) for run in runs if (c := run.environment.get("command")))
    listed = [tag("p", tag("code", command)) for command in list(commands)[:MOST_COMMANDS]]
    if len(commands) > MOST_COMMANDS:
        listed.append(tag("p", f"and {len(commands) - MOST_COMMANDS} more commands."))
    return tag("footer", tag("p", f"{words} Rounds are counted from 1."), *listed)


def _version(run: RunResult) -> str:
    commit = run.environment.get("commit")
    return f"{run.version} (commit {commit})" if commit else run.version


def _when(runs: Sequence[RunResult]) -> str:
    """` between … and …`, to the minute."""
    started = sorted(str(s) for run in runs if (s := run.environment.get("started")))
    if not started:
        return ""
    first, last = (text[:16].replace("T", " ") for text in (started[0], started[-1]))
    return f", started {first} UTC" if first == last else f", started {first} to {last} UTC"


def _data_name(run: RunResult) -> str:
    return str(run.config.get("data", {}).get("name", "unknown data"))


def partition_words(run: RunResult) -> str:
    data = run.config.get("data", {})
    options = [data.get(name) for name in ("alpha", "classes_per_client")]
    given = ", ".join(str(option) for option in options if option is not None)
    name = str(data.get("partition", "unknown"))
    return f"{name}({given})" if given else name


def _several(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))
