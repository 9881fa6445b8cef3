"""Losses and metrics by name.

A loss gives one number per sample. So does a metric whose value for a client is the mean over its
samples, such as accuracy; another one is a Metric: made from sums over the samples (F1,
perplexity), or from all of them at once (AUROC).

Outputs are logits: a tensor, or a dictionary's "logits", or the first of a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from quiverfl.errors import QuiverError
from quiverfl.support.references import Registry
from quiverfl.trees import Tree

PerSample: TypeAlias = Callable[[Tree, Tree], Tensor]
"""(outputs [n, …], targets [n, …]) → one number per sample [n]."""
NO_TOKEN = -100
"""A target that counts for nothing: padding."""


@dataclass(frozen=True)
class Metric:
    """A number per client that is no mean over its samples.

    With `value`: `of(outputs, targets)` gives every sample's part of some sums, [n, s], and
    `value(sums)` makes numbers [clients] of a client's sums [clients, s]. Without: `of` is given
    all samples of a client at once and gives its number.
    """

    of: Callable[[Tree, Tree], Any]
    value: Callable[[Tensor], Tensor] | None = None

    def __call__(self, outputs: Tree, targets: Tree) -> Any:
        return self.of(outputs, targets)


AnyMetric: TypeAlias = PerSample | Metric


def logits(outputs: Tree) -> Tensor:
    """The tensor of a model's outputs that a built-in loss or metric reads."""
    if isinstance(outputs, dict):
        if "logits" not in outputs and len(outputs) != 1:
            raise ValueError(
                f"outputs {list(outputs)} have no 'logits': write a loss and metrics of your own"
            )
        outputs = outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    if isinstance(outputs, tuple | list):
        outputs = outputs[0]
    predictions: Tensor = outputs
    return predictions


def _mean(values: Tensor) -> Tensor:
    """Per sample, over whatever dimensions it has left."""
    return values.flatten(1).mean(dim=1) if values.ndim > 1 else values


def cross_entropy(outputs: Tree, targets: Tensor) -> Tensor:
    """One class per sample: logits [n, classes], targets [n]."""
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def bce(outputs: Tree, targets: Tensor) -> Tensor:
    """Any number of labels per sample, each true or not: logits and targets [n, labels] or [n]."""
    predictions, wanted = _check_same_shape(outputs, targets)
    return _mean(F.binary_cross_entropy_with_logits(predictions, wanted, reduction="none"))


def mse(outputs: Tree, targets: Tensor) -> Tensor:
    """Numbers: outputs and targets of one shape, or [n, 1] and [n]."""
    predictions, wanted = _check_same_shape(outputs, targets)
    return _mean((predictions - wanted) ** 2)


def next_token(outputs: Tree, targets: Tensor) -> Tensor:
    """A class at every place: logits [n, places, vocabulary], targets [n, places].

    Targets are those of the place itself (shift them beforehand); -100 counts for nothing.
    """
    losses, counted = _shift_tokens(outputs, targets)
    return losses.sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def _shift_tokens(outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor]:
    predictions = logits(outputs)
    if predictions.ndim != 3 or targets.ndim != 2 or predictions.shape[:2] != targets.shape:
        raise ValueError(
            f"next_token needs logits [n, places, vocabulary] and targets [n, places], not "
            f"{list(predictions.shape)} and {list(targets.shape)}"
        )
    losses = F.cross_entropy(
        predictions.transpose(1, 2), targets, reduction="none", ignore_index=NO_TOKEN
    )
    return losses, (targets != NO_TOKEN).to(losses.dtype)


def _check_same_shape(outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor]:
    predictions = logits(outputs)
    if predictions.ndim == targets.ndim + 1 and predictions.shape[-1] == 1:
        predictions = predictions.squeeze(-1)
    if predictions.shape != targets.shape:
        labels = "" if targets.is_floating_point() else "; of class labels take cross_entropy"
        raise ValueError(
            f"outputs {list(predictions.shape)} and targets {list(targets.shape)} must have the "
            f"same shape{labels}"
        )
    return predictions, targets.to(predictions.dtype)


def is_correct(outputs: Tree, targets: Tensor) -> Tensor:
    """1 where the answer is right: its mean is the accuracy.

    One class per sample; of several labels, or of several places, the fraction that is right.
    """
    predictions = logits(outputs)
    if predictions.ndim == targets.ndim + 1 and predictions.shape[-1] > 1:
        right = (predictions.argmax(dim=-1) == targets).to(predictions.dtype)
        if right.ndim == 1:
            return right
        counted = (targets != NO_TOKEN).to(predictions.dtype)
        return (right * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)
    predictions, wanted = _check_same_shape(predictions, targets)
    return _mean(((predictions > 0) == (wanted > 0.5)).to(predictions.dtype))


def absolute_error(outputs: Tree, targets: Tensor) -> Tensor:
    predictions, wanted = _check_same_shape(outputs, targets)
    return _mean((predictions - wanted).abs())


