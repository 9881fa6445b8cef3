"""Sweeps from Python: what the command does, and its results as tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import quiverfl as qv
from quiverfl.cli.main import app
from quiverfl.sweeps import display as overview

PLAN: dict[str, Any] = {
    "base": {
        "data": {"name": "synthetic", "clients": 4, "partition": "iid"},
        "model": {"hidden": [4]},
        "run": {"rounds": 2, "threads": 1},
    },
    "methods": ["local", "dfedpgp"],
    "grid": {"training": {"lr": [0.05, 0.1]}},
}
PLAN["base"]["data"]["options"] = {"train": 80, "test": 40, "shape": [3], "classes": 2}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, qv.SweepResult]:
    folder = tmp_path_factory.mktemp("sweep")
    return folder, qv.sweep(PLAN, folder)


def test_a_dry_run_says_what_there_is_and_runs_nothing(tmp_path: Path) -> None:
    found = qv.sweep(PLAN, tmp_path / "runs", dry_run=True, estimate=True)
    assert found.cells["state"].tolist() == ["new"] * 4
    assert found.cells["training.lr"].tolist() == [0.05, 0.1, 0.05, 0.1]
    assert (found.cells["seconds"] > 0).all()
    assert not (tmp_path / "runs" / "cells").exists()
    assert "4" in repr(found)
    with pytest.raises(qv.QuiverError, match="no cell has finished"):
        found.table()


def test_its_cells_are_those_of_the_command(done: tuple[Path, qv.SweepResult]) -> None:
    folder, found = done
    assert found.cells["state"].tolist() == ["finished"] * 4
    assert found.failures == {}
    assert len(found.runs) == 4
    run = found.runs[found.cells["cell"][2]]
    assert run.config["method"]["name"] == "dfedpgp"
    last = run.history.query("round == 1 and stage == 'mixed'")["accuracy"].mean()
    assert found.cells["accuracy/mixed"][2] == pytest.approx(last)
    (folder / "plan.toml").write_text(
        'base = "base.toml"\nmethods = ["local", "dfedpgp"]\n[grid]\ntraining.lr = [0.05, 0.1]'
    )
    pairs = [(f"{s}.{k}", v) for s, values in PLAN["base"].items() for k, v in values.items()]
    (folder / "base.toml").write_text("\n".join(f"{key} = {_toml(v)}" for key, v in pairs))
    command = ["sweep", str(folder / "plan.toml"), "--out", str(folder), "--dry-run", "--json"]
    result = CliRunner().invoke(app, [*command, "--no-estimate"])
    rows = json.loads(result.stdout)
    assert [row["cell"] for row in rows] == found.cells["cell"].tolist()
    assert [row["state"] for row in rows] == ["finished"] * 4


def _toml(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"


def test_called_again_it_resumes_and_compares(done: tuple[Path, qv.SweepResult]) -> None:
    folder, first = done
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")}
    again = qv.sweep(PLAN, folder, methods=["dfedpgp"], settings={"training.lr": 0.1})
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("summary.json")} == before
    assert set(again.cells["cell"]) <= set(first.cells["cell"])
    assert len(first.frame) == 4
    table = first.table(folder / "t.csv")
    assert [column.title for column in table.columns] == ["method", *["lr 0.05", "lr 0.1"] * 2]
    assert [row[0].text for row in table.rows] == ["Local", "DFedPGP"]
    run = first.runs[first.cells["cell"][3]]  # dfedpgp, the second rate
    last = run.history.query("round == 1 and stage == 'mixed'")["accuracy"].mean()
    assert table.rows[1][4].value == pytest.approx(last)
    assert (folder / "t.csv").read_text().startswith("method,stage local: lr 0.05")
    assert len(first.plot(kind="bars").axes) == 2
    assert first.report(folder / "page.html").exists()


def test_a_cell_that_fails_stops_no_other(tmp_path: Path) -> None:
    plan = {**PLAN, "methods": ["local"], "grid": {"training": {"lr": [0.1, 1e30]}}}
    found = qv.sweep(plan, tmp_path)
    assert sorted(found.cells["state"]) == ["diverged", "finished"]
    assert "not finite" in next(iter(found.failures.values()))


@pytest.mark.parametrize(
    ("plan", "options", "words"),
    [
        ({**PLAN, "grids": {}}, {}, "unknown key 'grids'"),
        (3, {}, "a sweep is a TOML file or a dictionary"),
        ("nowhere.toml", {}, "no such sweep file"),
        (PLAN, {"settings": {"run.seed": 1}}, "use --seeds"),
        (PLAN, {"cases": ["x"]}, "no case 'x'"),
        (PLAN, {"jobs": 0}, "at least 1"),
        ({**PLAN, "methods": ["dfedpqp"]}, {}, "did you mean 'dfedpgp'"),
    ],
)
def test_mistakes(plan: Any, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.sweep(plan, tmp_path, **options)


def test_progress_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """One output that is replaced; driven as a sweep drives it."""
    shown: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            shown.append(data["text/html"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(data["text/html"])
        return Handle()

    stand_in = SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=stand_in))
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    monkeypatch.setattr(overview._Notebook, "pause", 0.0)
    cells = qv.sweep(PLAN, "nowhere", dry_run=True).plan.cells[:1]
    watcher = overview._Notebook(overview.Console(), overview.Tally(cells, {}))
    watcher.on_cell_start(cells[0])
    watcher.on_cell_progress(cells[0], 1, {})
    watcher.on_cell_end(overview.Outcome(cells[0], "finished", 1.0))
    assert "0 of 1 cells" in shown[0]
    assert "round 1/2" in shown[1]
    assert 'value="1.000"' in shown[-1]
