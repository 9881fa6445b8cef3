"""numpy's numbers are taken wherever Python's are, and give the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.options import python_number
from small import tiny_data, tiny_task

Int, Float = np.int64, np.float32


def same_run(options: dict[str, Any], **training: Any) -> qv.Run:
    return qv.simulate(
        tiny_task(),
        tiny_data(),
        method=options.pop("method", qv.DFedPGP(shared_epochs=1)),
        topology=options.pop("topology", qv.random_push(clients=6, neighbors=2, seed=3)),
        training=qv.Training(**{"lr": 0.5, "batch_size": 4, **training}),
        **{"rounds": 2, "seed": 1, "threads": 1, **options},
    )


OPTIONS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "run": lambda: (
        {"rounds": Int(2), "seed": Int(1), "threads": Int(1), "checkpoint_every": Int(10)}
        | {"evaluate_every": np.int32(1), "epochs_per_client": np.ones(6, dtype=np.int64)},
        {},
    ),
    "training": lambda: ({}, {"lr": Float(0.5), "batch_size": Int(4), "momentum": Float(0)}),
    "method": lambda: (
        {"method": qv.DFedPGP(personal_epochs=Int(1), shared_epochs=np.int8(1))},
        {},
    ),
    "topology": lambda: (
        {"topology": qv.random_push(clients=Int(6), neighbors=Int(2), seed=Int(3))},
        {},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_takes_them_and_is_the_same(name: str, tmp_path: Path) -> None:
    options, training = OPTIONS[name]()
    run, plain = same_run(options, **training), same_run({})
    assert run.history.equals(plain.history)
    kept = [
        json.loads((one.save(tmp_path / name) / "config.json").read_text())
        for name, one in (("numpy", run), ("python", plain))
    ]
    if name == "run":  # as many epochs for each client as the method has
        for text in kept:
            text["config"]["run"].pop("epochs_per_client")
    assert kept[0]["config"] == kept[1]["config"]


@pytest.mark.parametrize(
    "make",
    [
        lambda i, f: qv.Quantize(bits=i(4)),
        lambda i, f: qv.TopK(fraction=f(0.5)),
        lambda i, f: qv.SignFlip(share=f(0.5)),
        lambda i, f: qv.SelfCenteredClip(radius=f(2)),
        lambda i, f: qv.UpdatePrivacy(clip=f(2), noise=f(1)),
        lambda i, f: qv.Ditto(epochs=i(2)),
        lambda i, f: qv.FedProx(proximal=f(0.5)),
        lambda i, f: qv.OSGP(delay=i(1)),
        lambda i, f: qv.Training(
            lr=f(0.5), clip_norm=i(10), betas=(f(0.5), f(0.25)), optimizer="adam"
        ),
        lambda i, f: qv.RunSettings(rounds=i(3), chunk=i(2), epochs_per_client=[i(1), i(2)]),
    ],
)
def test_options_become_pythons(make: Callable[..., Any]) -> None:
    made = make(Int, Float)
    assert made == make(int, float)
    assert repr(made) == repr(make(int, float))


@pytest.mark.parametrize(
    "make",
    [
        lambda i, f: qv.star(clients=i(6), sampled=i(2), seed=i(1)),
        lambda i, f: qv.erdos_renyi(clients=i(6), probability=f(0.5), seed=i(1)),
        lambda i, f: qv.bandit_push(clients=i(6), neighbors=i(2), confidence=f(0.5), seed=i(1)),
        lambda i, f: qv.participating(qv.ring(clients=i(6)), f(0.5), seed=i(1)),
        lambda i, f: qv.unreliable(qv.ring(clients=i(6)), f(0.5), seed=i(1)),
    ],
)
def test_options_of_topologies_can_be_written_as_json(make: Callable[..., Any]) -> None:
    topology, plain = make(Int, Float), make(int, float)
    assert json.dumps(topology.options) == json.dumps(plain.options)
    assert json.dumps(topology.clients) == json.dumps(plain.clients)
    assert (topology(0).sparse != plain(0).sparse).nnz == 0


def test_partitions_experiments_and_comparisons_take_them() -> None:
    options: dict[str, Any] = {
        "samples_per_client": Int(20),
        "alpha": Float(0.5),
        "test_per_client": Int(5),
    }
    data = qv.partition("digits", "dirichlet", clients=Int(4), seed=Int(2), **options)
    plain = qv.partition(
        "digits", "dirichlet", 4, 2, samples_per_client=20, alpha=0.5, test_per_client=5
    )
    assert json.dumps(data.origin) == json.dumps(plain.origin)
    assert torch.equal(torch.as_tensor(data.train.offsets), torch.as_tensor(plain.train.offsets))
    tree = {
        "data": {"clients": Int(4), "samples_per_client": Int(20)},
        "model": {"hidden": [Int(8)]},
        "topology": {"neighbors": Int(2)},
        "training": {"lr": Float(0.5), "batch_size": Int(4)},
        "run": {"rounds": Int(1), "threads": Int(1)},
    }
    assert qv.Experiment.of(tree).config == qv.Experiment.of(python_number(tree)).config
    both = qv.compare(tree, ["local"], seeds=np.arange(2))
    assert list(both.runs) == ["local-seed0", "local-seed1"]
    run = both.runs["local-seed0"]
    assert torch.equal(run.state(Int(1)).v["head.bias"], run.state(1).v["head.bias"])


def test_models_take_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    assert qv.group_norm(model, groups=Int(4))[1].num_groups == 4  # type: ignore[index,union-attr]
    assert qv.EarlyStopping(patience=Int(3), margin=Float(0.5)).patience == 3


def test_truth_values_are_still_no_numbers() -> None:
    for wrong in (True, np.bool_(True)):
        with pytest.raises(qv.QuiverError, match="rounds = True"):
            qv.RunSettings(rounds=wrong)
        with pytest.raises(qv.QuiverError, match="epochs = True"):
            qv.Ditto(epochs=wrong)
