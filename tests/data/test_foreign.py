"""Data sets of other libraries: Hugging Face's and torch's; owners make the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

import quiverfl as qv

datasets = pytest.importorskip("datasets", reason="pip install 'quiverfl[datasets]'")
OWNERS = ["ann", "bob", "cy"]


def table(count: int = 30) -> dict[str, Any]:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 5, count)
    return {
        "input_ids": [random.integers(1, 20, n).tolist() for n in lengths],
        "label": (np.arange(count) % 2).tolist(),
        "writer": [OWNERS[i % 3] for i in range(count)],
        "text": ["some words"] * count,
    }


def made(count: int = 30) -> Any:
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int32")),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "writer": datasets.Value("string"),
            "text": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_dict(table(count), features=features)


def test_in_memory_its_owner_column_makes_the_clients() -> None:
    found = qv.from_huggingface(made(), features="input_ids", owner="writer", pad=0)
    assert found.class_names == ("no", "yes")
    assert found.owner_names == ("ann", "bob", "cy")
    assert list(found.train_x) == ["input_ids", "attention_mask"]
    data = qv.partition(found, "natural")
    assert data.names == ("ann", "bob", "cy")
    x, y = data.train.of_client(1)
    rows = [(r, o) for r, o in zip(table()["input_ids"], table()["writer"], strict=True)]
    own = sorted(r for r, o in rows if o == "bob")
    both = [x, data.test.of_client(1)[0]]
    seen = sorted(
        ids[: int(mask.sum())].tolist()
        for part in both
        for ids, mask in zip(part["input_ids"], part["attention_mask"], strict=True)
    )
    assert seen == own
    assert set(y.tolist()) <= {0, 1}


def test_on_disk_by_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bag_model.py").write_text(
        "from torch import nn\n"
        "class Bag(nn.Module):\n"
        "    def __init__(self, shapes, classes):\n"
        "        super().__init__()\n"
        "        self.words = nn.Embedding(20, 4)\n"
        "        self.head = nn.Linear(4, classes)\n"
        "    def forward(self, input_ids, attention_mask):\n"
        "        kept = attention_mask.unsqueeze(-1).float()\n"
        "        return self.head((self.words(input_ids) * kept).mean(1))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    whole = datasets.DatasetDict({"train": made(30), "test": made(12)})
    whole.save_to_disk(str(tmp_path / "words"))
    experiment = qv.Experiment.of(
        {
            "data": {
                "name": "huggingface",
                "partition": "natural",
                "options": {
                    "path": "words",
                    "features": "input_ids",
                    "owner": "writer",
                    "pad": 0,
                },
            },
            "model": {"name": "bag_model:Bag"},
            "run": {"rounds": 1},
        }
    )
    assert experiment.data.names == tuple(OWNERS)
    assert experiment.data.train.sizes.tolist() == [10, 10, 10]
    assert experiment.data.test.sizes.tolist() == [4, 4, 4]
    assert np.isfinite(experiment.run().history["loss"]).all()


def test_images_and_owners_that_are_class_labels() -> None:
    from PIL import Image

    pictures = [Image.fromarray(np.full((4, 4, 3), 20 * i, np.uint8)) for i in range(8)]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.Value("int64"),
            "hand": datasets.ClassLabel(names=["left", "right"]),
        }
    )
    rows = {"image": pictures, "label": [0, 1] * 4, "hand": [1, 1, 0, 0] * 2}
    found = qv.from_huggingface(
        datasets.Dataset.from_dict(rows, features=features), owner="hand", test_share=0.5
    )
    assert found.train_x.shape == (4, 3, 4, 4)
    assert found.train_x.dtype == np.uint8
    assert found.owner_names == ("left", "right")


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (lambda: made().to_iterable_dataset(), {}, "a IterableDataset: give a datasets.Dataset"),
        (lambda: datasets.DatasetDict({"dev": made()}), {}, "no part 'train'; it has dev"),
        (lambda: [1, 2], {}, "a list: give"),
        (made, {"features": "input_ids"}, "does not have the shape of the first"),
        (made, {"label": "lable"}, "no column 'lable'; did you mean 'label'"),
        (made, {"pads": 0}, "no option 'pads'"),
        (made, {}, "column 'input_ids' holds lists and column 'writer' does not"),
    ],
)
def test_what_it_cannot_take_is_said(dataset: Any, options: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.from_huggingface(dataset(), **options)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(qv.QuiverError, match="not a readable folder of datasets' save_to_disk"):
        qv.load_dataset("huggingface", path=tmp_path, cache=tmp_path / "c")


class Notes(TorchDataset):  # type: ignore[type-arg]
    """Items as dictionaries, as many data sets have them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {
            "ids": torch.full((3,), i % 5),
            "weight": torch.tensor([i / 10, 1.0]),
            "label": i % 2,
            "who": OWNERS[i % 3],
        }


def test_torch_items_by_key_function_and_list() -> None:
    by_key = qv.from_torch(Notes(), owner="who")
    assert list(by_key.train_x) == ["ids", "weight"]
    assert by_key.train_x["ids"].dtype == np.int64
    assert set(by_key.mean) == {"weight"}
    assert qv.partition(by_key, "natural").names == tuple(OWNERS)
    pairs = TensorDataset(torch.randn(20, 3), torch.arange(20) % 2)
    by_rule = qv.from_torch(pairs, owner=lambda item: "even" if item[1] == 0 else "odd")
    assert by_rule.owner_names == ("even", "odd")
    by_list = qv.from_torch(pairs, pairs, owner=[0, 1] * 10, test_owner=[1, 1] * 10, name="mine")
    assert by_list.name == "mine"
    assert by_list.test_owner.tolist() == [1] * 20  # type: ignore[union-attr]
    assert np.array_equal(by_list.train_x, pairs.tensors[0].numpy())


def test_torch_items_are_trained_on() -> None:
    found = qv.from_torch(Notes(), owner="who")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.head = nn.Linear(6, 2)

        def forward(self, ids: torch.Tensor, weight: torch.Tensor) -> Any:
            return self.head(torch.cat([self.words(ids).mean(1), weight], dim=1))

    run = qv.simulate(
        qv.Task(Model),
        qv.partition(found, "natural"),
        method=qv.DFedPGP(),
        topology=qv.random_push(clients=3, neighbors=1, seed=0),
        training=qv.Training(lr=0.1, batch_size=4),
        rounds=1,
    )
    assert np.isfinite(run.history["loss"]).all()


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), 0)])


@pytest.mark.parametrize(
    ("items", "options", "words"),
    [
        (Stream(), {}, "has no length or no items by number"),
        ([], {}, "there are no items"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], {}, r"item 1: has shape \[3\]"),
        ([torch.zeros(2)], {}, "items are pairs"),
        ([(torch.zeros(2), 0)] * 4, {"owner": "who"}, "no dictionaries: give a function"),
        ([(torch.zeros(2), 0)] * 4, {"owner": [1]}, "1 owners for 4 items"),
        ([{"x": torch.zeros(2)}], {}, "no 'label'; it has x"),
        (TensorDataset(torch.zeros(4, 2), torch.rand(4)), {}, "targets = 'numbers'"),
    ],
)
def test_torch_items_that_cannot_be_taken(items: Any, options: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.from_torch(items, **options)
