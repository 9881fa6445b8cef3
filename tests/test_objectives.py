"""Losses and metrics by name: against scikit-learn, by hand, and per client in ragged batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score
from torch import Tensor, nn

import quiverfl as qv
from quiverfl.objectives import LOSSES, METRICS, USUAL_METRICS, find_loss, find_metrics
from quiverfl.results.summary import headline_metric, higher_is_better

RANDOM = np.random.default_rng(3)
LOGITS = torch.from_numpy(RANDOM.normal(size=(60, 4)))
CLASSES = torch.from_numpy(RANDOM.integers(0, 3, 60))  # class 3 never occurs
LABELS = torch.from_numpy((RANDOM.random((60, 4)) < 0.4).astype(np.float64))


def value(name: str, outputs: Any, targets: Tensor) -> float:
    metric = METRICS[name]
    if not isinstance(metric, qv.Metric):
        return float(metric(outputs, targets).mean())
    if metric.value is None:
        return float(metric.of(outputs, targets))
    return float(metric.value(metric.of(outputs, targets).double().sum(dim=0, keepdim=True)))


def test_classes_as_scikit_learn_has_them() -> None:
    said = LOGITS.argmax(dim=1)
    assert value("accuracy", LOGITS, CLASSES) == pytest.approx(
        float((said == CLASSES).double().mean())
    )
    assert value("f1", LOGITS, CLASSES) == pytest.approx(f1_score(CLASSES, said, average="macro"))
    two, answers = LOGITS[:, :2], CLASSES % 2
    score = (two[:, 1] - two[:, 0]).numpy()
    assert value("auroc", two, answers) == pytest.approx(roc_auc_score(answers, score))
    three = LOGITS[:, :3]
    chances = three.softmax(dim=1).numpy()
    expected = roc_auc_score(CLASSES, chances, multi_class="ovr", average="macro")
    assert value("auroc", three, CLASSES) == pytest.approx(expected)


def test_labels_as_scikit_learn_has_them() -> None:
    said = (LOGITS > 0).long()
    assert value("f1", LOGITS, LABELS) == pytest.approx(f1_score(LABELS, said, average="macro"))
    assert value("auroc", LOGITS, LABELS) == pytest.approx(roc_auc_score(LABELS, LOGITS))
    assert value("accuracy", LOGITS, LABELS) == pytest.approx(
        float((said == LABELS).double().mean())
    )
    ties = (LOGITS > 0).double()
    assert value("auroc", ties, LABELS) == pytest.approx(roc_auc_score(LABELS, ties))
    alone = value("auroc", LOGITS[:, :1], LABELS[:, 0])
    assert alone == pytest.approx(roc_auc_score(LABELS[:, 0], LOGITS[:, 0]))


def test_a_metric_that_has_no_meaning_is_no_number() -> None:
    assert np.isnan(value("auroc", LOGITS[:, 0], torch.ones(60)))


def test_numbers() -> None:
    outputs, targets = torch.tensor([[1.0], [4.0]]), torch.tensor([3.0, 4.0])
    assert LOSSES["mse"](outputs, targets).tolist() == [4.0, 0.0]
    assert value("mae", outputs, targets) == mean_absolute_error([3, 4], [1, 4])
    several = LOSSES["mse"](torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 5.0]]))
    assert several.tolist() == [4.5]


def test_tokens_that_do_not_count() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, -100], [4, -100, -100]])
    chances = logits.log_softmax(dim=-1)
    first, second, third = chances[0, 0, 1], chances[0, 1, 2], chances[1, 0, 4]
    losses = LOSSES["next_token"](logits, targets)
    assert losses.tolist() == pytest.approx([float(-(first + second) / 2), float(-third)])
    expected = float(torch.exp(-(first + second + third) / 3))
    assert value("perplexity", logits, targets) == pytest.approx(expected)
    right = torch.zeros(1, 2, 3).scatter(2, torch.tensor([[[1], [0]]]), 1.0)
    assert METRICS["accuracy"](right, torch.tensor([[1, -100]])).tolist() == [1.0]
    assert METRICS["accuracy"](right, torch.tensor([[1, 2]])).tolist() == [0.5]


def test_outputs_of_a_hugging_face_model_and_of_a_tuple() -> None:
    plain = LOSSES["cross_entropy"](LOGITS, CLASSES)
    assert torch.equal(LOSSES["cross_entropy"]({"logits": LOGITS, "h": LOGITS}, CLASSES), plain)
    assert torch.equal(LOSSES["cross_entropy"]((LOGITS, LABELS), CLASSES), plain)
    with pytest.raises(ValueError, match="have no 'logits'"):
        LOSSES["cross_entropy"]({"a": LOGITS, "b": LOGITS}, CLASSES)


def test_names_are_looked_up_and_slips_are_named() -> None:
    assert set(USUAL_METRICS) == set(LOSSES)
    assert list(find_metrics(None, "mse")) == ["mae"]
    assert list(find_metrics("f1", "bce")) == ["f1"]
    with pytest.raises(qv.QuiverError, match=r"unknown loss 'bcee'; did you mean 'bce'"):
        find_loss("bcee")
    with pytest.raises(qv.QuiverError, match=r"unknown metric 'f2'; .*accuracy, auroc, f1"):
        qv.Task(lambda: nn.Linear(2, 2), personal=(), metrics=["f2"])
    with pytest.raises(qv.QuiverError, match="loss = 3: give a name"):
        qv.Task(lambda: nn.Linear(2, 2), personal=(), loss=3)


def test_which_way_is_better_goes_by_the_name() -> None:
    lower = ["loss", "mae", "mse", "perplexity", "calibration_error", "pinball_loss"]
    assert not any(higher_is_better(name) for name in lower)
    assert all(higher_is_better(name) for name in ("accuracy", "f1", "auroc", "own"))


class Net(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.body(x)))
        return logits


SIZES = (3, 9, 40, 0)


def run(task: qv.Task, targets: Any, **options: Any) -> tuple[qv.Run, Any]:
    random = np.random.default_rng(0)
    pairs = [(random.normal(size=(n, 3)), targets(random, n)) for n in SIZES[:3]]
    empty = [(np.zeros((0, 3)), targets(random, 0))]
    data = qv.FederatedData.from_arrays(pairs + [pairs[0]], pairs + empty)
    settings = {"rounds": 2, "dtype": torch.float64, "threads": 1, **options}
    return qv.simulate(
        task,
        data,
        method=qv.DFedPGP(),
        topology=qv.random_push(clients=4, neighbors=2, seed=0),
        training=qv.Training(lr=0.1, batch_size=8),
        **settings,
    ), pairs  # fmt: skip


@pytest.mark.parametrize("executor", ["vectorized", "sequential"])
def test_metrics_that_are_no_means_are_each_clients_own(executor: Any) -> None:
    """Ragged clients, one without test samples; in slabs, from sums and from whole predictions."""
    task = qv.Task(lambda: Net(4), loss="bce", metrics=["f1", "auroc", "accuracy"])
    found, pairs = run(task, lambda r, n: (r.random((n, 4)) < 0.5).astype(float), executor=executor)
    last = found.history.query("round == 1 and stage == 'mixed'").set_index("client")
    assert list(found.history.columns)[3:] == ["f1", "auroc", "accuracy", "loss"]
    assert found.summary["metric"] == headline_metric(found.history) == "f1"
    assert last.loc[3].iloc[2:].isna().all()
    for client, (x, y) in enumerate(pairs):
        logits = found.personal(client)(torch.as_tensor(x)).detach()
        for name in ("f1", "auroc", "accuracy"):
            assert last.loc[client, name] == pytest.approx(
                value(name, logits, torch.as_tensor(y)), nan_ok=True
            )


def test_an_error_is_better_when_it_is_lower() -> None:
    task = qv.Task(Net, loss="mse", metrics=["mae"])
    found, _ = run(task, lambda r, n: r.normal(size=n), rounds=4)
    means = found.history.query("stage == 'mixed'").groupby("round")["mae"].mean()
    assert found.summary["metric"] == "mae"
    assert found.summary["stages"]["mixed"]["best"]["mean"] == pytest.approx(means.min())


def test_ones_own_metric_from_sums() -> None:
    spread = qv.Metric(
        lambda out, y: torch.stack([out[:, 0], out[:, 0] ** 2, torch.ones_like(out[:, 0])], dim=1),
        lambda sums: (sums[:, 1] / sums[:, 2] - (sums[:, 0] / sums[:, 2]) ** 2).sqrt(),
    )
    task = qv.Task(Net, loss="mse", metrics={"spread": spread, "mae": "mae"})
    found, pairs = run(task, lambda r, n: r.normal(size=n))
    last = found.history.query("round == 1 and stage == 'mixed'").set_index("client")
    said = found.personal(2)(torch.as_tensor(pairs[2][0])).detach().numpy()
    assert last.loc[2, "spread"] == pytest.approx(said.std())


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"loss": nn.MSELoss()}, r"loss gives \(\) for 2 samples; .*one number per sample"),
        ({"loss": "cross_entropy"}, "for regression give loss='mse'"),
        (
            {"loss": "mse", "metrics": ["f1", "perplexity"]},
            "metric 'perplexity' cannot be computed",
        ),
        ({"loss": "mse", "metrics": {"a": qv.Metric(lambda o, y: o)}}, "'a' must give one number"),
        (
            {"loss": "mse", "metrics": {"a": qv.Metric(lambda o, y: y, lambda s: s)}},
            "'a' gives .* part of some sums",
        ),
        (
            {"loss": "mse", "metrics": {"a": qv.Metric(lambda o, y: o, lambda s: s.sum())}},
            r"'a': value\(sums",
        ),
        ({"loss": "mse", "metrics": {"loss": lambda o, y: y}}, "choose another name"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_round(task: Any, words: str) -> None:
    with pytest.raises(qv.QuiverError, match=words):
        run(qv.Task(Net, **task), lambda r, n: r.normal(size=n))
