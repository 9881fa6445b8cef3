"""The report in a real browser: it renders, nothing fails, nothing is requested."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from browser import CHROMIUM, FLAGS
from quiverfl.results.report.page import write_report
from run_folders import write_comparison

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine"),
]


@dataclass(frozen=True)
class Visit:
    page: str
    console: list[str]
    """What the page's console said: errors, refused resources."""
    requests: list[str]
    """Addresses the page itself asked for; the browser's own business is not counted."""


def visit(page: Path, scratch: Path) -> Visit:
    log = scratch / "net.json"
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={scratch / 'profile'}",
        "--enable-logging=stderr",
        f"--log-net-log={log}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    parameters = [event.get("params") or {} for event in json.loads(log.read_text())["events"]]
    return Visit(
        done.stdout,
        [line for line in done.stderr.splitlines() if ":CONSOLE" in line],
        [p["url"] for p in parameters if "url" in p and p.get("initiator") == "null"],
    )


def test_the_report_renders_and_asks_for_nothing(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "runs", (0, 1), rounds=3, clients=5)
    write_report([folder], tmp_path / "report.html")
    seen = visit(tmp_path / "report.html", tmp_path)
    assert seen.console == []
    assert seen.requests == []
    for name in ("results", "curves", "clients", "data", "graph", "mass", "configuration"):
        assert f'<section id="{name}">' in seen.page
    assert seen.page.count('class="chart"') == 12, "eight curves, two of clients, two of the mass"


def test_the_watch_sees_errors_and_requests(tmp_path: Path) -> None:
    """Without this, the test above could pass because nothing is ever seen."""
    (tmp_path / "page.html").write_text(
        '<!doctype html><img src="http://picture.invalid/a.png"><script>console.error(1)</script>'
    )
    seen = visit(tmp_path / "page.html", tmp_path)
    assert len(seen.console) == 1
    assert "http://picture.invalid/a.png" in seen.requests


def test_the_page_forbids_what_it_does_not_need(tmp_path: Path) -> None:
    """Even with a foreign image and a script in it the page loads and runs nothing."""
    folder = write_comparison(tmp_path / "runs", rounds=2, clients=4)
    write_report([folder], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    harm = '<img src="http://picture.invalid/a.png"><script>document.title = "taken"</script>'
    (tmp_path / "harmed.html").write_text(text.replace("<main>", "<main>" + harm))
    seen = visit(tmp_path / "harmed.html", tmp_path)
    assert seen.requests == []
    assert "<title>taken</title>" not in seen.page
    assert any("Content Security Policy" in line for line in seen.console)
