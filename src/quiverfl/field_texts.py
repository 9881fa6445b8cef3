"""What `help` says of a class whose fields are explained where they stand.

Their texts are comments behind them or strings below them, which Python drops: they are read from
the file once more and put under the class's own sentence.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap

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
