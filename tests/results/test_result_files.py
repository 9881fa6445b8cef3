"""Tests of the tables and figures that every command writes, and `result.table` and `.plot`."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import quiverfl as qv
from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.results.figures import plot_bars, plot_curves
from quiverfl.results.groups import Group, group_runs, name_alike
from quiverfl.results.report.page import make_title
from quiverfl.results.run_files import find_runs
from quiverfl.results.tables import ResultFiles, write_results
from quiverfl.seeds import check_seeds
from run_folders import write_exact

SCORES = {"local": [[0.6], [0.8]], "dfedpgp": [[0.9], [0.5]]}
"""By method: for each seed the accuracy of the only round, for both clients."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for method, seeds in SCORES.items():
        for seed, (score,) in enumerate(seeds):
            local, mixed = [[score, score]], [[score - 0.1, score - 0.1]]
            write_exact(tmp_path / "runs" / f"{method}-{seed}", method, seed, local, mixed)
    return tmp_path / "runs"


@pytest.fixture
def groups(runs: Path) -> list[Group]:
    return group_runs(find_runs([runs]))


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, QuiverError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_writes_methods_and_stages_in_every_format(runs: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("t.md", "t.tex", "t.csv", "c.pdf", "c.svg", "b.png")]
    md, tex, numbers, pdf, svg, png = files
    words = ["--table", md, "--table", tex, "--table", numbers, "--figure", pdf, "--figure", svg]
    call("report", runs, "--out", tmp_path / "r.html", *words, "--bars", png)
    assert "| Local | **70.00 ± 14.14** | **60.00 ± 14.14** |" in md.read_text()
    assert (
        r"DFedPGP & \textbf{70.00 $\pm$ 28.28} & \textbf{60.00 $\pm$ 28.28} \\" in tex.read_text()
    )
    assert r"\toprule" in tex.read_text()
    with numbers.open() as file:
        head, local, ours = csv.reader(file)
    assert head == ["method", "stage local", "stage local, std over seeds",
                    "stage mixed", "stage mixed, std over seeds"]  # fmt: skip
    assert local[0] == "Local"
    assert [float(x) for x in local[1:]] == pytest.approx([0.7, 0.02**0.5, 0.6, 0.02**0.5])
    assert [float(x) for x in ours[1:]] == pytest.approx([0.7, 0.08**0.5, 0.6, 0.08**0.5])
    assert pdf.read_bytes().startswith(b"%PDF")
    assert ">DFedPGP<" in svg.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_every_column_is_there_on_request(groups: list[Group], tmp_path: Path) -> None:
    table = tmp_path / "t.tex"
    write_results(groups, ResultFiles([table]), "mixed")
    assert "worst 10" not in table.read_text()
    assert table.read_text().index("stage mixed") < table.read_text().index("stage local")
    write_results(groups, ResultFiles([table], columns="all"))
    for word in ("worst 10", "bytes", "seeds needed"):
        assert word in table.read_text()


@pytest.mark.parametrize(
    ("option", "name", "words"),
    [
        ("--table", "t.xls", r"--table .*t\.xls: its name must end in \.md, \.csv or \.tex"),
        ("--figure", "t.tex", r"--figure .*t\.tex: its name must end in \.pdf, \.svg or \.png"),
        ("--bars", "mine.pdf", r"--bars .*mine\.pdf: the file is there already"),
    ],
)
def test_other_files_are_refused_before_anything_is_written(
    runs: Path, tmp_path: Path, option: str, name: str, words: str
) -> None:
    (tmp_path / "mine.pdf").write_text("mine")
    with pytest.raises(QuiverError, match=words):
        call("report", runs, "--out", tmp_path / "r.html", option, tmp_path / name)
    assert not (tmp_path / "r.html").exists()


