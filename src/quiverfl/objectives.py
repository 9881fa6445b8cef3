"""Losses and metrics by name.

A loss gives one number per sample. So does a metric whose value for a client is the mean over its
samples, such as accuracy; another one is a Metric: made from sums over the samples (F1,
perplexity), or from all of them at once (AUROC).

Outputs are logits: a tensor, or a dictionary's "logits", or the first of a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from quiverfl.errors import QuiverError, nearest
from quiverfl.references import is_reference, load_callable
from quiverfl.trees import Tree

PerSample: TypeAlias = Callable[[Tree, Tree], Tensor]
"""(outputs [n, …], targets [n, …]) → one number per sample [n]."""
NO_TOKEN = -100
"""A target that counts for nothing: padding."""


@dataclass(frozen=True)
class Metric:
    """A number per client that is no mean over its samples.

    With `value`: `of(outputs, targets)` gives every sample's share of some sums, [n, s], and
    `value(sums)` makes numbers [clients] of a client's sums [clients, s]. Without: `of` is given
    all samples of a client at once and gives its number.
    """

    of: Callable[[Tree, Tree], Any]
    value: Callable[[Tensor], Tensor] | None = None

    def __call__(self, outputs: Tree, targets: Tree) -> Any:
        return self.of(outputs, targets)


AnyMetric: TypeAlias = PerSample | Metric


def logits(outputs: Tree) -> Tensor:
    """Of what a model returns, the tensor that a built-in loss or metric looks at."""
    if isinstance(outputs, dict):
        if "logits" not in outputs and len(outputs) != 1:
            raise ValueError(
                f"outputs {list(outputs)} have no 'logits': write a loss and metrics of your own"
            )
        outputs = outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))
    if isinstance(outputs, tuple | list):
        outputs = outputs[0]
    found: Tensor = outputs
    return found


def _mean(values: Tensor) -> Tensor:
    """Per sample, over whatever dimensions it has left."""
    return values.flatten(1).mean(dim=1) if values.ndim > 1 else values


def cross_entropy(outputs: Tree, targets: Tensor) -> Tensor:
    """One class per sample: logits [n, classes], targets [n]."""
    return F.cross_entropy(logits(outputs), targets, reduction="none")


def bce(outputs: Tree, targets: Tensor) -> Tensor:
    """Any number of labels per sample, each true or not: logits and targets [n, labels] or [n]."""
    found, wanted = _alike(outputs, targets)
    return _mean(F.binary_cross_entropy_with_logits(found, wanted, reduction="none"))


def mse(outputs: Tree, targets: Tensor) -> Tensor:
    """Numbers: outputs and targets of one shape, or [n, 1] and [n]."""
    found, wanted = _alike(outputs, targets)
    return _mean((found - wanted) ** 2)


def next_token(outputs: Tree, targets: Tensor) -> Tensor:
    """A class at every place: logits [n, places, vocabulary], targets [n, places].

    Targets are those of the place itself (shift them beforehand); -100 counts for nothing.
    """
    losses, counted = _tokens(outputs, targets)
    return losses.sum(dim=1) / counted.sum(dim=1).clamp(min=1)


def _tokens(outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor]:
    found = logits(outputs)
    if found.ndim != 3 or targets.ndim != 2 or found.shape[:2] != targets.shape:
        raise ValueError(
            f"next_token needs logits [n, places, vocabulary] and targets [n, places], not "
            f"{list(found.shape)} and {list(targets.shape)}"
        )
    losses = F.cross_entropy(
        found.transpose(1, 2), targets, reduction="none", ignore_index=NO_TOKEN
    )
    return losses, (targets != NO_TOKEN).to(losses.dtype)


def _alike(outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor]:
    found = logits(outputs)
    if found.ndim == targets.ndim + 1 and found.shape[-1] == 1:
        found = found.squeeze(-1)
    if found.shape != targets.shape:
        raise ValueError(
            f"outputs {list(found.shape)} and targets {list(targets.shape)} must have the same "
            "shape"
        )
    return found, targets.to(found.dtype)


def correct(outputs: Tree, targets: Tensor) -> Tensor:
    """1 where the answer is right: its mean is the accuracy.

    One class per sample; of several labels, or of several places, the share that is right.
    """
    found = logits(outputs)
    if found.ndim == targets.ndim + 1 and found.shape[-1] > 1:
        right = (found.argmax(dim=-1) == targets).to(found.dtype)
        if right.ndim == 1:
            return right
        counted = (targets != NO_TOKEN).to(found.dtype)
        return (right * counted).flatten(1).sum(1) / counted.flatten(1).sum(1).clamp(min=1)
    found, wanted = _alike(found, targets)
    return _mean(((found > 0) == (wanted > 0.5)).to(found.dtype))


def absolute_error(outputs: Tree, targets: Tensor) -> Tensor:
    found, wanted = _alike(outputs, targets)
    return _mean((found - wanted).abs())


def _answers(outputs: Tree, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What is said and what is true of every class or label: 0 or 1, [n, classes]."""
    found = logits(outputs)
    if found.ndim == 2 and targets.ndim == 1 and found.shape[1] > 1:
        said, true = found.argmax(dim=1), targets
        return F.one_hot(said, found.shape[1]), F.one_hot(true, found.shape[1])
    found, wanted = _alike(outputs, targets)
    said, true = (found > 0).long(), (wanted > 0.5).long()
    return (said.unsqueeze(1), true.unsqueeze(1)) if said.ndim == 1 else (said, true)


