"""Clients whose personal parts differ: three classes here, seven there, another head elsewhere."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.data.batches import batch_order
from quiverfl.data.federated import number_own_labels
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverWarning
from quiverfl.runs.export import export_client
from quiverfl.runs.folder import RunFolder
from quiverfl.runs.simulate import Simulation

CLASSES, SIZES, ROUNDS = (3, 7, 2, 5), (8, 9, 7, 6), 3
PLAIN = qv.Training(lr=0.1, momentum=0.9, weight_decay=0.05, batch_size=3)
RING = qv.ring(clients=4)


class Net(nn.Module):
    def __init__(self, head: nn.Module, width: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh())
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))


MODELS: list[Callable[[], nn.Module]] = [
    lambda: Net(nn.Linear(5, 3)),
    lambda: Net(nn.Linear(5, 7)),
    lambda: Net(nn.Linear(5, 2)),
    lambda: Net(deep()),
]


def pairs(more: int, seed: int) -> list[Any]:
    r = np.random.default_rng(seed)
    sizes = zip(SIZES, CLASSES, strict=True)
    return [(r.normal(size=(n + more, 6)), r.integers(0, c, n + more)) for n, c in sizes]


def play(method: Any, models: Any = MODELS, topology: Any = RING, **options: Any) -> qv.Run:
    settings = {"rounds": ROUNDS, "seed": 1, "threads": 1, "dtype": torch.float64, **options}
    return qv.simulate(
        qv.Task(models),
        qv.FederatedData.from_arrays(pairs(0, 0), pairs(2, 1)),
        method=method,
        topology=topology,
        training=PLAIN,
        executor="sequential",
        **settings,
    )


def test_a_run_equals_a_plain_loop_with_modules_of_different_heads() -> None:
    """DFedAvgM-P, both parts jointly: body averaged with the neighbours', head at the client."""
    found = play(qv.DFedAvgMP(shared_epochs=2, alternating=False))
    task = found._task
    models = []
    for client, factory in enumerate(MODELS):
        model = factory().double()
        start: Any = task.with_own_part(task.initial_params(1), client, 1, 0)
        model.load_state_dict(task.of_client(client).named_params(start))
        models.append(model)
    for t in range(ROUNDS):
        for i, (x, y) in enumerate(pairs(0, 0)):
            x, y = torch.from_numpy(x), torch.from_numpy(y)
            optimizer = torch.optim.SGD(
                models[i].parameters(), lr=0.1, momentum=0.9, weight_decay=0.05
            )
            for epoch in range(2):
                order = batch_order(1, i, t, 0, epoch, len(y))
                for begin in range(0, len(y), 3):
                    rows = order[begin : begin + 3]
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(models[i](x[rows]), y[rows]).backward()
                    optimizer.step()
        bodies = [copy.deepcopy(model.get_submodule("body").state_dict()) for model in models]
        for i, weights in enumerate(RING(t).weights):
            average = {
                name: sum(float(w) * body[name] for w, body in zip(weights, bodies, strict=True))
                for name in bodies[0]
            }
            models[i].get_submodule("body").load_state_dict(average)
    losses = found.history.query(f"round == {ROUNDS - 1} and stage == 'mixed'")
    for i, (x, y) in enumerate(pairs(2, 1)):
        ours = found.parameters(i)
        assert ours.keys() == models[i].state_dict().keys()
        for name, leaf in models[i].state_dict().items():
            torch.testing.assert_close(ours[name], leaf, rtol=0, atol=1e-12, msg=name)
        with torch.no_grad():
            logits = models[i](torch.from_numpy(x))
            loss = nn.functional.cross_entropy(logits, torch.from_numpy(y)).item()
        assert float(losses[losses.client == i]["loss"].iloc[0]) == pytest.approx(loss, abs=1e-12)
        assert torch.equal(found.personal(i).get_submodule("body")[0].weight, ours["body.0.weight"])


@pytest.mark.parametrize(
    "method",
    [qv.DFedPGP(shared_epochs=1), qv.FedRep(personal_epochs=1), qv.FedBABU(epochs=1), qv.Local()],
    ids=lambda method: method.title,
)
def test_what_a_shorter_part_lacks_is_never_touched(method: Any) -> None:
    """Zeros stay zeros; a run that goes on from a checkpoint is the same."""
    taken: list[Any] = []
    star = qv.star(clients=4, sampled=2, seed=0) if method.topology == "star" else RING
    whole = play(method, topology=star, checkpoint=taken.append, checkpoint_every=1)
    task, values = whole._task, whole._shard.state.v
    assert values.shape == (4, 5 * 4 + 4 + 4 * 5 + 5)
    for client, own in enumerate(values):
        size = task.of_client(client).personal_layout.size
        assert not own[size:].any()
        assert own[:size].all()
    again = play(method, topology=star, resume=taken[1])
    for one, other in zip(again._shard.state, whole._shard.state, strict=True):
        assert torch.equal(one, other)


def test_models_that_are_alike_are_one_model() -> None:
    def alike() -> nn.Module:
        return Net(nn.Linear(5, 7))

    each, one = (play(qv.DFedPGP(shared_epochs=1), models) for models in ([alike] * 4, alike))
    for leaf, other in zip(each._shard.state, one._shard.state, strict=True):
        torch.testing.assert_close(leaf, other, rtol=0, atol=1e-12)


