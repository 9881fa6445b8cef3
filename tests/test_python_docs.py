"""docs/python.md is what happens: its blocks run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quiverfl as qv

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 10
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    run, again = names["run"], names["again"]
    assert isinstance(run, qv.Run)
    assert isinstance(again, qv.Run)
    assert run.history.equals(again.history)
    assert {"accuracy", "confidence", "loss"} < set(run.history)
    assert b"DFedPGP" in (tmp_path / "two.html").read_bytes()
    both = names["both"]
    assert isinstance(both, qv.Comparison)
    assert list(both.table["method"]) == ["local", "dfedpgp"]


def test_the_page_names_every_public_function_of_this_layer() -> None:
    text = PAGE.read_text()
    words = "load_dataset partition MODELS make_model Task FederatedData simulate Callback load_run"
    words += " EarlyStopping TensorBoard WandB MLflow Experiment compare report CallbackFailed"
    assert [word for word in words.split() if word not in text] == []
