"""Run folders from Python, and what is read back from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import quiverfl as qv
from quiverfl.runs.experiment import run_in_folder
from quiverfl.runs.folder import RunFolder
from small import PUSH, simulate

TREE = {
    "data": {"name": "digits", "clients": 4, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"lr": 0.1, "batch_size": 32},
    "run": {"rounds": 2, "threads": 1},
}


def same_model(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_an_experiment_saved_from_python_is_what_the_command_line_writes(tmp_path: Path) -> None:
    experiment = qv.Experiment.of(TREE)
    run_in_folder(experiment.config, tmp_path / "command")
    run = experiment.run()
    run.save(tmp_path / "python")
    experiment.run(tmp_path / "folder")
    wanted = {path.name for path in (tmp_path / "command").iterdir()}
    for name in ("python", "folder"):
        assert {path.name for path in (tmp_path / name).iterdir()} == wanted
        for file in ("config.json", "history.jsonl"):
            mine, theirs = (tmp_path / where / file for where in (name, "command"))
            assert mine.read_bytes() == theirs.read_bytes()
        saved = qv.load_run(tmp_path / name)
        assert saved.complete
        assert saved.history.equals(run.history)
        assert saved.config == run.config
        for stage in ("mixed", "local"):
            assert same_model(saved.personal(2, stage), run.personal(2, stage))


def test_a_run_without_a_configuration_is_kept_and_reported(tmp_path: Path) -> None:
    run = simulate(qv.DFedPGP(), PUSH(6))
    run.save(tmp_path / "a")
    saved = qv.load_run(tmp_path / "a")
    assert saved.history.equals(run.history)
    assert saved.summary["stages"] == run.summary["stages"]
    assert saved.config["model"] == {
        "name": "TinyModel",
        "personal": ["head"],
        "parameters": 53,
        "loss": "cross_entropy",
    }
    page = qv.report([saved, tmp_path / "a", run], tmp_path / "report.html")
    assert "DFedPGP on own arrays" in page.read_text()
    with pytest.raises(qv.QuiverError, match="saved from Python"):
        saved.personal(0)
    with pytest.raises(qv.QuiverError, match="saved from Python"):
        RunFolder(tmp_path / "a").config()
    again = simulate(qv.DFedPGP(), PUSH(6), resume=saved.checkpoint())
    assert same_model(again.personal(4), run.personal(4))


def test_a_run_that_ended_early_is_saved_as_unfinished(tmp_path: Path) -> None:
    stopping = qv.EarlyStopping("loss", patience=1, margin=9.0)
    run = qv.Experiment.of({**TREE, "run": {"rounds": 6}}).run(tmp_path / "a", [stopping])
    assert len(run.rounds) == 2
    saved = qv.load_run(tmp_path / "a")
    assert not saved.complete
    assert "2 of 6" in repr(saved)
    assert saved.summary["finished"] is False
    assert same_model(saved.personal(1), run.personal(1))


def test_data_of_a_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    qv.Experiment.of(TREE).run(tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    written = json.loads(path.read_text())
    written["inputs"] = {"data digits": "of other data"}
    path.write_text(json.dumps(written))
    with pytest.raises(qv.QuiverError, match="another data digits"):
        qv.load_run(tmp_path / "a").personal(0)


def test_partitioned_data_is_what_an_experiment_makes() -> None:
    data = qv.partition("digits", "dirichlet", clients=4, seed=0, alpha=0.5)
    other = qv.Experiment.of(TREE).data
    assert torch.equal(data.train.x, other.train.x)
    assert data.train.offsets.tolist() == other.train.offsets.tolist()
    assert data.origin["alpha"] == 0.5


@pytest.mark.parametrize("name", ["data", "graph", "topology", "dataset", "run"])
def test_objects_show_no_tensors(name: str) -> None:
    dataset = qv.load_dataset("digits")
    shown = {
        "data": qv.partition(dataset, "iid", clients=3),
        "graph": PUSH(6)(0),
        "topology": PUSH(6),
        "dataset": dataset,
        "run": simulate(qv.Local(), qv.isolated(clients=6), rounds=1),
    }[name]
    text = repr(shown)
    assert len(text) < 200
    assert "tensor" not in text
    assert "array" not in text
    assert shown._repr_html_().startswith("<table>")


def test_one_stage_can_be_drawn_alone(tmp_path: Path) -> None:
    run = simulate(qv.DFedPGP(), PUSH(6), rounds=2)
    saved = qv.load_run(run.save(tmp_path / "run"))
    for one in (run, saved):
        labels = [line.get_label() for line in one.plot().axes[0].lines]
        assert labels == ["local", "mixed"]
        for stage in ("local", "mixed"):
            (line,) = one.plot(stage=stage).axes[0].lines
            assert line.get_label() == stage
        one.plot(tmp_path / "c.png", tmp_path / "c.svg")
        assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "c.svg").read_text()