def test_auto_says_that_it_computes_one_client_after_the_other() -> None:
    with pytest.warns(QuiverWarning, match="clients have models of their own"):
        qv.simulate(
            qv.Task(MODELS),
            qv.FederatedData.from_arrays(pairs(0, 0), pairs(2, 1)),
            method=qv.DFedPGP(),
            topology=RING,
            training=PLAIN,
            rounds=1,
        )


def frozen(value: float) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net(nn.Linear(5, 7))
        first: Any = model.get_submodule("body.0")
        nn.init.constant_(first.bias, value).requires_grad_(False)
        return model

    return make


@pytest.mark.parametrize(
    ("models", "words"),
    [
        (
            [MODELS[0], lambda: Net(nn.Linear(6, 3), width=6)],
            r"client 1 differs .* 'body.0.weight' is \(6, 6\), not \(5, 6\).*\(distillation\)",
        ),
        ([frozen(0.0), frozen(1.0)], r"frozen parameter 'body.0.bias' of client 1's model is not"),
        ([MODELS[0], 3], "Task.model is a int"),
    ],
)
def test_bodies_that_differ_are_refused(models: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        qv.Task(models)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (qv.FedAvg(), r"FedAvg sends 'v' of shape \(49,\), and clients have personal parts of"),
        (qv.Ditto(), r"Ditto sends 'v' of shape"),
        (qv.FedProto(), r"FedProto sends 'sums' of shape \(\d, 5\)"),
    ],
)
def test_methods_that_send_the_personal_part_are_refused(method: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        play(method)


@pytest.mark.parametrize(
    ("models", "options", "words"),
    [
        (MODELS[:3], {}, r"Task.model lists 3 models for 4 clients"),
        (
            [MODELS[0], MODELS[0], *MODELS[2:]],
            {},
            r"client 1: labels go up to 6 but the model has 3 outputs",
        ),
        (MODELS, {"executor": "vectorized"}, r"several clients at once \(clients have models of"),
        (MODELS, {"adversary": qv.LabelFlip(share=0.3)}, "label_flip. with a model for each"),
    ],
)
def test_what_does_not_fit_is_refused(models: Any, options: Any, words: str) -> None:
    settings = {"rounds": 1, "executor": "sequential", **options}
    with pytest.raises(qv.QuiverError, match=words):
        qv.simulate(
            qv.Task(models),
            qv.FederatedData.from_arrays(pairs(0, 0), pairs(2, 1)),
            method=qv.DFedPGP(),
            topology=RING,
            training=PLAIN,
            **settings,
        )


def test_nobody_knows_the_model_of_a_client_that_comes_later() -> None:
    data = qv.FederatedData.from_arrays(pairs(0, 0), pairs(2, 1)).hold_out([3])
    simulation = Simulation(
        qv.Task(MODELS[:3]),
        data,
        qv.DFedPGP(),
        qv.ring(clients=3),
        PLAIN,
        RunSettings(rounds=1, executor="sequential"),
    )
    with pytest.raises(qv.QuiverError, match=r"data.unseen with a model for each client"):
        simulation.check()


def test_labels_of_each_client_by_configuration(tmp_path: Path) -> None:
    """`task.labels = "own"`: as many outputs as a client has classes, from run to exported file."""
    settings = {
        "data": {"name": "digits", "clients": 4, "samples_per_client": 30, "seed": 0},
        "model": {"name": "mlp", "hidden": [6]},
        "method": {"name": "dfedpgp", "shared_epochs": 1},
        "topology": {"name": "ring"},
        "task": {"labels": "own"},
        "run": {"rounds": 2, "threads": 1, "executor": "sequential"},
    }
    settings["data"] |= {"partition": "dirichlet", "alpha": 0.3}
    made = qv.Experiment.of(settings)
    common = qv.Experiment.of({**settings, "task": {}})
    sizes = set()
    for client in range(4):
        classes = made.own_classes(client)
        assert classes is not None
        sizes.add(len(classes))
        for ours, theirs in (
            (made.data.train, common.data.train),
            (made.data.test, common.data.test),
        ):
            numbers, labels = ours.of_client(client)[1], theirs.of_client(client)[1]
            assert [classes[n] for n in numbers.tolist()] == [str(n) for n in labels.tolist()]
        own = made.task.of_client(client).personal_layout
        assert own.shapes[own.names.index("head.weight")] == (len(classes), 6)
    assert len(sizes) > 1
    made.run(tmp_path / "own")
    out = tmp_path / "one.safetensors"
    lines = [*export_client(RunFolder(tmp_path / "own"), 2, "mixed", out)]
    wanted = made.own_classes(2)
    assert wanted is not None
    assert json.loads(out.with_suffix(".json").read_text())["classes"] == list(wanted)
    assert any(f"make_model('mlp', (1, 8, 8), {len(wanted)}, " in line for line in lines)


def test_own_labels_need_labels() -> None:
    r = np.random.default_rng(0)
    pair = [(r.normal(size=(4, 6)), r.normal(size=4))] * 2
    with pytest.raises(qv.QuiverError, match=r"task.labels = .own. needs one class label"):
        number_own_labels(qv.FederatedData.from_arrays(pair, pair))
