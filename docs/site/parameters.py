"""A table of parameters for every public name: type, default and one line from parameters.toml."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import quiverfl

LINES = Path(__file__).with_name("parameters.toml")
UNSHOWN = {"self", "args", "kwargs"}


def parameters_of(name: str) -> list[inspect.Parameter]:
    value: Callable[..., Any] = getattr(quiverfl, name)
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):  # names without parameters, such as types and exceptions
        return []
    if isinstance(value, type) and value.__init__ is object.__init__ and value.__new__ is object:
        return []
    return [one for one in found if one.name not in UNSHOWN]


def describe(name: str, parameter: str) -> str:
    """The line of a parameter, or nothing."""
    lines = _lines()
    found = lines.get(name, {}).get(parameter, lines["all"].get(parameter, ""))
    return str(found)


def undescribed() -> Iterator[str]:
    for name in quiverfl.__all__:
        for parameter in parameters_of(name):
            if not describe(name, parameter.name):
                yield f"{name}.{parameter.name}"


def unused() -> Iterator[str]:
    """Lines of parameters that there are no more."""
    known = {name: {one.name for one in parameters_of(name)} for name in quiverfl.__all__}
    known["all"] = set().union(*known.values())
    for name, lines in _lines().items():
        yield from (f"{name}.{one}" for one in lines if one not in known.get(name, set()))


def with_tables(page: str) -> str:
    """The page with a table below every public name."""
    return re.sub(r"^::: quiverfl\.(\w+)$", lambda m: m[0] + "\n" + table(m[1]), page, flags=re.M)


def table(name: str) -> str:
    rows = [row(name, parameter) for parameter in parameters_of(name)]
    if not rows:
        return ""
    return "\n".join(["", "| parameter | type | default | |", "|---|---|---|---|", *rows, ""])


def row(name: str, parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f"`{type_name(parameter.annotation)}`"
    default = "required"
    if stars:
        default = "–"
    elif parameter.default is not parameter.empty:
        default = f"`{value_name(parameter.default)}`"
    if parameter.default is None:  # that it may be left out is in the next column
        kind = kind.replace(" or None`", "`")
    cells = [f"`{stars}{parameter.name}`", kind, default, describe(name, parameter.name)]
    return f"| {' | '.join(cells)} |"


def type_name(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text).replace(" | ", " or ")
    text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", text).replace("`", "")
    return "function" if text.startswith("Callable") else text


def value_name(value: Any) -> str:
    if inspect.isfunction(value):
        return "a function"
    if len(repr(value)) > 40:
        return type(value).__name__
    return repr(value)


def _lines() -> dict[str, dict[str, str]]:
    return tomllib.loads(LINES.read_text(encoding="utf-8"))