def test_bars_begin_at_zero_and_show_seeds(groups: list[Group]) -> None:
    figure = plot_bars(groups)
    local, mixed = figure.axes
    assert [bar.get_height() for bar in local.patches] == pytest.approx([0.7, 0.7])
    assert [bar.get_height() for bar in mixed.patches] == pytest.approx([0.6, 0.6])
    assert local.get_ylim()[0] == 0
    (error, *_) = [c for c in local.containers if hasattr(c, "has_yerr")]
    ((low, high),) = [segment[:, 1] for segment in error.lines[2][0].get_segments()]
    assert (low, high) == pytest.approx((0.7 - 0.02**0.5, 0.7 + 0.02**0.5))


def test_a_method_looks_the_same_in_every_case(groups: list[Group]) -> None:
    other = [replace(g, case="b", case_position=1, label=f"{g.name} (b)",
                     style=groups[0].style) for g in groups]  # fmt: skip
    alike = name_alike([*groups, *other])
    assert [g.label for g in alike] == ["Local", "DFedPGP"] * 2
    assert alike[1].style == alike[3].style == groups[1].style
    figure = plot_curves({"a": alike[:2], "b": alike[2:]}, ["local"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "a: stage local",
        "b: stage local",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["Local", "DFedPGP"]


def test_a_comparison_writes_what_the_command_writes(tmp_path: Path) -> None:
    tree = {"data": {"clients": 3}, "run": {"rounds": 1}}
    both = qv.compare(tree, ["local", "fedavg"], folder=tmp_path / "runs", seeds="0-1")
    assert list(both.runs) == ["local-seed0", "local-seed1", "fedavg-seed0", "fedavg-seed1"]
    table = both.table(tmp_path / "ours.tex", tmp_path / "ours.csv")
    groups = group_runs(find_runs([tmp_path / "runs"]))
    write_results(groups, ResultFiles([tmp_path / "theirs.tex", tmp_path / "theirs.csv"]))
    for ending in ("tex", "csv"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (
            tmp_path / f"theirs.{ending}"
        ).read_bytes()
    assert [row[0].text for row in table.rows] == ["Local", "FedAvg"]
    assert table.rows[1][1].value == pytest.approx(both.frame["local_mean"][1])
    figure = both.plot(tmp_path / "c.svg", stage="mixed")
    assert len(figure.axes) == 1
    assert (tmp_path / "c.svg").exists()
    for mistake, words in (
        (lambda: both.plot(kind="pie"), "kind = 'pie'"),  # type: ignore[arg-type]
        (lambda: both.plot(metric="f2"), "no metric 'f2'"),
        (lambda: both.table("t.doc"), r"table: t\.doc: its name must end in"),
        (lambda: both.plot(against="hours"), "against = 'hours'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(QuiverError, match=words):
            mistake()


@pytest.mark.parametrize(
    ("given", "seeds"),
    [
        ("0-4", [0, 1, 2, 3, 4]),
        ("5", [0, 1, 2, 3, 4]),
        (2, [0, 1]),
        (np.int64(2), [0, 1]),
        ("3-3", [3]),
        ("7,", [7]),
        ("0, 2-3,2", [0, 2, 3]),
        ([4, 4, 1], [4, 1]),
        (range(2), [0, 1]),
    ],
)
def test_seeds_are_ranges_lists_or_a_count(given: object, seeds: list[int]) -> None:
    assert check_seeds(given) == seeds


@pytest.mark.parametrize("given", ["", "a", "1-", "-1", "4-2", 0, "0", True, 1.5, [1.5], -3, None])
def test_what_is_no_list_of_seeds_is_refused(given: object) -> None:
    with pytest.raises(QuiverError, match="seeds = "):
        check_seeds(given)


def test_the_title_names_the_file_of_the_data(groups: list[Group]) -> None:
    data = {"name": "table", "options": {"path": "some/where/houses.csv"}}
    for group in groups:
        for run in group.runs:
            run.config["data"].update(data)
    assert make_title(groups).endswith(" on houses.csv")