def _hits(outputs: Tree, targets: Tensor) -> Tensor:
    said, true = _answers(outputs, targets)
    return torch.cat([said * true, said * (1 - true), (1 - said) * true], dim=1)


def _f1(sums: Tensor) -> Tensor:
    """2·tp / (2·tp + fp + fn), the mean over the classes that occur; NaN if none does."""
    true, false, missed = sums.chunk(3, dim=1)
    each = 2 * true / (2 * true + false + missed)  # NaN for a class that does not occur
    return each.nanmean(dim=1)


def _token_sums(outputs: Tree, targets: Tensor) -> Tensor:
    losses, counted = _tokens(outputs, targets)
    return torch.stack([losses.sum(dim=1), counted.sum(dim=1)], dim=1)


def _perplexity(sums: Tensor) -> Tensor:
    return torch.exp(sums[:, 0] / sums[:, 1])


def _auroc(outputs: Tree, targets: Tensor) -> float:
    """The chance that a true sample is ranked above a false one, ties counting half.

    Of several classes or labels the mean over those that have both; NaN if none has.
    """
    found = logits(outputs)
    if found.ndim == 2 and targets.ndim == 1 and found.shape[1] > 1:
        true = F.one_hot(targets, found.shape[1])
        found = found[:, 1:] - found[:, :1] if found.shape[1] == 2 else found.softmax(dim=1)
        true = true[:, 1:] if true.shape[1] == 2 else true
    else:
        found, wanted = _alike(outputs, targets)
        found, true = (part.reshape(len(part), -1) for part in (found, (wanted > 0.5).long()))
    return float(torch.stack([_ranked(*c) for c in zip(found.T, true.T, strict=True)]).nanmean())


def _ranked(scores: Tensor, true: Tensor) -> Tensor:
    _, place, ties = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ranks = (ties.cumsum(0) - (ties - 1) / 2)[place]
    positive = true.sum()
    pairs = positive * (len(true) - positive)
    above: Tensor = (ranks * true).sum() - positive * (positive + 1) / 2
    return above / pairs  # 0 / 0 where one of the two is missing


LOSSES: dict[str, PerSample] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": mse,
    "next_token": next_token,
}
METRICS: dict[str, AnyMetric] = {
    "accuracy": correct,
    "f1": Metric(_hits, _f1),
    "auroc": Metric(_auroc),
    "mae": absolute_error,
    "mse": mse,
    "perplexity": Metric(_token_sums, _perplexity),
}
USUAL: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("accuracy",),
    "bce": ("accuracy",),
    "mse": ("mae",),
    "next_token": ("perplexity",),
}
"""The metrics of a loss, where none are named. The first metric is what results are judged by."""


def find_loss(loss: str | PerSample) -> PerSample:
    """A loss by its name in LOSSES or as `module:function`, or a function as it is."""
    found: PerSample = _find("loss", loss, LOSSES)
    return found


def find_metrics(
    metrics: str | Sequence[str] | Mapping[str, str | AnyMetric] | None, loss: str | PerSample
) -> dict[str, AnyMetric]:
    """Metrics by name, those of the loss where none are named."""
    if metrics is None:
        metrics = USUAL.get(loss, ("accuracy",)) if isinstance(loss, str) else ("accuracy",)
    if isinstance(metrics, str):
        metrics = (metrics,)
    if not isinstance(metrics, Mapping):
        metrics = {str(name).rpartition(":")[2]: name for name in metrics}
    return {name: _find("metric", metric, METRICS) for name, metric in metrics.items()}


def _find(kind: str, wanted: Any, known: Mapping[str, Any]) -> Any:
    if callable(wanted):
        return wanted
    if not isinstance(wanted, str):
        raise QuiverError(
            f"{kind} = {wanted!r}: give a name ({', '.join(known)}) or a function of outputs and "
            "targets."
        )
    if is_reference(wanted):
        return load_callable(wanted)
    if wanted not in known:
        raise QuiverError(
            f"unknown {kind} {wanted!r}; {nearest(wanted, known)} Your own: module:function."
        )
    return known[wanted]