def _predict(outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What is said and what is true of every class or label: 0 or 1, [n, classes]."""
    predictions = logits(outputs)
    if predictions.ndim == 2 and targets.ndim == 1 and predictions.shape[1] > 1:
        said, true = predictions.argmax(dim=1), targets
        return F.one_hot(said, predictions.shape[1]), F.one_hot(true, predictions.shape[1])
    predictions, wanted = _check_same_shape(outputs, targets)
    said, true = (predictions > 0).long(), (wanted > 0.5).long()
    return (said.unsqueeze(1), true.unsqueeze(1)) if said.ndim == 1 else (said, true)


def _count_hits(outputs: Tree, targets: Tensor) -> Tensor:
    said, true = _predict(outputs, targets)
    return torch.cat([said * true, said * (1 - true), (1 - said) * true], dim=1)


def _compute_f1(sums: Tensor) -> Tensor:
    """2·tp / (2·tp + fp + fn), the mean over the classes that occur; NaN if none does."""
    true, false, missed = sums.chunk(3, dim=1)
    each = 2 * true / (2 * true + false + missed)  # NaN for a class that does not occur
    return each.nanmean(dim=1)


def _sum_tokens(outputs: Tree, targets: Tensor) -> Tensor:
    losses, counted = _shift_tokens(outputs, targets)
    return torch.stack([losses.sum(dim=1), counted.sum(dim=1)], dim=1)


def _compute_perplexity(sums: Tensor) -> Tensor:
    return torch.exp(sums[:, 0] / sums[:, 1])


def _compute_auroc(outputs: Tree, targets: Tensor) -> float:
    """The chance that a true sample is ranked above a false one, ties counting half.

    With several classes or labels, the mean over those that have both; NaN if none has.
    """
    predictions = logits(outputs)
    if predictions.ndim == 2 and targets.ndim == 1 and predictions.shape[1] > 1:
        true = F.one_hot(targets, predictions.shape[1])
        predictions = (
            predictions[:, 1:] - predictions[:, :1]
            if predictions.shape[1] == 2
            else predictions.softmax(dim=1)
        )
        true = true[:, 1:] if true.shape[1] == 2 else true
    else:
        predictions, wanted = _check_same_shape(outputs, targets)
        predictions, true = (
            part.reshape(len(part), -1) for part in (predictions, (wanted > 0.5).long())
        )
    return float(
        torch.stack([_rank_scores(*c) for c in zip(predictions.T, true.T, strict=True)]).nanmean()
    )


def _rank_scores(scores: Tensor, true: Tensor) -> Tensor:
    _, place, ties = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ranks = (ties.cumsum(0) - (ties - 1) / 2)[place]
    positive = true.sum()
    pairs = positive * (len(true) - positive)
    above: Tensor = (ranks * true).sum() - positive * (positive + 1) / 2
    return above / pairs  # 0 / 0 where one of the two is missing


_LOSSES: dict[str, PerSample] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": mse,
    "next_token": next_token,
}
_METRICS: dict[str, AnyMetric] = {
    "accuracy": is_correct,
    "f1": Metric(_count_hits, _compute_f1),
    "auroc": Metric(_compute_auroc),
    "mae": absolute_error,
    "mse": mse,
    "perplexity": Metric(_sum_tokens, _compute_perplexity),
}
LOSSES = Registry("loss", _LOSSES, own="module:function")
METRICS = Registry("metric", _METRICS, own="module:function")
USUAL_METRICS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("accuracy",),
    "bce": ("accuracy",),
    "mse": ("mae",),
    "next_token": ("perplexity",),
}
"""The metrics of a loss, where none are named. The first metric is what results are judged by."""


def find_loss(loss: str | PerSample) -> PerSample:
    """A loss by its name in LOSSES or as `module:function`, or a function as it is."""
    return _find(LOSSES, loss)


def find_metrics(
    metrics: str | Sequence[str] | Mapping[str, str | AnyMetric] | None, loss: str | PerSample
) -> dict[str, AnyMetric]:
    """Metrics by name, those of the loss where none are named."""
    if metrics is None:
        metrics = USUAL_METRICS.get(loss, ("accuracy",)) if isinstance(loss, str) else ("accuracy",)
    if isinstance(metrics, str):
        metrics = (metrics,)
    if not isinstance(metrics, Mapping | Iterable):
        metrics = (metrics,)
    if not isinstance(metrics, Mapping):
        metrics = {str(name).rpartition(":")[2]: name for name in metrics}
    return {name: _find(METRICS, metric) for name, metric in metrics.items()}


Function = TypeVar("Function")


def _find(registry: Registry[Function], wanted: Any) -> Function:
    if callable(wanted):
        function: Function = wanted
        return function
    if not isinstance(wanted, str):
        raise QuiverError(
            f"{registry.kind} = {wanted!r}: give a name ({', '.join(registry)}) or a function of "
            "outputs and targets."
        )
    return registry.find(wanted)
