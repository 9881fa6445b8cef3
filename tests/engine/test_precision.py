"""[run] precision, compile and executor = "measure": honoured, recorded, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.engine import execution
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.execution import set_precision
from quiverfl.errors import QuiverError
from quiverfl.runs.config import parse_config
from small import PUSH, REGULAR, STAR, TRAINING, TinyModel, distance, simulate, states, tiny_data


def test_bf16_computes_the_model_in_bfloat16_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[torch.dtype] = set()

    def forward(self: TinyModel, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.body[0].weight, self.body[0].bias)
        if isinstance(hidden.dtype, torch.dtype):  # not while the model is traced
            seen.add(hidden.dtype)
        return self.head(torch.tanh(hidden))

    monkeypatch.setattr(TinyModel, "forward", forward)
    options = {"dtype": torch.float32, "executor": "sequential"}
    plain = simulate(qv.DFedPGP(), PUSH(6), **options)
    assert seen == {torch.float32}
    rough = simulate(qv.DFedPGP(), PUSH(6), precision="bf16", **options)
    assert torch.bfloat16 in seen
    assert all(leaf.dtype in (torch.float32, torch.float64) for leaf in states(rough))
    assert 1e-6 < distance(states(plain), states(rough)) < 0.1
    assert rough.summary["carried_out"]["precision"] == "bf16"
    chosen = simulate(qv.DFedPGP(), PUSH(6), dtype=torch.float32, precision="bf16")
    assert chosen.summary["carried_out"]["executor"] == "sequential"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bf16", "executor": "vectorized"}, "torch.vmap ignores autocast"),
        ({"precision": "bf16", "dtype": torch.float64}, "it makes float32 faster"),
        ({"precision": "auto", "executor": "vectorized"}, "torch.vmap ignores autocast"),
        ({"layout": "measure", "executor": "vectorized"}, "as vmap has them"),
        ({"layout": "sideways"}, "layout = 'sideways'"),
        ({"precision": "tf32"}, "a format of NVIDIA GPUs"),
        ({"precision": "fp8"}, "precision = 'fp8'"),
        ({"compile": True, "executor": "sequential"}, "computed for many clients together"),
        ({"compile": True, "executor": "measure"}, "computed for many clients together"),
        ({"compile": True, "precision": "bf16"}, 'without precision = "bf16"'),
        ({"states": "elsewhere"}, "states = 'elsewhere'"),
        ({"chunk": 0}, "chunk = 0"),
        ({"device": "mps", "dtype": torch.float64}, "no float64"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(QuiverError, match=words):
        simulate(qv.DFedPGP(), PUSH(6), **{"dtype": torch.float32, **options})


class Dropping(TinyModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.body(x), 0.5, self.training))


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv1d(1, 2, 2), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.unsqueeze(1)).flatten(1))


class Looping(TinyModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * float(self.body[0].bias[0].abs() + 1)


@pytest.mark.parametrize(
    ("model", "method", "words"),
    [
        (TinyModel, qv.MOON(), "MOON, whose loss looks at the model's features"),
        (Dropping, qv.DFedAvgM(), "draws random numbers"),
        (Convolving, qv.DFedAvgM(), "computed one by one"),
        (Looping, qv.DFedAvgM(), "cannot be computed for several clients at once"),
    ],
    ids=["features", "dropout", "convolution", "not-stacked"],
)
def test_what_cannot_be_compiled_is_refused_with_a_reason(
    model: type[nn.Module], method: qv.Method, words: str
) -> None:
    graph = STAR if method.topology == "star" else REGULAR
    with pytest.raises(QuiverError, match=words):
        qv.simulate(
            qv.Task(model=model, personal=("head",)),
            tiny_data(),
            method=method,
            topology=graph(6),
            training=TRAINING,
            rounds=1,
            compile=True,
        )


def test_products_of_a_gpu_are_set_and_put_back() -> None:
    """The flags exist without a GPU. cuDNN's own default is TF32, and a run's is not."""
    cuda = torch.device("cuda")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    for precision, allowed in (("float32", False), ("tf32", True), ("bf16", False)):
        with set_precision(precision, cuda):  # type: ignore[arg-type]
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
            assert torch.backends.cudnn.allow_tf32 is allowed
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_a_measurement_chooses_the_faster_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), executor="measure", rounds=1)
    how = run.summary["carried_out"]
    times = how["seconds_per_gradient"]
    assert set(times) == {"vectorized", "sequential"}
    assert min(times.values()) > 0
    assert how["executor"] == min(times, key=times.__getitem__)
    for faster in ("vectorized", "sequential"):
        slow = {"vectorized": 2.0, "sequential": 2.0, faster: 1.0}
        monkeypatch.setattr(execution, "seconds_per_gradient", lambda *_, slow=slow: slow)
        again = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), executor="measure", rounds=1)
        assert again.summary["carried_out"]["executor"] == faster
        plain = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), executor=faster, rounds=1)
        assert distance(states(again), states(plain)) == 0


def test_a_resumed_run_stays_with_what_was_measured_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever is faster then, unless another executor is asked for."""
    kept: list[Checkpoint] = []
    fast = {"vectorized": 1.0, "sequential": 2.0}
    monkeypatch.setattr(execution, "seconds_per_gradient", lambda *_: fast)
    how = {"executor": "measure", "checkpoint_every": 1}
    method = qv.DFedAvgM(epochs=1)
    whole = simulate(method, REGULAR(6), rounds=2, checkpoint=kept.append, **how)
    loaded = Checkpoint.load(kept[0].save(tmp_path), kept[0].history)
    assert loaded.executor == "vectorized"
    monkeypatch.setattr(execution, "seconds_per_gradient", lambda *_: pytest.fail("measured"))
    again = simulate(method, REGULAR(6), rounds=2, resume=loaded, **how)
    assert again.summary["carried_out"]["executor"] == "vectorized"
    assert again.checkpoint().executor == "vectorized"
    assert distance(states(whole), states(again)) == 0
    other = simulate(method, REGULAR(6), rounds=2, resume=loaded, executor="sequential")
    assert other.summary["carried_out"]["executor"] == "sequential"
    assert other.checkpoint().executor is None


