"""`quiver export` needs the run folder alone, and what it writes loads strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import quiverfl as qv
from quiverfl.data.dataset import Dataset, describe_dataset, make_stand_in
from quiverfl.errors import QuiverError
from quiverfl.models import make_model
from quiverfl.runs.config import parse_config
from quiverfl.runs.experiment import run_in_folder
from quiverfl.runs.export import export_client
from quiverfl.runs.folder import RunFolder
from quiverfl.seeds import stream


def write_houses(path: Path) -> None:
    rng = stream(0, "houses")
    lines = ["size,kind,age,who,label"]
    for row in range(60):
        size, age = rng.normal(size=2)
        kind = ("flat", "villa")[row % 2]
        lines.append(f"{size:.3f},{kind},{age:.3f},o{row % 3},{'dear' if size > 0 else 'cheap'}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_houses(tmp_path / "houses.csv")
    options = {"path": str(tmp_path / "houses.csv"), "label": "label", "owner": "who"}
    tree: dict[str, Any] = {
        "data": {
            "name": "table",
            "partition": "natural",
            "options": {**options, "categories": "one-hot"},
        },
        "model": {"name": "mlp", "hidden": [5]},
        "run": {"rounds": 2, "threads": 1},
    }
    run_in_folder(parse_config(tree), tmp_path / "run")
    return tmp_path / "run"


def test_a_model_comes_out_of_the_folder_without_its_data(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = qv.load_run(run).personal(1)
    (tmp_path / "houses.csv").unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    said = list(export_client(RunFolder(run), 1, "mixed", Path("m.safetensors"), ["program"]))
    assert any("the columns size, kind=flat, kind=villa, age, in this order" in s for s in said)
    card = json.loads(Path("m.json").read_text())
    assert card["columns"] == ["size", "kind=flat", "kind=villa", "age"]
    assert card["classes"] == ["cheap", "dear"]
    assert card["of"] == {"client": 1, "stage": "mixed", "rounds": 2, "name": "o1"}
    model = make_model("mlp", (4,), 2, hidden=[5])
    loaded = model.load_state_dict(load_file("m.safetensors"), strict=True)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    x = torch.randn(7, 4)
    scaled = (x - torch.tensor(card["mean"])) / torch.tensor(card["std"])
    assert torch.allclose(model(scaled), original(x), atol=1e-6)
    program = torch.export.load("m.pt2").module()
    assert torch.equal(program(x), original(x))


def test_a_folder_that_does_not_describe_its_data_asks_for_it(run: Path, tmp_path: Path) -> None:
    written = json.loads((run / "config.json").read_text())
    assert written.pop("dataset")["columns"] == ["size", "kind=flat", "kind=villa", "age"]
    (run / "config.json").write_text(json.dumps(written))
    list(export_client(RunFolder(run), 0, "mixed", tmp_path / "m.safetensors"))
    (tmp_path / "houses.csv").unlink()
    with pytest.raises(QuiverError, match=r"houses\.csv"):
        list(export_client(RunFolder(run), 0, "mixed", tmp_path / "m.safetensors"))


def test_frozen_parts_are_written_too(tmp_path: Path) -> None:
    """LoRA trains a few matrices; strict loading needs the others as well."""
    (tmp_path / "frozen_base.py").write_text(
        "import torch\n"
        "def model(shape, outputs):\n"
        "    sides = [(*shape, 3), (3, 4), (4, outputs)]\n"
        "    made = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in sides))\n"
        "    made[0].requires_grad_(False)\n"
        "    return made\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        options = {"train": 40, "test": 20, "shape": [3], "classes": 2}
        data = {"name": "synthetic", "clients": 2, "partition": "iid", "options": options}
        model = {"name": "frozen_base:model", "personal": ["2"]}
        tree = {"data": data, "model": model, "method": {"name": "local"}, "run": {"rounds": 1}}
        run_in_folder(parse_config(tree), tmp_path / "run")
        list(export_client(RunFolder(tmp_path / "run"), 0, "mixed", tmp_path / "m.safetensors"))
    names = set(load_file(tmp_path / "m.safetensors"))
    assert names == {f"{layer}.{part}" for layer in range(3) for part in ("weight", "bias")}


def test_a_description_holds_no_example_and_makes_the_same_form() -> None:
    x = {
        "picture": np.full((4, 3, 2, 2), 77, dtype=np.uint8),
        "words": np.arange(8, dtype=np.int64).reshape(4, 2),
    }
    labels = np.array([0, 1, 2, 1])
    found = Dataset(
        "pairs", x, labels, x, labels, 3, mean={"picture": (0.5,) * 3}, std={"picture": (2.0,) * 3}
    )
    described = json.loads(json.dumps(describe_dataset(found)))
    assert described["inputs"]["words"] == {"shape": [2], "dtype": "int64", "range": [0, 7]}
    again = make_stand_in(described)
    assert again.input_shape == found.input_shape
    assert again.outputs == found.outputs == 3
    assert (again.mean, again.std, again.class_names) == (found.mean, found.std, found.class_names)
    assert {k: v.dtype for k, v in again.train_x.items()} == {k: v.dtype for k, v in x.items()}
