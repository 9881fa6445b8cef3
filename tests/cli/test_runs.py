"""Tests of `quiver ls`, `show` and `watch`: what the files of runs say, in whatever state."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from browser import CHROMIUM, Browser
from quiverfl.cli.main import app
from quiverfl.cli.runs import make_watch_server
from quiverfl.cli.server import make_server
from quiverfl.errors import QuiverError
from quiverfl.results.report.overview import RunFinder
from quiverfl.results.report.watch import make_watch_page
from run_folders import Recipe, write_exact, write_json, write_lines, write_run

NASTY = "<script>alert(1)</script>"


def give_lock(folder: Path, process: int, host: str = "") -> None:
    write_json(folder / ".lock", {"pid": process, "host": host or socket.gethostname()})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run in every state: two that are over, three that are not, and a cell without a run."""
    top = tmp_path / "runs"
    write_exact(top / "a", "local", 0, [[0.5, 0.7], [0.6, 0.9]], [[0.1, 0.1], [0.2, 0.4]])
    write_run(top / "under" / "b", Recipe(rounds=4, clients=3), finished=False)
    write_run(top / "c", Recipe(rounds=4, clients=3, method="fedavg"), finished=False)
    write_run(top / "d", Recipe(rounds=4, clients=3), finished=False)
    error = {"finished": False, "diverged": {"round": 2, "client": 1}, "error": f"too {NASTY}"}
    write_json(top / "d" / "summary.json", error)
    give_lock(top / "under" / "b", os.getpid())
    give_lock(top / "c", 2**22 + 1)  # more than a process can have: its holder was killed
    (top / "failures").mkdir()
    write_json(top / "failures" / "osgp-x0.3-seed1.json", {"error": "no memory", "code": 1})
    return top


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120"})
    if isinstance(done.exception, QuiverError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_every_state_is_told_from_the_files(runs: Path) -> None:
    rows = {row["folder"]: row for row in json.loads(call("ls", runs, "--json"))}
    found = {str(Path(folder).relative_to(runs)): row["state"] for folder, row in rows.items()}
    assert found == {
        "a": "finished",
        "c": "interrupted",
        "d": "diverged",
        "under/b": "running",
        "cells/osgp-x0.3-seed1": "failed",
    }
    first = rows[str(runs / "a")]
    assert first["local"] == pytest.approx(0.75)
    assert first["mixed"] == pytest.approx(0.3)
    assert (first["rounds"], first["seconds_left"]) == (2, None)
    printed = call("ls", runs)
    assert "75.00" in printed
    assert "no memory" in printed
    assert "1 running, 1 finished, 1 interrupted, 1 diverged, 1 failed" in printed


def test_the_time_left_is_that_of_the_rounds_before(runs: Path) -> None:
    folder = runs / "under" / "b"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    write_lines(folder / "rounds.jsonl", [{**line, "seconds": 3.0} for line in lines[:3]])
    (row,) = json.loads(call("ls", folder, "--json"))
    assert (row["rounds"], row["of"], row["seconds_left"]) == (3, 4, pytest.approx(3.0))


def test_seconds_that_are_no_number_count_for_nothing(runs: Path) -> None:
    folder = runs / "under" / "b"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    seconds = [2.0, "soon", None]
    write_lines(
        folder / "rounds.jsonl",
        [{**line, "seconds": s} for line, s in zip(lines[:3], seconds, strict=True)],
    )
    (row,) = json.loads(call("ls", folder, "--json"))
    assert row["seconds"] == 2.0


def test_scores_of_unseen_clients_are_shown(runs: Path) -> None:
    path = runs / "c" / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [*lines, *({**line, "stage": "fitted"} for line in lines)])
    assert "accuracy, fitted" in call("show", runs / "c")


def test_a_reader_that_leaves_in_the_middle_is_no_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with make_server({}, 0) as server:
        for problem, silent in ((BrokenPipeError(), True), (ValueError("broken"), False)):
            try:
                raise problem
            except Exception:
                server.handle_error(None, ("127.0.0.1", 1))
            assert ("broken" not in capsys.readouterr().err) is silent


def test_a_run_on_another_machine_is_judged_by_its_files(runs: Path) -> None:
    folder = runs / "c"
    give_lock(folder, 1, "elsewhere")
    assert RunFinder(folder).read()[0].state == "running"
    old = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (old, old))
    assert RunFinder(folder).read()[0].state == "interrupted"


