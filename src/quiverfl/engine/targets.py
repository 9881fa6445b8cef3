"""Targets that do not fit the loss: the usual slips, each with what to write instead."""

from __future__ import annotations

from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.objectives import cross_entropy
from quiverfl.task import Task
from quiverfl.trees import Tree


def check_targets(task: Task, y: Tree, outputs: Tree) -> None:
    """Labels for the default loss, as they are in the data; other losses say it themselves."""
    if task.loss is cross_entropy and isinstance(y, Tensor) and isinstance(outputs, Tensor):
        _check_labels(y, outputs)


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
            "numbers. Several labels take loss='bce', several numbers loss='mse', next tokens "
            "loss='next_token' (Task(loss=…) or [task])."
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
            "regression give loss='mse' (Task(loss='mse') or [task]), or a loss of your own that "
            "gives one number per sample."
        )
