"""Token ids: integer inputs reach the model as the integers they are, wherever they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from quiverfl.data.dataset import Dataset
from quiverfl.data.federated import make_federated
from quiverfl.data.partition import make_partition
from quiverfl.data.sources import load_dataset
from quiverfl.errors import QuiverError
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import run_in_folder

WORDS, LENGTH, COUNT = 50, 6, 60


def ids(dtype: Any = np.int64) -> tuple[np.ndarray, np.ndarray]:
    """Sequences whose class is the parity of their first word."""
    x = np.random.default_rng(0).integers(0, WORDS, (COUNT, LENGTH)).astype(dtype)
    return x, (x[:, 0] % 2).astype(np.int64)


def own(name: str, path: Path, **options: Any) -> Dataset:
    return load_dataset(name, path.parent / "root", path=path, test_share=0.0, **options)


def frame(x: np.ndarray, y: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame({f"w{i}": x[:, i] for i in range(x.shape[1])} | {"label": y})


@pytest.mark.parametrize(
    ("given", "kept"),
    [(np.int64, np.int64), (np.int32, np.int32), (np.int16, np.int64), (np.uint16, np.int64)],
)
def test_integers_of_an_npz_are_ids(given: Any, kept: Any, tmp_path: Path) -> None:
    x, y = ids(given)
    np.savez(tmp_path / "tokens.npz", x=x, y=y)
    data = own("npz", tmp_path / "tokens.npz")
    assert data.is_ids
    assert data.train_x.dtype == kept  # int32 where given: half the memory, and embeddings take it
    assert np.array_equal(data.train_x, x)
    assert (data.mean, data.std) == ((), ())


def test_what_is_no_id_in_an_npz(tmp_path: Path) -> None:
    x, y = ids()
    path = tmp_path / "numbers.npz"
    for numbers in (x.astype(np.float64), x.astype(np.uint8), x > 20):
        np.savez(path, x=numbers, y=y)
        data = own("npz", path)
        assert not data.is_ids
        assert data.train_x.dtype == np.float32
        assert len(data.mean) == LENGTH
    np.savez(path, x=x, y=y)
    assert own("npz", path, inputs="numbers").train_x.dtype == np.float32
    np.savez(path, x=x.astype(np.uint8), y=y)
    assert own("npz", path, inputs="ids").train_x.dtype == np.int64


def test_ids_of_any_shape_keep_it(tmp_path: Path) -> None:
    """Four sides with three in the last look like an image with its channels last."""
    x = np.arange(4 * 5 * 6 * 3).reshape(4, 5, 6, 3)
    np.savez(tmp_path / "tokens.npz", x=x, y=np.arange(4))
    data = own("npz", tmp_path / "tokens.npz")
    assert np.array_equal(data.train_x, x)
    with pytest.raises(QuiverError, match="need images"):
        make_federated(data, make_partition(data, "iid", 2, 0), "crop_flip")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_integer_columns_are_numbers_unless_they_are_called_ids(
    suffix: str, tmp_path: Path
) -> None:
    """Ages and counts are whole numbers, too: a table has to say it."""
    x, y = ids()
    path = tmp_path / f"tokens.{suffix}"
    table = frame(x, y)
    table.to_parquet(path) if suffix == "parquet" else table.to_csv(path, index=False)
    assert own("table", path).train_x.dtype == np.float32
    data = own("table", path, inputs="ids")
    assert data.is_ids
    assert np.array_equal(data.train_x, x)


def test_lists_of_ids(tmp_path: Path) -> None:
    x, y = ids()
    path = tmp_path / "tokens.parquet"
    pd.DataFrame({"input_ids": list(x), "label": y}).to_parquet(path)
    data = own("table", path, inputs="ids")
    assert np.array_equal(data.train_x, x)


def test_ids_must_be_whole_numbers(tmp_path: Path) -> None:
    x, y = ids()
    frame(x, y).assign(w1=x[:, 1] / 2).to_parquet(tmp_path / "mixed.parquet")
    assert own("table", tmp_path / "mixed.parquet").train_x.dtype == np.float32
    with pytest.raises(QuiverError, match=r"mixed.parquet, column 'w1' holds float64.*'ids'"):
        own("table", tmp_path / "mixed.parquet", inputs="ids")
    with pytest.raises(QuiverError, match=r"data.options.inputs = 'id': did you mean 'ids'"):
        own("table", tmp_path / "mixed.parquet", inputs="id")


def test_ids_of_ones_own_code() -> None:
    x, y = ids()
    data = Dataset("mine", x, y, x, y, 2)
    assert data.class_names == ("0", "1")
    split = make_federated(data, make_partition(data, "iid", 3, 0)).train
    assert split.x.dtype == torch.int64
    with pytest.raises(QuiverError, match=r"mine.*ids are not standardised"):
        Dataset("mine", x, y, x, y, 2, mean=(0.0,), std=(1.0,))
    with pytest.raises(QuiverError, match="training inputs are int64, test inputs int32"):
        Dataset("mine", x, y, x.astype(np.int32), y, 2)
    with pytest.raises(QuiverError, match=r"inputs are int16.*int32 or int64 ids"):
        Dataset("mine", x.astype(np.int16), y, x, y, 2)


CODE = """
import numpy as np
import torch
from torch import nn
from quiverfl.data.dataset import Dataset

class Reader(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        assert not x.is_floating_point()
        return self.head(self.embedding(x)[..., 0, :])

def reader(input_shape, classes, words=50):
    return Reader(words)

def data():
    arrays = np.load("tokens.npz")
    x, y = arrays["x"], arrays["y"]
    return Dataset("mine", x[:40], y[:40], x[40:], y[40:], 2)
"""


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
@pytest.mark.parametrize("source", ["npz", "table", "code"])
def test_an_embedding_is_trained_by_a_configuration(
    source: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = ids()
    np.savez(tmp_path / "tokens.npz", x=x, y=y)
    frame(x, y).to_csv(tmp_path / "tokens.csv", index=False)
    module = f"reader_{source}_{executor}_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    data: dict[str, Any] = {
        "npz": {"name": "npz", "options": {"path": "tokens.npz"}},
        "table": {"name": "table", "options": {"path": "tokens.csv", "inputs": "ids"}},
        "code": {"name": f"{module}:data"},
    }[source]
    tree = {
        "data": {**data, "root": str(tmp_path / "root"), "clients": 3, "partition": "iid"},
        "model": {"name": f"{module}:reader", "words": WORDS},
        "topology": {"neighbors": 2},
        "training": {"lr": 1.0, "batch_size": "all"},
        "run": {"rounds": 30, "executor": executor, "threads": 1},
    }
    summary = run_in_folder(parse_config(json.loads(json.dumps(tree))), tmp_path / "run")
    assert summary["finished"]
    history = pd.read_parquet(tmp_path / "run" / "history.parquet")
    losses = history.groupby("round")["loss"].mean()
    assert losses.iloc[-1] < losses.iloc[0]
