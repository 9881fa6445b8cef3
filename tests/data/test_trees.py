"""Several inputs, several targets and padded sequences: from files, by configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import quiverfl as qv

MODEL = """
import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self, shapes, outputs):
        super().__init__()
        self.shapes, self.outputs = shapes, outputs
        self.words = nn.Embedding(20, 6)
        self.head = nn.Linear(6, outputs if isinstance(outputs, int) else 4)

    def forward(self, input_ids, attention_mask):
        kept = attention_mask.unsqueeze(-1).to(self.words.weight.dtype)
        hidden = (self.words(input_ids) * kept).sum(1) / kept.sum(1).clamp(min=1)
        return self.head(hidden)


class Whole(Reader):
    def forward(self, both):
        return super().forward(both["input_ids"], both["attention_mask"])


class Two(nn.Module):
    def __init__(self, shapes, outputs):
        super().__init__()
        self.body = nn.Linear(shapes["a"][0] + shapes["b"][0], 8)
        self.head = nn.Linear(8, outputs["kind"] + outputs["size"])

    def forward(self, a, b):
        return self.head(torch.tanh(self.body(torch.cat([a, b], dim=1))))


def both(outputs, targets):
    kind = nn.functional.cross_entropy(outputs[:, :3], targets["kind"], reduction="none")
    return kind + (outputs[:, 3] - targets["size"]) ** 2


def right(outputs, targets):
    return (outputs[:, :3].argmax(dim=1) == targets["kind"]).float()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tree_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def sentences(count: int = 40) -> tuple[list[list[int]], list[int], list[str]]:
    random = np.random.default_rng(0)
    rows = [random.integers(1, 20, random.integers(1, 6)).tolist() for _ in range(count)]
    return rows, [sum(row) % 3 for row in rows], [f"writer {i % 4}" for i in range(count)]


def text(path: Path) -> Path:
    rows, labels, owners = sentences()
    table = pd.DataFrame({"tokens": rows, "label": labels, "writer": owners})
    table.to_parquet(path / "text.parquet")
    return path / "text.parquet"


def experiment(here: Path, data: dict[str, Any], **sections: Any) -> qv.Experiment:
    return qv.Experiment.of(
        {
            "data": {"partition": "natural", **data},
            "training": {"batch_size": 4},
            "run": {"rounds": 2, "threads": 1},
            **sections,
        }
    )


def test_ragged_sequences_are_padded_and_masked(here: Path) -> None:
    options = {"path": text(here), "owner": "writer", "pad": 0}
    features = {"input_ids": "tokens"}
    dataset = qv.load_dataset("table", features=features, **options)
    rows = sentences()[0]
    longest = max(len(row) for row in rows)
    assert list(dataset.train_x) == ["input_ids", "attention_mask"]
    assert dataset.input_shape == {"input_ids": (longest,), "attention_mask": (longest,)}
    ids, mask = dataset.train_x["input_ids"], dataset.train_x["attention_mask"]
    assert ids.dtype == mask.dtype == np.int64
    assert (ids[mask == 0] == 0).all()
    found = sorted([int(i) for i in row[: m.sum()]] for row, m in zip(ids, mask, strict=True))
    test = dataset.test_x
    found += [
        [int(i) for i in row[: m.sum()]]
        for row, m in zip(test["input_ids"], test["attention_mask"], strict=True)
    ]
    assert sorted(found) == sorted(rows)
    assert dataset.mean == {}
    cut = qv.load_dataset("table", features=features, length=2, **options)
    assert cut.input_shape["input_ids"] == (2,)


@pytest.mark.parametrize("model", ["Reader", "Whole"])
@pytest.mark.parametrize("mapped", [False, True])
def test_padded_sequences_by_configuration(here: Path, model: str, mapped: bool) -> None:
    options = {"path": str(text(here)), "features": {"input_ids": "tokens"}, "pad": 0}
    made = experiment(
        here,
        {"name": "table", "mapped": mapped, "options": {**options, "owner": "writer"}},
        model={"name": f"tree_models:{model}"},
        task={"inputs": "tree" if model == "Whole" else "arguments"},
    )
    run = made.run(here / "run")
    assert made.data.names == ("writer 0", "writer 1", "writer 2", "writer 3")
    assert np.isfinite(run.history["loss"]).all()
    alone = experiment(
        here,
        {"name": "table", "options": {**options, "owner": "writer"}},
        model={"name": "tree_models:Reader"},
        run={"rounds": 2, "threads": 1, "executor": "sequential"},
    ).run()
    np.testing.assert_allclose(run.history["loss"], alone.history["loss"], atol=1e-5)
    saved = qv.load_run(here / "run")
    x, _ = made.data.test.of_client(1)
    x = {"both": x} if model == "Whole" else x
    assert torch.equal(saved.personal(1)(**x), run.personal(1)(**x))


def npz(here: Path) -> Path:
    random = np.random.default_rng(0)
    np.savez(
        here / "two.npz",
        a=random.normal(5, 2, (60, 3)),
        b=random.normal(size=(60, 2)),
        kind=np.arange(60) % 3,
        size=random.normal(size=60),
        owner=np.arange(60) % 3,
    )
    return here / "two.npz"


