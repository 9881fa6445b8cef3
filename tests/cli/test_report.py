"""`quiver report`, TensorBoard files and figures for papers."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from matplotlib.axes import Axes
from rich.console import Console
from typer.testing import CliRunner

from quiverfl.cli.report import report
from quiverfl.errors import QuiverError
from quiverfl.results.figures import draw_curves, make_figure, save_figure
from quiverfl.results.groups import Group, group_runs
from quiverfl.results.run_files import find_runs, read_run
from quiverfl.results.summary import client_frame
from quiverfl.results.tables import print_comparison
from quiverfl.runs.callbacks import write_events
from run_folders import Recipe, write_comparison, write_run

app = typer.Typer()
app.command()(report)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("runs") / "all", rounds=3, clients=5)


def test_a_report_is_written_into_the_folder_and_the_table_printed(comparison: Path) -> None:
    printed = run(comparison)
    assert (comparison / "report.html").read_text().startswith("<!doctype html>")
    for words in ("DFedPGP", "stage local", "stage mixed", "worst 10 %", "Test accuracy at"):
        assert words in printed
    assert printed.rstrip().endswith("report.html")


def test_some_of_the_runs_as_page_tables_and_json(comparison: Path, tmp_path: Path) -> None:
    tables = {"t.md": "| FedAvg |", "t.csv": "local_mean,", "t.tex": r"\toprule"}
    options = [part for name in tables for part in ("--table", tmp_path / name)]
    options += ["--columns", "all"]
    folders = comparison / "local-0", comparison / "fedavg-0"
    printed = run(*folders, "--out", tmp_path / "x.html", *options, "--json")
    assert "FedAvg" in (tmp_path / "x.html").read_text()
    for name, words in tables.items():
        text = (tmp_path / name).read_text()
        assert words in text
        assert "DFedPGP" not in text
    answer = json.loads(printed)
    assert answer["report"] == str(tmp_path / "x.html")
    rows = {row["label"]: row for row in answer["rows"]}
    assert list(rows) == ["Local", "FedAvg"]
    history = read_run(comparison / "fedavg-0").history
    expected = client_frame(history, "mixed", "accuracy").iloc[-1].mean()
    assert rows["FedAvg"]["mixed_mean"] == pytest.approx(expected, abs=1e-14)
    assert rows["FedAvg"]["local_mean_seed_std"] is None


def test_a_table_of_unknown_kind_is_refused(comparison: Path, tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match=r"must end in \.md, \.csv or \.tex"):
        run(comparison, "--out", tmp_path / "x.html", "--table", tmp_path / "t.xls")
    with pytest.raises(QuiverError, match="--columns all: it is for --table"):
        run(comparison, "--out", tmp_path / "x.html", "--columns", "all")
    assert not list(tmp_path.iterdir())


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match="holds no run"):
        run(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_terminal_table_is_never_wider_than_the_terminal(comparison: Path, width: int) -> None:
    groups = group_runs(find_runs([comparison]))
    console = Console(width=width, file=io.StringIO())
    print_comparison(console, groups)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, printed.splitlines())) <= width
    assert "…" not in printed
    assert printed.count("DFedPGP") == {60: 3, 80: 3, 120: 2, 200: 1}[width]


def test_tensorboard_gets_the_means_of_the_history(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = write_run(tmp_path / "run", Recipe(rounds=3, clients=4))
    count = write_events(folder, tmp_path / "events")
    read = accumulator.EventAccumulator(str(tmp_path / "events"))
    read.Reload()
    tags = read.Tags()["scalars"]
    assert count == sum(len(read.Scalars(tag)) for tag in tags)
    means = client_frame(read_run(folder).history, "mixed", "accuracy").mean(axis=1)
    found = read.Scalars("accuracy/mixed")
    assert [point.step for point in found] == [1, 2, 3]
    assert [point.value for point in found] == pytest.approx(means.tolist(), abs=1e-6)
    assert [point.value for point in read.Scalars("cost/local steps of the round")] == [120] * 3
    with pytest.raises(QuiverError, match="holds event files already"):
        write_events(folder, tmp_path / "events")


def test_without_tensorboard_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=1, clients=2))
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    with pytest.raises(QuiverError, match=r"quiverfl\[tensorboard\]"):
        write_events(folder, tmp_path / "events")
    assert not (tmp_path / "events").exists()


def _curves_with_names(axes: Axes, groups: Sequence[Group]) -> None:
    draw_curves(axes, groups, "mixed", "bytes")
    axes.legend()


@pytest.mark.parametrize("name", ["curves.svg", "curves.png", "curves.pdf"])
def test_a_figure_for_a_paper_is_the_same_file_twice(
    comparison: Path, tmp_path: Path, name: str
) -> None:
    groups = group_runs(find_runs([comparison]))
    for folder in ("a", "b"):
        figure = make_figure(lambda axes: _curves_with_names(axes, groups))
        save_figure(figure, tmp_path / folder / name)
    first, second = (tmp_path / folder / name for folder in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    if name.endswith("svg"):
        assert "DFedPGP" in first.read_text()