def test_precision_and_layout_are_chosen_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial times all combinations; what it chose is carried out, recorded and kept."""
    monkeypatch.setattr(execution, "has_bfloat16", lambda _: True)
    options = {"dtype": torch.float32, "executor": "sequential", "rounds": 1}
    asked = {**options, "precision": "auto", "layout": "measure"}
    tried: list[set[str]] = []

    def pretend(*given: Any) -> dict[str, float]:
        tried.append(set(given[3]))
        return {name: 1.0 if name == "bf16 channels_last" else 2.0 for name in given[3]}

    monkeypatch.setattr(execution, "seconds_per_gradient", pretend)
    kept: list[Checkpoint] = []
    run = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), checkpoint=kept.append, **asked)
    precisions, layouts = ("float32", "bf16"), ("contiguous", "channels_last")
    assert tried == [{f"{p} {layout}" for p in precisions for layout in layouts}]
    how = run.summary["carried_out"]
    assert (how["precision"], how["layout"]) == ("bf16", "channels_last")
    named = {**options, "precision": "bf16", "layout": "channels_last"}
    plain = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), **named)
    assert distance(states(run), states(plain)) == 0
    monkeypatch.setattr(execution, "has_bfloat16", lambda _: False)
    options["precision"] = "auto"
    without = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), **options)
    assert without.summary["carried_out"]["precision"] == "float32"
    assert len(tried) == 1


def test_a_trial_of_a_model_with_running_statistics_leaves_no_trace() -> None:
    """It changes statistics of its own: the run is the one without a trial, to the bit."""

    def model() -> nn.Module:
        body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten())
        layers = nn.Sequential()
        layers.add_module("body", body)
        layers.add_module("head", nn.Linear(256, 10))
        return layers

    data = qv.partition("digits", "iid", clients=4, samples_per_client=16)
    options: dict[str, Any] = {"method": qv.DFedAvgM(epochs=1), "training": TRAINING, "rounds": 1}
    options["topology"] = qv.ring(clients=4)
    tried = qv.simulate(qv.Task(model), data, layout="measure", **options)
    layout = tried.summary["carried_out"]["layout"]
    plain = qv.simulate(qv.Task(model), data, layout=layout, **options)
    assert len(tried.summary["carried_out"]["seconds_per_gradient"]) == 2
    assert tried.history.equals(plain.history)


def test_a_resumed_run_keeps_the_precision_that_a_trial_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[Checkpoint] = []
    monkeypatch.setattr(execution, "has_bfloat16", lambda _: True)
    fast = {"bf16": 1.0, "float32": 2.0}
    monkeypatch.setattr(execution, "seconds_per_gradient", lambda *_: fast)
    how = {"dtype": torch.float32, "precision": "auto", "checkpoint_every": 1, "rounds": 2}
    whole = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), checkpoint=kept.append, **how)
    loaded = Checkpoint.load(kept[0].save(tmp_path), kept[0].history)
    monkeypatch.setattr(execution, "seconds_per_gradient", lambda *_: pytest.fail("measured"))
    again = simulate(qv.DFedAvgM(epochs=1), REGULAR(6), resume=loaded, **how)
    assert again.summary["carried_out"]["precision"] == "bf16"
    assert distance(states(whole), states(again)) == 0


def test_precision_is_part_of_what_a_run_is_and_compiling_is_not() -> None:
    plain = parse_config({})
    assert parse_config({"run": {"precision": "float32"}}).identity() == plain.identity()
    assert parse_config({"run": {"layout": "auto"}}).identity() == plain.identity()
    for key, value in (("precision", "bf16"), ("precision", "auto"), ("layout", "measure")):
        assert parse_config({"run": {key: value}}).identity() != plain.identity()
    for key, value in (("compile", True), ("states", "host"), ("executor", "measure")):
        assert parse_config({"run": {key: value}}).identity() == plain.identity()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "graph"),
    [(qv.DFedPGP(shared_epochs=2), PUSH), (qv.DFedSAM(epochs=2), REGULAR)],
    ids=str,
)
def test_compiled_is_the_same_up_to_rounding(method: Any, graph: Any) -> None:
    plain = simulate(method, graph(6), executor="vectorized")
    compiled = simulate(method, graph(6), executor="vectorized", compile=True)
    assert compiled.summary["carried_out"]["compile"] is True
    assert distance(states(plain), states(compiled)) < 1e-12
