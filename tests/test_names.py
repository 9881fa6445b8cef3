"""A function is a verb with its object, and the shard stays short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import quiverfl

ROOT = Path(quiverfl.__file__).parent

PARTICIPLE = re.compile(
    r"_?([a-z]+ed|[a-z]+en|kept|told|found|shown|made|held|heard|left|lost|built|known|drawn|begun)"
)
"""One word, which says neither who does it nor to what."""
WORDS = {"seed", "open", "_open", "_shorten", "_lighten", "between"}
"""Words that end like a participle and are none."""
PREDICATES = {"finished", "passed"}
"""Properties that are true or false."""
FIELD = {"isolated", "pretrained"}
"""A graph and a model that the field calls so."""


def list_trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def test_no_function_is_a_bare_participle() -> None:
    allowed = WORDS | PREDICATES | FIELD
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    named = [
        f"{file}:{node.lineno} {node.name}"
        for file, tree in list_trees()
        for node in ast.walk(tree)
        if isinstance(node, functions)
        and PARTICIPLE.fullmatch(node.name)
        and node.name not in allowed
    ]
    assert not named, "give each a verb and its object"


def test_the_shard_stays_short() -> None:
    """It is the class that everything else is tempted to grow into."""
    lines = (ROOT / "engine" / "shard.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 200
