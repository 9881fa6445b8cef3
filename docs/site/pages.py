"""Pages of the documentation site that lie elsewhere in the repository.

Their links, and links to them, are written for people who read the files where they are; here they
are turned to where the pages are on the site.
"""

from __future__ import annotations

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
}
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=turned(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    name = page.file.src_uri
    return markdown if name in ELSEWHERE.values() else turned(markdown, f"docs/{name}")


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
