"""Run notebooks and write what their cells give into them.

    python docs/site/notebooks.py docs/start/*.ipynb

A cell gives what it prints, and its last expression as text and, where it has one, as HTML. Nothing
of Jupyter is needed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_notebook(path: Path) -> dict[str, Any]:
    """The notebook with new outputs; cells run in order and share their names."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
            cell["outputs"] = run_cell("".join(cell["source"]), names, count)
    return notebook


def run_cell(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if last else None
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        html = getattr(value, "_repr_html_", lambda: None)()
        if html:
            data["text/html"] = html.splitlines(keepends=True)
        result = {"output_type": "execute_result", "execution_count": count}
        outputs.append({**result, "metadata": {}, "data": data})
    return outputs


def texts(notebook: dict[str, Any]) -> list[str]:
    """What the cells print and give, as text."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    return ["".join(o["text"] if "text" in o else o["data"]["text/plain"]) for o in outputs]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = json.dumps(run_notebook(Path(name)), indent=1, ensure_ascii=False)
        Path(name).write_text(text + "\n", encoding="utf-8")
