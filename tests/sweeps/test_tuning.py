"""The best of a method's tries, by what was set aside from its training data."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.paper.reproduce.catalogue import configs_folder
from quiverfl.runs.config import parse_config
from quiverfl.sweeps.plan import Cell, Choice, SweepFolder, load_sweep
from quiverfl.sweeps.tune import Try, TunedMethod, format_overrides, select_tuned
from run_folders import Recipe, write_run


def cell(lr: float, decay: float = 0.9, case: str = "a", seed: int = 0, **data: object) -> Cell:
    tree = {
        "data": {"validation": 0.2, **data, "samples_per_client": len(case)},
        "training": {"lr": lr, "lr_decay": decay},
        "run": {"seed": seed},
    }
    return Cell(parse_config(tree), case, (("training.lr", lr), ("training.lr_decay", decay)))


def finished(places: SweepFolder, one: Cell, level: float) -> Cell:
    """A run of the cell that ends at about this accuracy at stage local, 0.3 lower at mixed."""
    write_run(places.run(one), Recipe(level=level, drop=0.3, seed=one.config.run.seed))
    return one


def test_the_mean_over_cases_decides(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    cells = [
        finished(places, cell(0.1, case="a"), 0.50),
        finished(places, cell(0.1, case="bb"), 0.50),
        finished(places, cell(0.2, case="a"), 0.90),
        finished(places, cell(0.2, case="bb"), 0.30),
        finished(places, cell(0.3, case="a"), 0.20),
        finished(places, cell(0.3, case="bb"), 0.20),
    ]
    (found,) = select_tuned(cells, places, "local", "last")
    assert [dict(one.point)["training.lr"] for one in found.tries] == [0.2, 0.1, 0.3]
    assert set(found.best.scores) == {"a", "bb"}
    assert found.at_the_edge() == []
    assert tomllib.loads(format_overrides([found])) == {
        "overrides": {"dfedpgp": {"training": {"lr": 0.2, "lr_decay": 0.9}}}
    }


def test_a_try_that_diverged_with_any_seed_is_never_chosen(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    good = finished(places, cell(0.1), 0.4)
    half = [finished(places, cell(0.2), 0.9), cell(0.2, seed=1)]
    (found,) = select_tuned([good, *half], places, "local", "last")
    assert [dict(one.point)["training.lr"] for one in found.tries] == [0.1, 0.2]
    assert found.tries[1].mean != found.tries[1].mean


def test_without_a_score_nothing_is_recommended(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    lost = cell(0.2)
    write_run(places.run(lost), Recipe(), finished=False)
    text = {"finished": False, "diverged": {"round": 1, "client": 0}, "error": "…"}
    (places.run(lost) / "summary.json").write_text(json.dumps(text))
    (found,) = select_tuned([cell(0.1), lost], places, "local", "last")
    assert found.best is None
    assert found.at_the_edge() == []
    assert [one.diverged for one in found.tries] == [False, True]
    assert format_overrides([found]) == ""


CANNOT_RUN = """
[base.data]
validation = 0.2
clients = 2
[base.model]
name = "failing_nets:Net"
[grid]
training.lr = [0.1, 0.2]
"""
FAILING = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(64, classes)

    def forward(self, x):
        if len(x) > 8:
            raise RuntimeError("more than eight at a time")
        return self.head(self.body(x).flatten(1))
"""


def test_tries_with_a_mistake_are_refused_before_the_first(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(CANNOT_RUN.replace("failing_nets:Net", "nowhere:net"))
    words = ["tune", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs"), "-q"]
    result = CliRunner().invoke(app, words)
    assert "2 of 2 cells cannot run" in str(result.exception)
    assert "no module 'nowhere'" in str(result.exception)
    assert not (tmp_path / "runs").exists()


def test_tries_that_cannot_run_are_told_from_those_that_diverge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This model takes the few examples that are tried before, and fails on a batch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing_nets.py").write_text(FAILING)
    (tmp_path / "plan.toml").write_text(CANNOT_RUN)
    words = ["tune", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs"), "-q"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "none has a score" in result.output
    assert "[overrides" not in result.output
    assert "more than eight at a time" in result.output
    rows = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [one["mean"] for one in rows[0]["tries"]] == [None, None]


def test_what_is_set_against_a_case_makes_no_further_tries(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        """
        base.data.validation = 0.2
        grid.training.lr = [0.1, 0.2, 0.3]
        [[case]]
        name = "a"
        data = { alpha = 0.3 }
        [[case]]
        name = "b"
        data = { alpha = 0.6 }
        """
    )
    for setting, words in (("data.alpha=0.3", "alpha 0.3"), ("data.alpha=", "alpha default")):
        plan = load_sweep(tmp_path / "plan.toml", Choice(values=[setting]))
        (found,) = select_tuned(plan.cells, SweepFolder(tmp_path), "local", "last")
        assert len(found.tries) == 3
        assert f"b, lr 0.1, {words}" in {one.label for one in plan.cells}


def test_the_overrides_of_a_method_of_ones_own_can_be_read(tmp_path: Path) -> None:
    own = TunedMethod("my.methods:Own", (Try((("training.lr", 0.1),), {"": 0.5}),))
    assert tomllib.loads(format_overrides([own])) == {
        "overrides": {"my.methods:Own": {"training": {"lr": 0.1}}}
    }


def test_a_choice_at_the_edge_of_what_was_tried_is_told(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    cells = [finished(places, cell(lr), lr) for lr in (0.2, 0.5, 0.8)]
    (found,) = select_tuned(cells, places, "local", "last")
    assert found.at_the_edge() == ["training.lr"]


def test_test_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuiverError, match="choosing by the test data"):
        select_tuned([cell(0.1, validation=None)], SweepFolder(tmp_path), "local", "last")


def test_tries_on_unlike_data_are_refused(tmp_path: Path) -> None:
    """The best of several alphas would be the easiest of several problems."""
    tries = [replace(cell(0.1), point=(("data.alpha", alpha),)) for alpha in (0.1, 1.0)]
    with pytest.raises(QuiverError, match=r"data\.alpha has 2 values in the grid.*\[\[case\]\]"):
        select_tuned(tries, SweepFolder(tmp_path), "local", "last")
    select_tuned(tries[:1], SweepFolder(tmp_path), "local", "last")  # one value is one problem


def test_the_small_scale_is_tuned_fairly() -> None:
    """As many tries for every method, on a seed that is not reported, never on test data."""
    tuning = load_sweep(configs_folder() / "sweeps" / "tuning.toml")
    reported = load_sweep(configs_folder() / "sweeps" / "table1.toml", scale="small")
    tries: dict[str, set[str]] = {}
    for one in tuning.cells:
        key = json.dumps([one.case, one.point])
        tries.setdefault(one.config.method.name, set()).add(key)
    assert len(tries) == 11
    assert {len(points) for points in tries.values()} == {8}
    assert all(one.config.data.validation for one in tuning.cells)
    seeds = {one.config.run.seed for one in tuning.cells}
    assert not seeds & {one.config.run.seed for one in reported.cells}
