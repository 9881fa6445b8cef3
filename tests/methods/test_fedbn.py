"""FedBN against a plain PyTorch loop: one `nn.Module` and one `torch.optim.SGD` for each client."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.errors import QuiverWarning
from quiverfl.runs.experiment import Experiment
from small import tiny_data, tiny_task

SIZES, EPOCHS, ROUNDS, BATCH, SEED = (12, 8, 9, 17, 5), 2, 3, 6, 3
CLIENTS = range(len(SIZES))
STAR = qv.star(clients=len(SIZES), sampled=3, seed=2)
TRAINING = qv.Training(lr=0.02, momentum=0.9, weight_decay=1e-3, batch_size=BATCH)
random = np.random.default_rng(0)


def examples(count: int, client: int) -> tuple[Any, Any]:
    x = random.normal(size=(count, 2, 6, 6)) * (1 + client) + client
    return x, random.integers(0, 3, count)


TRAIN = [examples(size, client) for client, size in enumerate(SIZES)]
TEST = [examples(8, client) for client in CLIENTS]


class Net(nn.Module):
    """BatchNorm over images and over vectors, one of them with the plain mean of all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, 8),
            nn.BatchNorm1d(8, momentum=None),
            nn.ReLU(),
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def batches(client: int, round: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = (torch.as_tensor(part) for part in TRAIN[client])
    for epoch in range(EPOCHS):
        order = qv.batch_order(SEED, client, round, 0, epoch, SIZES[client])
        for begin in range(0, SIZES[client], BATCH):
            rows = order[begin : begin + BATCH]
            yield x[rows], y[rows]


def plain_loop(weighting: str, mutant: str = "") -> list[list[nn.Module]]:
    """Every client's model after every round."""
    first = qv.Task(Net).initial_params(SEED)
    models = [qv.Task(Net).make_module(first).double() for _ in CLIENTS]
    stays = {
        f"{name}.{parameter}"
        for name, layer in models[0].named_modules()
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d)
        for parameter in ("weight", "bias")
    }
    if mutant == "the head stays, too":
        stays |= {"head.weight", "head.bias"}
    if mutant == "BatchNorm is averaged":
        stays = set()
    after = []
    for t in range(ROUNDS):
        sampled = np.flatnonzero(STAR(t).active)
        for i in sampled:
            optimizer = torch.optim.SGD(
                models[i].parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3
            )
            models[i].train()
            for x, y in batches(i, t):
                optimizer.zero_grad()
                nn.functional.cross_entropy(models[i](x), y).backward()
                optimizer.step()
        counts = [1.0 if weighting == "uniform" else SIZES[i] for i in sampled]
        with torch.no_grad():
            for name, _ in models[0].named_parameters():
                if name not in stays:
                    theirs = [dict(models[i].named_parameters())[name] for i in sampled]
                    mean = sum(c * w for c, w in zip(counts, theirs, strict=True)) / sum(counts)
                    for model in models:
                        dict(model.named_parameters())[name].copy_(mean)
        after.append(copy.deepcopy(models))
    return after


def fed_bn(method: qv.FedBN | None = None) -> qv.Run:
    return qv.simulate(
        qv.Task(Net),
        qv.FederatedData.from_arrays(TRAIN, TEST),
        method=method or qv.FedBN(epochs=EPOCHS),
        topology=STAR,
        training=TRAINING,
        rounds=ROUNDS,
        seed=SEED,
        dtype=torch.float64,
        threads=1,
    )


def distance(run: qv.Run, models: list[nn.Module]) -> float:
    """The largest difference of any parameter or running statistic of any client."""
    pairs = [
        (run.personal(i).state_dict()[name], leaf)
        for i, model in enumerate(models)
        for name, leaf in model.state_dict().items()
    ]
    return max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_run_equals_a_plain_loop(weighting: Any) -> None:
    """All parameters and running statistics, and the loss of every client in every round."""
    run = fed_bn(qv.FedBN(epochs=EPOCHS, weighting=weighting))
    after = plain_loop(weighting)
    assert distance(run, after[-1]) < 1e-12
    history = run.history[run.history["stage"] == "mixed"]
    for t, models in enumerate(after):
        losses = history[history["round"] == t].sort_values("client")["loss"].to_numpy()
        for i, model in enumerate(models):
            x, y = (torch.as_tensor(part) for part in TEST[i])
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model.eval()(x), y)
            assert abs(float(loss) - losses[i]) < 1e-12


@pytest.mark.parametrize("mutant", ["the head stays, too", "BatchNorm is averaged", "samples"])
def test_another_method_is_told_apart(mutant: str) -> None:
    weighting = "samples" if mutant == "samples" else "uniform"
    assert distance(fed_bn(), plain_loop(weighting, mutant)[-1]) > 1e-3


def test_batch_norm_alone_is_personal_whatever_the_task_says() -> None:
    whole = sum(parameter.numel() for parameter in Net().parameters())
    run = fed_bn()
    assert run.simulation.task.personal == ("body.1", "body.5")
    assert float(run.rounds["sent_bytes"].iloc[0]) == 3 * 8 * (whole - 24 + 1)  # n_k goes with it


def test_layers_that_are_frozen_stay_with_everybody() -> None:
    def partly_frozen() -> nn.Module:
        net = Net()
        net.get_submodule("body.1").requires_grad_(False)
        return net

    assert qv.Task(partly_frozen, personal="batch_norm").personal == ("body.5",)
    assert qv.FedBN().personal_part(qv.Task(partly_frozen)) == ("body.5",)


def test_without_batch_norm_it_is_fed_avg_and_says_so() -> None:
    given: dict[str, Any] = {"topology": qv.star(clients=6, sampled=3, seed=0), "rounds": 2}
    with pytest.warns(QuiverWarning, match="FedBN keeps a part of its own choice"):
        run = qv.simulate(tiny_task(), tiny_data(), method=qv.FedBN(epochs=1), **given)
    other = qv.simulate(
        tiny_task(), tiny_data(), method=qv.FedAvg(epochs=1, weighting="uniform"), **given
    )
    for name, leaf in other.parameters(0).items():
        torch.testing.assert_close(run.parameters(0)[name], leaf)


def test_by_configuration_on_a_built_in_model(tmp_path: Any) -> None:
    experiment = Experiment.of(
        {
            "data": {"name": "digits", "clients": 3, "samples_per_client": 16},
            "model": {"name": "resnet8_bn"},
            "method": {"name": "fedbn", "epochs": 1},
            "topology": {"sampled": 2},
            "run": {"rounds": 1, "threads": 1},
        }
    )
    assert len(experiment.task.personal) == 9
    experiment.run(tmp_path / "run")
    saved = qv.load_run(tmp_path / "run")
    assert saved.config["method"]["name"] == "fedbn"
    assert saved.complete
