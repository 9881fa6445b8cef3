"""Cards of objects: one line at a prompt, a small table in a notebook, never tensors."""

from __future__ import annotations

import ast
import contextlib
import html
import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Mapping

_CELL = "padding:1px 12px 1px 0;text-align:left;border:0"


class ReprCard(ABC):
    """`facts` says what there is to say; both ways of showing it come from there."""

    def title(self) -> str:
        return type(self).__name__

    @abstractmethod
    def fields(self) -> Mapping[str, str]: ...

    def __repr__(self) -> str:
        words = ", ".join(f"{name} {text}" for name, text in self.fields().items())
        return f"<{self.title()}: {words}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="{_CELL};opacity:.7">{html.escape(name)}</td>'
            f'<td style="{_CELL}">{html.escape(text)}</td></tr>'
            for name, text in self.fields().items()
        )
        title = f'<tr><th colspan="2" style="{_CELL}">{html.escape(self.title())}</th></tr>'
        return f"<table>{title}{rows}</table>"


def format_thousands(number: int) -> str:
    return f"{number:,}"


def format_range(low: float, high: float) -> str:
    """`5` or `5 to 11`."""
    return (
        format_thousands(int(low))
        if low == high
        else f"{format_thousands(int(low))} to {format_thousands(int(high))}"
    )


def format_shape(sides: tuple[int, ...]) -> str:
    return " × ".join(str(side) for side in sides) if sides else "one number"


# What `help` says of a class whose fields are explained where they stand.
#
# Their texts are comments behind them or strings below them, which Python drops: they are read
# from the file once more and put under the class's own sentence.


INDENT = "    "


def explain(kind: type) -> None:
    """Add the fields and their texts to the docstring, where there are any to be read."""
    if not kind.__doc__ or not getattr(kind, "__annotations__", None):
        return
    with contextlib.suppress(OSError, TypeError):
        lines = _lines(textwrap.dedent(inspect.getsource(kind)))
        if any(line.startswith(INDENT) for line in lines):
            kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__), "", *lines])


def _lines(source: str) -> list[str]:
    (defined,) = ast.parse(source).body
    assert isinstance(defined, ast.ClassDef)
    written, lines = source.splitlines(), []
    for field, below in zip(defined.body, [*defined.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign):
            continue
        _, _, text = written[(field.end_lineno or 0) - 1].partition("  # ")
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = inspect.cleandoc(str(below.value.value))
        name = ast.unparse(field.target)
        if name.startswith("_"):
            continue
        default = f" = {ast.unparse(field.value)}" if field.value else ""
        lines.append(f"{name}: {ast.unparse(field.annotation)}{default}")
        lines += textwrap.wrap(text, 92, initial_indent=INDENT, subsequent_indent=INDENT)
    return lines