def test_several_inputs_and_targets_by_configuration(here: Path) -> None:
    options = {"path": str(npz(here)), "features": ["a", "b"], "label": ["kind", "size"]}
    runs = []
    for mapped, executor in ((False, "vectorized"), (True, "sequential")):
        made = experiment(
            here,
            {"name": "npz", "options": options, "mapped": mapped},
            model={"name": "tree_models:Two"},
            task={"loss": "tree_models:both", "metrics": ["tree_models:right"]},
            run={"rounds": 4, "threads": 1, "executor": executor},
        )
        dataset = made.dataset
        assert dataset.outputs == {"kind": 3, "size": 1}
        assert dataset.train_target["kind"].dtype == np.int64
        assert dataset.train_target["size"].dtype == np.float32
        assert set(dataset.mean) == {"a", "b"}  # each is standardised
        x, _ = made.data.train.of_client(0)
        ready = made.data.prepare(x)  # type: ignore[misc]
        assert abs(float(ready["a"].mean())) < 0.5 < float(x["a"].mean())
        runs.append(made.run())
        losses = runs[-1].history.query("stage == 'local'").groupby("round")["loss"].mean()
        assert losses.iloc[-1] < losses.iloc[0]
        with torch.no_grad():  # standardises both by itself
            said = runs[-1].personal(0)(**x)
            assert torch.equal(said, runs[-1].personal(0)(x))
        assert said.shape == (len(x["a"]), 4)
    ours, theirs = (run.history["loss"].to_numpy() for run in runs)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_built_in_model_refuses_several_inputs(here: Path) -> None:
    options = {"path": str(npz(here)), "features": ["a", "b"], "label": "kind"}
    with pytest.raises(qv.QuiverError, match=r"'mlp' cannot be made for several inputs \(a, b\)"):
        experiment(here, {"name": "npz", "options": options}).run()


def test_the_digest_of_trees_depends_on_every_part_and_name(here: Path) -> None:
    def digest(**options: Any) -> str:
        return qv.load_dataset("npz", path=npz(here), label="kind", **options).digest

    found = [
        digest(features=["a", "b"]),
        digest(features=["b", "a"]),
        digest(features={"c": "a", "b": "b"}),
        digest(features="a"),
        digest(features=["a"]),
    ]
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": ["a", "c"]}, "no array 'c'"),
        ({"features": ["a", "kind"], "inputs": {"kind": "words"}}, r"options\.inputs\.kind = 'wor"),
        ({"features": ["a", "b"], "label": ["kind"], "targets": {"kind": "labels"}}, "numbers"),
        ({"features": ["a", "b"], "label": {"s": "size"}, "targets": "ids"}, "'s': targets are"),
    ],
)
def test_what_does_not_fit_is_named(here: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.load_dataset("npz", path=npz(here), **{"label": "kind", **options})


def test_lists_that_do_not_fit_together_are_named(here: Path) -> None:
    table = pd.DataFrame({"a": [[1, 2], [3]], "b": [[1, 2], [3, 4]], "label": [0, 1]})
    table.to_parquet(here / "t.parquet")
    with pytest.raises(qv.QuiverError, match=r"row 1: 2 values in column 'b' and 1 in 'a'"):
        qv.load_dataset("table", path=here / "t.parquet", pad=0)
    with pytest.raises(qv.QuiverError, match=r"options\.length .* set pad"):
        qv.load_dataset("table", path=here / "t.parquet", length=3)
    with pytest.raises(qv.QuiverError, match=r"options\.length = 0"):
        qv.load_dataset("table", path=here / "t.parquet", pad=0, length=0)


def test_next_tokens_are_padded_with_what_counts_for_nothing(here: Path) -> None:
    table = pd.DataFrame({"ids": [[1, 2], [3]] * 5, "next": [[2, 4], [5]] * 5})
    table.to_parquet(here / "t.parquet")
    dataset = qv.load_dataset(
        "table", path=here / "t.parquet", features="ids", label="next", targets="ids", pad=0
    )
    assert {tuple(row) for row in dataset.train_target.tolist()} == {(2, 4), (5, -100)}
    assert dataset.outputs == 6


def test_the_export_of_a_model_of_several_inputs_says_so(here: Path) -> None:
    from typer.testing import CliRunner

    from quiverfl.cli.main import app

    options = {"path": str(npz(here)), "features": ["a", "b"], "label": ["kind", "size"]}
    experiment(
        here,
        {"name": "npz", "options": options},
        model={"name": "tree_models:Two"},
        task={"loss": "tree_models:both", "metrics": ["tree_models:right"]},
    ).run(here / "run")
    result = CliRunner().invoke(app, ["export", str(here / "run"), "--out", "one.safetensors"])
    assert result.exit_code == 0, result.output
    told = json.loads((here / "one.json").read_text())
    assert told["input_shape"] == {"a": [3], "b": [2]}
    assert set(told["mean"]) == {"a", "b"}
