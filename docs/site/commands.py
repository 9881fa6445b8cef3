"""Write docs/reference/commands.md, every command of `quiver`, from the command line itself.

python docs/site/commands.py            writes the page
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from typer.main import get_command

from quiverfl.cli.main import app

PAGE = Path(__file__).parents[1] / "reference" / "commands.md"
NAMES: dict[Any, str] = {Path: "path", str: "text", int: "whole number", float: "number", bool: ""}
HEAD = """# Commands

Every command of `quiver`, its arguments and its options. `quiver COMMAND --help` prints the same.
This page is made from the command line itself (`python docs/site/commands.py`), and a test checks
that it is current.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | `check`, `doctor` or `peer audit` found something wrong |
| 2 | something to fix; the sentence on standard error says what |
| 3 | training diverged |
| 130, 143 | interrupted by Ctrl-C, stopped by SIGTERM; `quiver resume` continues |

`quiver peer` has further codes: [Peers](peers.md).
"""


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it, groups in place of which their commands stand."""
    command = command.load() if hasattr(command, "load") else command
    children = getattr(command, "commands", None)
    if children is None:
        yield words, command
        return
    if words and command.invoke_without_command:
        yield words, command
    for name, child in children.items():
        yield from walk(child, (*words, name))


def render_page() -> str:
    found = list(walk(get_command(app)))
    sections = [render(words, command) for words, command in found]
    return "\n".join([HEAD, render_overview(found), *sections])


def render_overview(found: list[tuple[tuple[str, ...], Any]]) -> str:
    rows = [
        f"| [`{' '.join(('quiver', *words))}`](#{'-'.join(('quiver', *words))}) "
        f"| {cell(first_sentence(command.help or ''))} |"
        for words, command in found
    ]
    return "\n".join(["| command | what it does |", "|---|---|", *rows, ""])


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def render(words: tuple[str, ...], command: Any) -> str:
    called = " ".join(("quiver", *words))
    parameters = [p for p in command.params if not getattr(p, "hidden", False) and p.name != "help"]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    options = [p for p in parameters if p.param_type_name != "argument"]
    usage = " ".join([called, *map(usage_of, arguments), *(["[OPTIONS]"] if options else [])])
    lines = [f"## {called}", "", f"```text\n{usage}\n```", "", plain(command.help or ""), ""]
    if parameters:
        lines += ["| option | value | default | |", "|---|---|---|---|"]
        lines += [row_of(parameter) for parameter in (*arguments, *options)] + [""]
    return "\n".join(lines)


def usage_of(argument: Any) -> str:
    name = (argument.metavar or argument.name).upper().strip("[]").rstrip(".").rstrip("…")
    name += "…" if argument.nargs != 1 else ""
    return name if argument.required else f"[{name}]"


def row_of(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        names, value = f"`{usage_of(parameter).strip('[]')}`", kind_of(parameter).split(",")[0]
    else:
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        value = "" if parameter.is_flag else kind_of(parameter)
    return f"| {names} | {value} | {default_of(parameter)} | {cell(parameter.help or '')} |"


def kind_of(parameter: Any) -> str:
    many, kind = False, parameter.type_descriptor.annotation
    if get_origin(kind) in (list, tuple):
        many, kind = True, get_args(kind)[0]
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " or ".join(f"`{choice.value}`" for choice in kind)
    return NAMES[kind] + (", repeatable" if many else "")


def default_of(parameter: Any) -> str:
    value = parameter.default
    if callable(value):
        value = value()
    if parameter.required:
        return "required"
    if value is None or value is False or value in ("", (), []):
        return "–"
    if value is True:
        return f"`{parameter.opts[0]}`"
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return f"`{value}`"


def plain(text: str) -> str:
    """Help as Markdown: paragraphs, in lines of about 100 characters."""
    paragraphs = re.split(r"\n\s*\n", text.strip().replace("\b", ""))
    return "\n\n".join(wrap(" ".join(paragraph.split())) for paragraph in paragraphs)


def wrap(text: str, width: int = 100) -> str:
    return "\n".join(
        textwrap.wrap(protect(text), width, break_long_words=False, break_on_hyphens=False)
    )


def cell(text: str) -> str:
    return protect(" ".join(text.split())).replace("|", "\\|")


def protect(text: str) -> str:
    """Angle brackets and stars that Markdown would take for its own; words in capitals stay."""
    return re.sub(r"(?<!`)<([^>`]*)>", r"`<\1>`", text).replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
    print(PAGE)
