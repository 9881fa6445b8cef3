"""Pages of the documentation site that lie elsewhere in the repository.

Their links, and links to them, are written for people who read the files where they are; here they
are turned to where the pages are on the site.
"""

from __future__ import annotations

import ast
import importlib.util
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
    "results/README.md": "records.md",
}
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
DRAWING = re.compile(r'(<img [^>]*src="([^"]*images/round)\.svg"[^>]*>)')
API = "reference/api.md"


def on_files(files: Files, config: Any) -> Files:
    for source, page in ELSEWHERE.items():
        if (ROOT / "docs" / page).exists():  # the site has a page of its own in this place
            continue
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=turned(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name == API:
        markdown = parameters().with_tables(markdown + unplaced(markdown))
    source = ROOT / "docs" / name
    return turned(markdown, f"docs/{name}") if source.exists() else markdown


def on_page_content(html: str, **_: Any) -> str:
    """A drawing that is too wide to be read on a telephone has a narrow one beside it."""
    return DRAWING.sub(
        r'<picture><source media="(max-width: 600px)" srcset="\2-narrow.svg">\1</picture>', html
    )


def parameters() -> ModuleType:
    """The module beside this one; hooks of mkdocs are no package."""
    place = Path(__file__).with_name("parameters.py")
    spec = importlib.util.spec_from_file_location("quiver_docs_parameters", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unplaced(reference: str) -> str:
    """The public names that nobody has put into a section of the reference yet."""
    source = (ROOT / "src" / "quiverfl" / "__init__.pyi").read_text(encoding="utf-8")
    names = [
        alias.asname
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    ]
    missing = [name for name in names if f"::: quiverfl.{name}\n" not in reference]
    listed = "".join(f"::: quiverfl.{name}\n" for name in missing)
    return f"\n## Further names\n\n{listed}" if missing else ""


def turned(text: str, source: str) -> str:
    """A text with links as they are on the site; `source` is where it lies in the repository."""

    page = ELSEWHERE.get(source, source.removeprefix("docs/"))

    def target(found: re.Match[str]) -> str:
        begin, path, anchor, end = found.groups()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if place in ELSEWHERE or place.startswith("docs/"):
            goal = ELSEWHERE.get(place, place.removeprefix("docs/"))
            path = posixpath.relpath(goal, posixpath.dirname(page) or ".")
        return f"{begin}{path}{anchor or ''}{end}"

    return LINK.sub(target, text)
