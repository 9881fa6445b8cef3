"""Frozen parameters stay where they are; a model that is no pure function is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quiverfl as qv
from authored import Plain
from quiverfl.engine.evaluation import client_model
from small import CLIENTS, REGULAR, TRAINING, tiny_data


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.body[0].weight.requires_grad_(False)


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_a_frozen_parameter_stays_is_not_sent_and_is_kept_once(executor: Any) -> None:
    task = qv.Task(Frozen)
    assert task.shared_layout.names == ("body.0.bias",)
    run = qv.simulate(
        task,
        tiny_data(),
        method=qv.DFedPGP(),
        topology=qv.random_push(CLIENTS, 2),
        training=TRAINING,
        rounds=3,
        seed=5,
        executor=executor,
    )
    frozen = task.skeleton.body[0].weight
    for client in range(CLIENTS):
        model: Any = run.personal(client)
        assert torch.equal(model.body[0].weight, frozen)
        assert not torch.equal(model.body[0].bias, task.skeleton.body[0].bias)
    assert int(run.rounds["network_bytes"].iloc[0]) == CLIENTS * 2 * (5 * 4 + 8)
    x = torch.randn(4, 6)
    program = run._shard.context.program()
    point = client_model(run._shard, 0, "mixed")[0]
    seen = program.call(program.named_params(point), x, features=False)
    torch.testing.assert_close(seen.outputs, run.personal(0)(x))


def test_a_model_with_nothing_to_train_is_refused() -> None:
    class Ice(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)

    class IceHead(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head.requires_grad_(False)

    with pytest.raises(qv.QuiverError, match=r"every parameter .* requires_grad=False"):
        qv.Task(Ice)
    with pytest.raises(qv.QuiverError, match="'head' matches frozen parameters only"):
        qv.Task(IceHead)


class Dropping(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.body(x), 0.5))


class Noisy(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x + torch.randn_like(x)))


class Choosing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden[:, torch.randperm(5)] if self.training else hidden)


class Mixing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden - hidden.mean(dim=0))


class Remembering(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(dim=0)
        return self.head(hidden - self.mean)


class Talking(Plain):
    def forward(self, x: Tensor) -> Any:
        return str(self.head(self.body(x)))


class Scoring(Plain):
    def forward(self, x: Tensor) -> Any:
        logits = self.head(self.body(x))
        return {"logits": logits, "score": logits.sum()}


@pytest.mark.parametrize("executor", ["auto", "sequential"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Dropping, "draws random numbers in evaluation.*training=self.training"),
        (Noisy, "draws random numbers in evaluation"),
        (Choosing, "draws random numbers with randperm"),
        (Mixing, "depends on the other samples of the batch"),
        (Remembering, "changes its buffer 'mean' in forward"),
        (Talking, "returns a str; it must return a tensor"),
        (Scoring, r"output 'score' has shape \(\) for 2 samples"),
    ],
)
def test_a_model_that_is_no_function_of_its_parameters_is_refused(
    model: Any, words: str, executor: Any
) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(qv.QuiverError, match=words):
        qv.simulate(
            qv.Task(model),
            tiny_data(),
            method=qv.DFedAvgM(),
            topology=REGULAR(CLIENTS),
            training=TRAINING,
            rounds=1,
            executor=executor,
        )
    assert torch.equal(torch.random.get_rng_state(), before)
