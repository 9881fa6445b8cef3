"""Targets that do not fit the loss: the usual slips, each with what to write instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.errors import QuiverError
from quiverfl.task import Task, cross_entropy


def check_targets(task: Task, data: FederatedData, outputs: Tensor) -> None:
    """Two samples' outputs with their targets: labels for the default loss, one number a sample."""
    y: Any = data.train.y
    if task.loss is cross_entropy and isinstance(y, Tensor):
        _check_labels(y, outputs)
    _check_loss(task, y, outputs)


def _check_labels(y: Tensor, outputs: Tensor) -> None:
    """What cross-entropy takes: one class number for each row of outputs."""
    shape = tuple(y.shape[1:])
    if y.ndim == 2 and y.shape[1] > 1 and outputs.ndim == 2 and y.shape[1] == outputs.shape[1]:
        whole = bool(((y == 0) | (y == 1)).all())
        if whole and bool((y.sum(dim=1) == 1).all()):
            raise QuiverError(
                f"the labels are one-hot ({y.shape[1]} columns): give class numbers, "
                "y.argmax(axis=1)."
            )
        raise QuiverError(
            f"targets of shape {shape} and the default loss, cross-entropy: it takes class "
            "numbers. For several labels or numbers give Task(loss=…), one number per sample."
        )
    if y.ndim == 2 and y.shape[1] == 1:
        raise QuiverError("the labels have shape (n, 1): give a flat array, y.reshape(-1).")
    if y.is_floating_point():
        if bool((y == y.round()).all()):
            raise QuiverError(
                f"the labels are {str(y.dtype).removeprefix('torch.')}: make them whole numbers, "
                "y.astype(int)."
            )
        raise QuiverError(
            "the targets are numbers, not classes, and the default loss is cross-entropy: for "
            "regression give Task(loss=…, metrics={}) with a loss that gives one number per "
            "sample, such as lambda outputs, y: (outputs.squeeze(-1) - y) ** 2."
        )


def _check_loss(task: Task, y: Any, outputs: Tensor) -> None:
    two = y[:2] if isinstance(y, Tensor) else None
    if two is None:
        return
    two = torch.cat([two, two])[:2]
    two = two.to(outputs.dtype) if two.is_floating_point() else two
    for what, function in (("loss", task.loss), *task.metrics.items()):
        try:
            with torch.no_grad():
                found: Any = function(outputs, two)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise QuiverError(
                f"the {what} cannot be computed from outputs of shape {tuple(outputs.shape[1:])} "
                f"and targets of shape {tuple(two.shape[1:])} ({two.dtype}): {first.rstrip('.')}."
            ) from error
        if not isinstance(found, Tensor) or tuple(found.shape) != (2,):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise QuiverError(
                f"the {what} gives {shape} for 2 samples; it must give one number per sample, "
                "(2,): use reduction='none' and take the mean over the other dimensions."
            )
