"""[task] and data.options.targets: regression, labels and language models by configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError
from quiverfl.results.groups import common_metric, group_runs
from quiverfl.results.run_files import find_runs
from quiverfl.results.tables import comparison_table
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import make_task, run_in_folder

LANGUAGE = """
from torch import nn

def make(input_shape, classes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Embedding(classes, 6), nn.Linear(6, classes)
        def forward(self, ids):
            return self.head(self.body(ids))
    return Net()

def short(outputs, targets):
    return (outputs["x"] if isinstance(outputs, dict) else outputs).flatten(1).mean(dim=1)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 3))
    table = pd.DataFrame(x, columns=["a", "b", "c"])
    table["price"], table["rent"] = x @ [1.0, -2.0, 0.5], x @ [0.0, 1.0, 1.0]
    table["shop"] = [f"s{place % 3}" for place in range(120)]
    table.to_csv(tmp_path / "prices.csv", index=False)
    np.savez(tmp_path / "tags.npz", x=x.astype(np.float32), y=x > 0)
    ids = random.integers(0, 7, (60, 5))
    np.savez(tmp_path / "text.npz", x=ids[:, :-1], y=ids[:, 1:], owner=np.arange(60) % 3)
    (tmp_path / "language_nets.py").write_text(LANGUAGE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(kind: str) -> dict[str, Any]:
    regression = {
        "name": "table",
        "partition": "natural",
        "options": {"path": "prices.csv", "label": "price", "owner": "shop", "targets": "numbers"},
    }
    regression["options"]["exclude"] = "rent"  # type: ignore[index]
    data: dict[str, Any] = {
        "regression": regression,
        "labels": {
            "name": "npz", "clients": 3, "partition": "iid",
            "options": {"path": "tags.npz", "targets": "numbers"},
        },
        "language": {
            "name": "npz", "partition": "natural",
            "options": {"path": "text.npz", "targets": "ids"},
        },
    }  # fmt: skip
    task: dict[str, Any] = {
        "regression": {"loss": "mse"},
        "labels": {"loss": "bce", "metrics": ["f1", "auroc"]},
        "language": {"loss": "next_token", "metrics": "perplexity"},
    }
    model = {"name": "language_nets:make"} if kind == "language" else {"hidden": [4]}
    return {
        "data": {"root": ".", **data[kind]},
        "task": task[kind],
        "model": model,
        "topology": {"neighbors": 1, "sampled": 2},
        "run": {"rounds": 3, "threads": 1},
    }


@pytest.mark.parametrize(
    ("kind", "metric", "outputs"),
    [("regression", "mae", 1), ("labels", "f1", 3), ("language", "perplexity", 7)],
)
def test_a_run_folder_and_its_table_are_judged_by_the_tasks_metric(
    here: Path, kind: str, metric: str, outputs: int
) -> None:
    config = parse_config(tree(kind))
    summary = run_in_folder(config, here / "run")
    assert summary["metric"] == metric
    dataset = load_dataset(config.data.name, ".", **config.data.options)
    assert dataset.outputs == outputs
    (found,) = find_runs([here / "run"])
    groups = group_runs([found])
    assert common_metric(groups) == metric
    assert list(found.history.columns)[3] == metric
    best = summary["stages"]["mixed"]["best"]["mean"]
    means = found.history.query("stage == 'mixed'").groupby("round")[metric].mean()
    assert best == pytest.approx(means.max() if metric == "f1" else means.min())
    assert metric in comparison_table(groups).title


def test_a_report_of_a_regression(here: Path) -> None:
    run_in_folder(parse_config(tree("regression")), here / "runs" / "one")
    result = CliRunner().invoke(app, ["report", "runs", "--out", "page.html"])
    assert result.exit_code == 0, result.output
    assert "Test mae" in result.output
    assert "accuracy" not in (here / "page.html").read_text().lower().replace("rounds to", "")


def test_several_columns_to_learn(here: Path) -> None:
    options = {"path": "prices.csv", "label": ["price", "rent"], "owner": "shop"}
    found = load_dataset("table", ".", **options, targets="numbers")
    assert found.train_target is not None
    assert found.train_target.shape[1:] == (2,)
    assert found.outputs == 2
    assert found.input_shape == (3,)
    again = load_dataset("table", ".", **options, targets="numbers")  # from the cache
    assert again.digest == found.digest
    assert np.array_equal(again.train_target, found.train_target)


def test_a_default_task_leaves_the_identity_as_it_was(here: Path) -> None:
    assert (
        parse_config({}).identity() == parse_config({"task": {"loss": "cross_entropy"}}).identity()
    )
    assert parse_config({}).identity() != parse_config({"task": {"metrics": ["f1"]}}).identity()


def test_ones_own_loss_is_part_of_what_a_run_is_made_from(here: Path) -> None:
    config = parse_config(
        tree("regression") | {"task": {"loss": "language_nets:short", "metrics": ["mae"]}}
    )
    summary = run_in_folder(config, here / "run")
    assert summary["metric"] == "mae"
    written = json.loads((here / "run" / "config.json").read_text())["inputs"]
    assert "code of language_nets:short" in written
    dataset = load_dataset(config.data.name, ".", **config.data.options)
    assert isinstance(make_task(config, dataset).skeleton, nn.Module)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"task": {"loss": "mes"}}, r"\[task\] unknown loss 'mes'; did you mean 'mse'"),
        ({"task": {"metrics": ["acuracy"]}}, r"unknown metric 'acuracy'; did you mean 'accuracy'"),
        ({"task": {"los": "mse"}}, "unknown key task.los; did you mean 'loss'"),
        ({"task": {"loss": "cross_entropy"}}, "for regression give loss='mse'"),
    ],
)
def test_slips_are_named(here: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(QuiverError, match=words):
        run_in_folder(parse_config(tree("regression") | change), here / "run")
    assert not (here / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": "number"}, "targets = 'number': did you mean 'numbers'"),
        ({}, r"labels are float64; .*data.options.targets = 'numbers'"),
        ({"targets": "ids"}, "targets are float64; .*needs whole numbers"),
    ],
)
def test_targets_must_be_said_and_be_right(here: Path, options: Any, words: str) -> None:
    with pytest.raises(QuiverError, match=words):
        load_dataset("table", ".", path="prices.csv", label="price", features=["a"], **options)
