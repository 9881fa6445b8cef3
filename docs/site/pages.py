"""Pages of the documentation site that lie elsewhere in the repository.

Their links, and links to them, are written for people who read the files where they are; here they
are turned to where the pages are on the site.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
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


def on_files(files: Files, config: Any) -> Files:
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=turned(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    if name == "api.md":
        return markdown + unplaced(markdown)
    return markdown if name in ELSEWHERE.values() else turned(markdown, f"docs/{name}")


def unplaced(reference: str) -> str:
    """The public names that nobody has put into a section of the reference yet."""
    source = (ROOT / "src" / "quiverfl" / "__init__.py").read_text(encoding="utf-8")
    names = next(
        ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    missing = [name for name in names if f"::: quiverfl.{name}\n" not in reference]
    listed = "".join(f"::: quiverfl.{name}\n" for name in missing)
    return f"\n## Further names\n\n{listed}" if missing else ""


def turned(text: str, source: str) -> str:
    """A text with links as they are on the site; `source` is where it lies in the repository."""

    def target(found: re.Match[str]) -> str:
        begin, path, anchor, end = found.groups()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if place in ELSEWHERE:
            path = ELSEWHERE[place]
        elif place.startswith("docs/"):
            path = place.removeprefix("docs/")
        return f"{begin}{path}{anchor or ''}{end}"

    return LINK.sub(target, text)