def test_one_run_in_words(runs: Path) -> None:
    shown = call("show", runs / "c")
    for words in ("interrupted", "FedAvg", "of 4", f"quiver resume {runs / 'c'}"):
        assert words in "".join(shown.split("\n"))
    assert json.loads(call("show", runs / "a", "--json"))["config"]["method"]["name"] == "local"
    with pytest.raises(QuiverError, match="is not a run folder: `quiver ls"):
        call("show", runs)
    with pytest.raises(QuiverError, match="no such folder"):
        call("show", runs / "nowhere")
    with pytest.raises(QuiverError, match="is not a folder"):
        call("ls", runs / "nowhere")
    (runs / "a" / "config.json").write_text("{")
    damaged = call("ls", runs)
    assert "a: " in damaged
    assert "is damaged and cannot be read" in damaged
    assert "2 failed" in damaged  # the others are read all the same


def test_a_file_that_has_not_changed_is_not_read_again(runs: Path) -> None:
    finder = RunFinder(runs)
    before, version = finder.read(), finder.version()
    assert [a.run is b.run for a, b in zip(before, finder.read(), strict=True)] == [True] * 5
    assert finder.version() == version
    with (runs / "under" / "b" / "rounds.jsonl").open("a") as file:
        file.write("\n")
    assert finder.version() != version
    changed = {b.name for a, b in zip(before, finder.read(), strict=True) if a.run is not b.run}
    assert changed == {"under/b"}


def test_a_folder_that_goes_while_it_is_watched_ends_nothing(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody removes one between two looks; here in the middle of one, and then all of them."""
    finder, listed = RunFinder(runs), Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == runs / "under":
            shutil.rmtree(folder)
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert [one.name for one in finder.read()] == ["a", "c", "d", "cells/osgp-x0.3-seed1"]
    version = finder.version()
    shutil.rmtree(runs)
    assert finder.version() != version
    assert finder.read() == []


def test_each_case_has_curves_of_its_own_scale_and_names_without_the_case(tmp_path: Path) -> None:
    for clients, rounds in ((3, 2), (5, 40)):
        for method in ("local", "dfedpgp"):
            recipe = Recipe(rounds=rounds, clients=clients, method=method)
            write_run(tmp_path / f"{method}-{clients}", recipe)
    page = make_watch_page(RunFinder(tmp_path), 1.0)
    assert set(re.findall(r'data-label="([^"]*)"', page)) == {"Local", "DFedPGP"}
    scales = re.findall(r'"scale":\s*"([^"]*)"', page)
    assert (len(scales), len(set(scales))) == (4, 2)  # a case's two stages share one


@contextmanager
def served(folder: Path) -> Iterator[str]:
    server = make_watch_server(RunFinder(folder), 0, every=0.2)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_page_is_local_read_only_and_takes_nothing_for_markup(runs: Path) -> None:
    with served(runs) as here:
        with urllib.request.urlopen(f"{here}/", timeout=30) as answer:
            page = answer.read().decode()
        assert NASTY not in page
        assert "too &lt;script&gt;" in page
        assert "5 runs below" in page
        assert "default-src 'none'" in page
        for request, code in [
            (urllib.request.Request(f"{here}/", headers={"Host": "evil.test"}), 403),
            (urllib.request.Request(f"{here}/../etc/passwd"), 404),
            (urllib.request.Request(f"{here}/", data=b"x", method="POST"), 501),
        ]:
            with pytest.raises(urllib.error.HTTPError) as failed:
                urllib.request.urlopen(request, timeout=30)
            assert failed.value.code == code
        port = here.rpartition(":")[2]
        with pytest.raises(QuiverError, match=rf"--port {port}: .* Give another one"):
            call("watch", runs, "--port", port)
    finite = "more than 0 seconds, and finite"
    refused = {"--port=70000": "from 0 to 65535", "--every=0": finite, "--every=inf": finite}
    for option, words in refused.items():
        with pytest.raises(QuiverError, match=words):
            call("watch", runs, option)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
def test_the_page_follows_the_files_and_keeps_what_was_switched_off(
    runs: Path, tmp_path: Path
) -> None:
    table = "[...document.querySelectorAll('#runs tbody tr')].map(r => r.innerText).join('|')"
    with served(runs) as here, Browser(tmp_path / "profile") as browser:
        for width, dark in ((1400, False), (420, True)):
            browser.window(width, dark=dark)
            browser.call("Page.navigate", url=f"{here}/")
            browser.until("document.querySelectorAll('.chart svg').length > 1")
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert browser.evaluate(wide) == 0
        assert "2 of 2" in browser.evaluate(table)
        switch = "document.querySelector('.legend button[data-label=\"FedAvg\"]')"
        browser.evaluate(f"{switch}.click()")
        give_lock(runs / "c", os.getpid())  # it is resumed
        browser.until(f"({table}).split('running').length === 3")
        browser.until("document.querySelectorAll('.chart svg').length > 1")
        assert browser.evaluate(f"{switch}.getAttribute('aria-pressed')") == "false"
        assert browser.console == []
        assert {url.rpartition("/")[0] for url in browser.requests} == {here}
