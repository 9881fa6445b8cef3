"""A head on features that are computed once, where the graph of the call proves that it is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quiverfl as qv
from authored import Plain
from quiverfl.engine.local.features import head_is_last
from quiverfl.models import MODELS, make_model
from small import CLIENTS, STAR, TRAINING, states, tiny_data


class Clamped(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).clamp(-0.1, 0.1)


class ClampedInPlace(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).clamp_(-0.1, 0.1)


class ReadsHead(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.head.weight.mean())


class ReadsHeadUnseen(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) * self.head.weight.detach().mean())


class Keyword(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(input=self.body(x))


class TwoArguments(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Bilinear(5, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x), self.body(x))


class Twice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) + self.head(self.body(-x))


class ChangedAfterwards(Plain):
    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(self.body(x))
        outputs.clamp_(-0.1, 0.1)
        return outputs


class Tied(Plain):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.head = nn.Linear(5, 5)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), self.head)


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
@pytest.mark.parametrize(
    "model",
    [
        Plain,
        Clamped,
        ClampedInPlace,
        ChangedAfterwards,
        ReadsHead,
        ReadsHeadUnseen,
        Keyword,
        TwoArguments,
        Twice,
        Tied,
    ],
)
@pytest.mark.parametrize("method", [qv.DFedPGP(personal_epochs=3), qv.FedRep(4, 1)], ids=str)
def test_a_head_is_trained_as_if_no_features_were_kept(
    method: Any, model: Any, executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = STAR(CLIENTS) if method.mass is None else qv.random_push(CLIENTS, 2)

    def run() -> list[Tensor]:
        found = qv.simulate(
            qv.Task(model),
            tiny_data(),
            method=method,
            topology=topology,
            training=TRAINING,
            rounds=2,
            dtype=torch.float64,
            executor=executor,
            threads=1,
        )
        proven.append(found._shard.trainer._head_is_last)
        return states(found)

    proven: list[bool | None] = []
    shortened = run()
    monkeypatch.setattr("quiverfl.engine.local.trainer.head_is_last", lambda *_: False)
    plain = run()
    assert proven == [model is Plain, False]
    for one, other in zip(shortened, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


class Branching(Plain):
    """Clamped for some inputs only: no call shows it, and no graph can be made of it."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(self.body(x))
        return outputs.clamp(-0.1, 0.1) if float(x.abs().max()) > 2 else outputs


class Deep(Plain):
    """A head of several layers is a head all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("model", "proven"), [(Plain, True), (Deep, True), (Branching, False), (Tied, False)]
)
def test_the_graph_of_the_call_is_the_proof(model: Any, proven: bool) -> None:
    assert head_is_last(model(), "head") is proven
    assert not head_is_last(model(), None)


def test_the_packages_models_have_proof() -> None:
    for name in MODELS:
        assert head_is_last(make_model(name, (3, 32, 32), 10), "head"), name


def test_features_are_asked_for_where_there_is_no_head() -> None:
    with pytest.raises(qv.QuiverError, match="name one submodule as personal"):
        qv.simulate(
            qv.Task(Plain, personal=()),
            tiny_data(),
            method=qv.MOON(),
            topology=STAR(CLIENTS),
            training=TRAINING,
            rounds=1,
        )
