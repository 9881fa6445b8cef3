"""Evaluation of clients one by one: together what can be done once, each as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.engine import evaluation
from quiverfl.task import Params

TEST_SIZES = (7, 3, 0, 7, 30, 1, 3, 520)
"""Some alike, one without any, one of more than a slab."""


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(2, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)).mean((2, 3)))


def of_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """Shares of a metric that is a ratio of sums: hits of class 1, and its samples."""
    ours = targets == 1
    hit = ours & (outputs.argmax(dim=1) == 1)
    return torch.stack([hit, ours], dim=1).double()


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric of all samples at once."""
    return outputs[:, 0].max() - outputs[:, 0].min()


METRICS = {
    "recall": qv.Metric(of_class, value=lambda sums: sums[:, 0] / sums[:, 1].clamp_min(1)),
    "spread": qv.Metric(spread),
}


def split(sizes: tuple[int, ...], seed: int) -> list[Any]:
    draws = np.random.default_rng(seed)
    return [
        (draws.normal(size=(size, 2, 6, 6)).astype("float32"), draws.integers(0, 3, size))
        for size in sizes
    ]


class Counting(qv.DFedPGP):
    """DFedPGP that counts how often its `personal` is asked."""

    name, title = "counting", "Counting"
    calls = 0

    def personal(self, state: Any) -> Params:
        Counting.calls += 1
        return super().personal(state)


def evaluate(threads: int = 1) -> tuple[qv.Run, int]:
    """A run, and how often `personal` was asked in it."""
    data = qv.FederatedData.from_arrays(
        train=split((5,) * len(TEST_SIZES), 0), test=split(TEST_SIZES, 1)
    )
    task = qv.Task(Convolving, metrics=METRICS)
    Counting.calls = 0
    run = qv.simulate(
        task,
        data,
        method=Counting(shared_epochs=1),
        topology=qv.random_push(len(TEST_SIZES), 2),
        training=qv.Training(lr=0.1, batch_size=5),
        rounds=1,
        threads=threads,
        keep_local=False,
    )
    return run, Counting.calls


@pytest.mark.parametrize("threads", [1, 2])
def test_metrics_have_the_bits_of_each_client_alone(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, few = evaluate(threads)
    monkeypatch.setattr(evaluation, "MOST_MODELS", 1)
    alone, many = evaluate(threads)
    assert together.history.equals(alone.history)
    assert together.summary["carried_out"]["executor"] == "sequential"
    clients, stages = len(TEST_SIZES), 2
    assert many - few == stages * (clients - threads)


def test_metrics_are_those_of_the_models_by_hand() -> None:
    run, _ = evaluate()
    rows = run.history[run.history.stage == "mixed"].set_index("client")
    for client, (x, y) in enumerate(split(TEST_SIZES, 1)):
        row = rows.loc[client]
        if not len(y):
            assert row[["loss", "recall", "spread"]].isna().all()
            continue
        with torch.no_grad():
            outputs = run.personal(client)(torch.from_numpy(x))
        targets = torch.from_numpy(y)
        right = outputs.argmax(dim=1) == targets
        ones = targets == 1
        assert row.loss == pytest.approx(
            float(nn.functional.cross_entropy(outputs.double(), targets)), rel=1e-5
        )
        assert row.recall == pytest.approx(float((right & ones).sum()) / max(1, int(ones.sum())))
        assert row.spread == pytest.approx(float(spread(outputs, targets)), rel=1e-4)
