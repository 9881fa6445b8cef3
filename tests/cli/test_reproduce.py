"""`quiver reproduce` from start to files, and again after it was killed half-way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.cli.reproduce import Equal, Graph, folder_name
from quiverfl.results.run_files import read_lines

TINY = [
    "--scale",
    "tiny",
    "--no-estimate",
    "--jobs",
    "1",
    "--cases",
    "Digits Pat-2",
    "--set",
    "run.threads=1",
]
LONGER = ["--methods", "local,dfedpgp", "--set", "run.rounds=12", "--set", "data.clients=5"]
FEWER = ["--methods", "local"]
FILES = [
    "table1.md",
    "table1.tex",
    "table1.csv",
    "table1-equal-steps.md",
    "table1-equal-steps.csv",
    "table1-differences.md",
    "table1-differences.csv",
    "table1-significance.md",
    "table1-curves.svg",
]
CELLS = 2 * 2


def reproduce(what: str, folder: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", what, "--out", str(folder), *options])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Table 1 of the smoke test, run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    output = reproduce("table1", folder, *TINY, *LONGER)
    assert f"{CELLS} cells, 0 of them done before." in output
    assert "Digits Pat-2" in output
    return folder


def test_the_table_is_written_in_every_form(whole: Path) -> None:
    folder = whole / "table1-tiny"
    for name in FILES:
        assert (folder / name).stat().st_size > 0
    assert (folder / "table1-curves.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert "against DFedPGP, paired by seed" in page
    assert "<svg" in page
    assert 'href="case-Digits-Pat-2.html"' in page
    assert "A smoke test of the machinery: these numbers mean nothing." in page
    assert (folder / "case-Digits-Pat-2.html").is_file()
    assert r"\begin{table}" in (folder / "table1.tex").read_text()


def test_killed_half_way_and_started_again_it_writes_the_same_tables(
    whole: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "quiverfl.cli.main", "reproduce", "table1", *TINY, *LONGER]
    process = subprocess.Popen([*command, "--out", "."], cwd=tmp_path, stderr=subprocess.DEVNULL)
    cells = tmp_path / "cells"
    end = time.monotonic() + 120
    while len(list(cells.glob("*/summary.json"))) < 1 or not _half_way(cells):
        assert time.monotonic() < end
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.005)
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children, timeout=30)
    assert len(children) == 1
    assert not children[0].is_running()
    assert len(list(cells.glob("*/summary.json"))) < CELLS
    assert not (tmp_path / "table1-tiny").exists()
    output = reproduce("table1", tmp_path, *TINY, *LONGER)
    assert "0 of them done before" not in output
    for name in FILES:
        ours, theirs = (folder / "table1-tiny" / name for folder in (tmp_path, whole))
        assert ours.read_bytes() == theirs.read_bytes(), name


def _half_way(cells: Path) -> bool:
    """Some cell has begun and has a checkpoint, but no summary."""
    return any(
        len(read_lines(folder / "rounds.jsonl")) > 2 and not (folder / "summary.json").exists()
        for folder in cells.iterdir()
        if folder.is_dir() and not folder.name.startswith(".")
    )


def test_other_items_use_the_cells_that_are_there(whole: Path) -> None:
    """Nothing is left to run for the curves and the rounds to a target."""
    output = reproduce("table2", whole, *TINY, *LONGER, "--stage", "mixed", "--tensorboard")
    assert f"{CELLS} cells, {CELLS} of them done before." in output
    assert "Rounds to a target" in output
    assert "stage “mixed”" in (whole / "table2-tiny" / "table2.md").read_text()
    events = list((whole / "table2-tiny" / "tensorboard").glob("*/*tfevents*"))
    assert len(events) == CELLS
    files = json.loads(reproduce("fig2", whole, *TINY, *LONGER, "--json"))
    assert Path(files["folder"]) == whole / "fig2-tiny"
    assert str(whole / "fig2-tiny" / "fig2-curves.png") in files["files"]


def test_no_table_of_other_runs_stays_beside_the_new_ones(whole: Path) -> None:
    folder = whole / "table1-tiny"
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    (folder / "table1-notes.md").write_text("mine")
    try:
        written = json.loads(reproduce("table1", whole, *TINY, *LONGER, *FEWER, "--json"))
        names = {Path(name).name for name in written["files"]}
        assert not {"table1-differences.md", "table1-differences.csv"} & names
        assert names | {"table1-notes.md"} == {
            path.name for path in folder.iterdir() if not path.name.startswith(".")
        }
    finally:
        (folder / "table1-notes.md").unlink()
        reproduce("table1", whole, *TINY, *LONGER)
    again = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert set(again) == set(before)


def test_a_case_set_otherwise_is_not_called_and_compared_as_the_papers(whole: Path) -> None:
    output = reproduce(
        "table1", whole, *TINY, *LONGER, "--set", "data.classes_per_client=3", "--dry-run"
    )
    assert output.count("Digits Pat-2, classes_per_client 3") == CELLS
    same = reproduce(
        "table1", whole, *TINY, *LONGER, "--set", "data.classes_per_client=2", "--dry-run"
    )
    assert "classes_per_client" not in same


def test_a_dry_run_runs_nothing(whole: Path) -> None:
    output = reproduce("table1", whole, *TINY, *LONGER, "--seeds", "0,9", "--dry-run")
    states = [line.split()[0] for line in output.splitlines() if "digits" in line]
    assert sorted(states) == ["finished"] * 2 + ["new"] * 2


def test_heat_maps_need_no_training(tmp_path: Path) -> None:
    output = reproduce("fig4", tmp_path, "--scale", "tiny")
    assert "heterogeneity" in output
    assert (tmp_path / "fig4-tiny" / "fig4-partitions.svg").is_file()
    assert not (tmp_path / "cells").exists()
    lines = (tmp_path / "fig4-tiny" / "fig4.csv").read_text().splitlines()
    assert lines[2].startswith("Digits Pat-2,10,30–30,2–2,2.0,")


def test_variants_are_other_cells_in_a_folder_of_their_own(tmp_path: Path) -> None:
    usual = reproduce("table1", tmp_path, *TINY, "--dry-run")
    pull = reproduce("table1", tmp_path, *TINY, "--dry-run", "--graph", "pull")
    steps = reproduce("table1", tmp_path, *TINY, "--dry-run", "--equal", "participation")
    assert _different(usual, pull) == {"osgp", "dfedpgp"}
    assert _different(usual, steps) == {"fedavg"}
    name = folder_name("table1", "./configs/tiny", Graph.pull, Equal.participation)
    assert name == "table1-tiny-pull-equal-participation"


def _different(first: str, second: str) -> set[str]:
    names = [{line.split()[1] for line in text.splitlines()[1:]} for text in (first, second)]
    return {name.split("-")[0] for name in names[0] ^ names[1]}
