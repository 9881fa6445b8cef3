"""Personal models as programs that run without this package."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import quiverfl as qv
from quiverfl.cli.main import app
from quiverfl.runs.export import write_traced
from shell import quiver


def sample(model: str) -> tuple[nn.Module, torch.Tensor]:
    side = 28 if model == "lenet5" else 16
    made = qv.make_model(model, (1, side, side), 5).eval()
    return made, torch.randn(2, 1, side, side)


@pytest.mark.parametrize("model", ["mlp", "lenet5", "cnn_small", "resnet8_gn"])
def test_built_in_models_as_programs_of_torch(model: str, tmp_path: Path) -> None:
    made, x = sample(model)
    write_traced("program", made, (x,), {}, tmp_path / "m.pt2")
    again = torch.export.load(tmp_path / "m.pt2").module()
    for count in (1, 2, 7):
        more = torch.randn(count, *x.shape[1:])
        assert torch.allclose(again(more), made(more), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(qv.MODELS))
def test_built_in_models_as_onnx(model: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'quiverfl[export]'")
    made, x = sample(model)
    write_traced("onnx", made, (x,), {}, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    for count in (1, 2, 7):
        more = torch.randn(count, *x.shape[1:])
        (found,) = session.run(None, {session.get_inputs()[0].name: more.numpy()})
        assert np.allclose(found, made(more).detach().numpy(), atol=1e-4)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x) if x.sum() > 0 else -self.head(x)


def test_a_model_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(qv.QuiverError, match=r"m\.pt2: the model cannot be written as a program"):
        write_traced("program", Branching(), (torch.ones(2, 2),), {}, tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()


MODEL = """
from torch import nn

class Branching(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.Linear(shape[0], 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden if self.body.weight.sum() > 0 and hidden.sum() > 0 else -hidden)
"""


def experiment(model: str) -> qv.Experiment:
    options = {"train": 60, "test": 30, "shape": [3], "classes": 2}
    return qv.Experiment.of(
        {
            "data": {"name": "synthetic", "clients": 3, "partition": "iid", "options": options},
            "model": {"name": model},
            "run": {"rounds": 1, "threads": 1, "executor": "sequential"},
        }
    )


def test_the_command_writes_both_and_what_it_cannot_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = experiment("mlp").run("good")
    command = ["export", "good", "--client", "1", "--out", "mine.safetensors", "--program"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    x = torch.from_numpy(np.array(qv.Experiment.of(run.config).dataset.test_x[:5]))
    program = torch.export.load("mine.pt2").module()
    said = run.personal(1)(x)
    assert type(said) is torch.Tensor  # what was traced leaves nothing of its own behind
    assert torch.allclose(program(x), said, atol=1e-6)  # normalisation and all


def test_the_tensors_are_there_though_the_program_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quiverfl.runs.export import export_client
    from quiverfl.runs.folder import RunFolder

    (tmp_path / "odd_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    experiment("odd_model:Branching").run("odd")
    out = Path("odd.safetensors")
    with pytest.raises(qv.QuiverError, match=r"odd\.safetensors holds it all the same"):
        list(export_client(RunFolder(Path("odd")), 0, "mixed", out, ["program"]))
    assert out.exists()
    assert not Path("odd.pt2").exists()


NETS = """
import torch
from torch import nn

class Lstm(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body = nn.LSTM(shape[1], 6, batch_first=True)
        self.head = nn.Linear(6, classes)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])

class Transformer(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        layer = nn.TransformerEncoderLayer(shape[1], 2, 16, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(shape[1], classes)

    def forward(self, x):
        return self.head(self.body(x).mean(1))
"""
EXPORTED = {
    "mlp": (3,),
    "lenet5": (1, 28, 28),
    "fedavg_cnn": (3, 16, 16),
    "resnet18_gn": (3, 8, 8),
    "nets:Lstm": (5, 4),
    "nets:Transformer": (5, 4),
}
"""Models and the shape of one sample."""


@pytest.mark.slow
@pytest.mark.parametrize("model", EXPORTED)
def test_every_kind_of_model_comes_out_of_a_run(model: str, tmp_path: Path) -> None:
    """Typed as a person does: the programs say what the client's model says."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'quiverfl[export]'")
    (tmp_path / "nets.py").write_text(NETS)
    shape = list(EXPORTED[model])
    (tmp_path / "run.toml").write_text(
        f'data = {{ name = "synthetic", clients = 3, partition = "iid", options = {{ train = 24, '
        f"test = 12, shape = {shape}, classes = 2 }} }}\n"
        f'model.name = "{model}"\ntopology.neighbors = 1\nrun = {{ rounds = 1, threads = 1 }}\n'
    )
    assert quiver("run", "run.toml", "--out", "run", "-q", cwd=tmp_path).returncode == 0
    words = ["export", "run", "--client", "2", "--out", "mine.safetensors", "--onnx", "--program"]
    done = quiver(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with contextlib.chdir(tmp_path):
        saved = qv.load_run("run")
        x = torch.from_numpy(np.array(qv.Experiment.of(saved.config).dataset.test_x[:5]))
        wanted = saved.personal(2)(x).detach()
    program = torch.export.load(tmp_path / "mine.pt2").module()
    assert torch.allclose(program(x), wanted, atol=1e-5)
    session = onnxruntime.InferenceSession(str(tmp_path / "mine.onnx"))
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.allclose(found, wanted.numpy(), atol=1e-4)
