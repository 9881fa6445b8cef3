"""The documentation site: it builds without a warning, and no link in it is dead."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

import quiverfl

ROOT = Path(__file__).parents[1]


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet: mkdocs counts only the warnings that it would print.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "-d", str(out)], capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.addresses: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id":
                self.ids.add(str(value))
            if name in ("href", "src") and value and not re.match(r"[a-z]+:", value):
                self.addresses.add(value)


def test_every_link_has_its_target(site: Path) -> None:
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 20
    dead = []
    for page, links in pages.items():
        if page.name == "404.html":  # its addresses are those of the place it is served from
            continue
        for address in links.addresses:
            place, anchor = urldefrag(urljoin(page.as_uri(), address))
            target = Path(unquote(place.removeprefix("file://")))
            target = target / "index.html" if target.is_dir() else target
            known = pages[target].ids if target in pages else None
            if not target.exists() or (anchor and known is not None and anchor not in known):
                dead.append(f"{page.relative_to(site)}: {address}")
    assert dead == []


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Those that have no section there yet are put at the end."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = re.findall(r"^::: quiverfl\.(\w+)$", page, re.M)
    assert set(listed) <= set(quiverfl.__all__)
    ids = Links((site / "reference" / "api" / "index.html").read_text()).ids
    assert [name for name in quiverfl.__all__ if f"quiverfl.{name}" not in ids] == []


def test_pages_of_the_repository_are_on_the_site(site: Path) -> None:
    assert "Open a live sample report" in (site / "index.html").read_text()
    sample = (site / "start" / "sample-report.html").read_bytes()
    assert len(sample) < 600_000
    assert len(gzip.compress(sample)) < 100_000
    for page in ("changelog", "contributing", "security", "benchmarks", "examples"):
        assert (site / page / "index.html").exists()


def test_a_telephone_is_shown_a_narrow_drawing(site: Path) -> None:
    for page in ("index.html", "start/tutorial/index.html"):
        (narrow,) = re.findall(
            r'<source media="[^"]*" srcset="([^"]*)">', (site / page).read_text()
        )
        assert ((site / page).parent / narrow).is_file()


def test_pages_that_the_code_names_are_there() -> None:
    files = [
        p for room in ("src", "tests", "benchmarks", "configs") for p in (ROOT / room).rglob("*")
    ]
    own = [p for p in files if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    texts = [p.read_text() for p in own if p.suffix in (".py", ".toml", ".md", ".c")]
    named = {page for text in texts for page in re.findall(r"docs/[a-z-]+/[a-z-]+\.md", text)}
    assert len(named) > 5
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_a_dead_link_breaks_the_build(tmp_path: Path) -> None:
    """Without this, strictness could be switched off unnoticed."""
    hook = tmp_path / "docs" / "site" / "pages.py"
    hook.parent.mkdir(parents=True)
    hook.write_text("")
    config = (ROOT / "mkdocs.yml").read_text()
    start, end = config.index("nav:\n"), config.index("markdown_extensions:")
    (tmp_path / "mkdocs.yml").write_text(config[:start] + config[end:])
    (tmp_path / "docs" / "other.md").write_text("# Other\n")
    for link, well in (("other.md", True), ("nowhere.md", False), ("other.md#no", False)):
        (tmp_path / "docs" / "index.md").write_text(f"# Start\n\n[there]({link})\n")
        done = build(tmp_path / "mkdocs.yml", tmp_path / "out")
        assert (done.returncode == 0) == well, done.stdout + done.stderr
    shutil.rmtree(tmp_path / "out")
