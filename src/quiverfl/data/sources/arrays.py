"""From whatever arrays a person has to a Dataset: inputs, labels and owners of any type."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.data.dataset import Dataset, Inputs, Integers, channel_statistics
from quiverfl.errors import QuiverError, nearest

Values = npt.NDArray[Any]
COLOURS = (1, 3, 4)
KINDS = ("ids", "numbers")
"""What `data.options.inputs` may be."""
TARGETS = ("labels", "numbers", "ids")
"""What `data.options.targets` may be."""


def from_arrays(
    name: str,
    where: str,
    train: tuple[Values, Values],
    test: tuple[Values, Values],
    owners: tuple[Values, Values] | None = None,
    classes: int | None = None,
    ids: bool = False,
    targets: str | None = None,
) -> Dataset:
    """A Dataset whose inputs are normalised by channel, or ids; `where` is the file, for messages.

    `ids` keeps the inputs as the whole numbers they are. `targets` says that what is learned is
    "numbers" or "ids" and not a label; all examples then have one label.
    """
    train_x, test_x = (as_ids(where, x) if ids else as_inputs(where, x) for x, _ in (train, test))
    train_target, test_target = as_targets(where, train[1], test[1], targets)
    labels = (train[1], test[1])
    if train_target is not None:
        labels = (np.zeros(len(train[1]), np.int64), np.zeros(len(test[1]), np.int64))
        classes = 1
    train_y, test_y, class_names = as_labels(where, *labels, classes)
    train_owner = test_owner = None
    owner_names: tuple[str, ...] = ()
    if owners is not None:
        train_owner, test_owner, owner_names = _numbered(*owners)
    mean, std = channel_statistics(train_x) if len(train_x) and not ids else ((), ())
    return Dataset(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=len(class_names),
        class_names=class_names,
        mean=mean,
        std=std,
        train_owner=train_owner,
        test_owner=test_owner,
        owner_names=owner_names,
        train_target=train_target,
        test_target=test_target,
    )


def as_inputs(where: str, x: Values) -> Inputs:
    """Bytes with two or three sides are images, channels first in the end; the rest is float32."""
    if x.ndim == 4 and x.shape[3] in COLOURS and x.shape[1] not in COLOURS:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x)
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
        raise QuiverError(f"{where}: inputs are {x.dtype}; they must be numbers.")
    _check_axes(where, x)
    return np.ascontiguousarray(x, dtype=np.float32)


def as_ids(where: str, x: Values) -> Inputs:
    """Whole numbers of any shape [n, …]: int32 where given, which saves memory, else int64."""
    if not np.issubdtype(x.dtype, np.integer):
        raise QuiverError(
            f"{where}: inputs are {x.dtype}, and ids are whole numbers: store them as integers, "
            "or set data.options.inputs = 'numbers'."
        )
    _check_axes(where, x)
    return np.ascontiguousarray(x, dtype=np.int32 if x.dtype == np.int32 else np.int64)


def _check_axes(where: str, x: Values) -> None:
    if x.ndim < 2:
        raise QuiverError(
            f"{where}: inputs have the shape {list(x.shape)}; the first axis counts examples, so "
            "there must be at least one more."
        )


def are_ids(inputs: str | None, unless_said: bool) -> bool:
    """What `data.options.inputs` says the inputs are."""
    if inputs is None:
        return unless_said
    if inputs not in KINDS:
        raise QuiverError(f"data.options.inputs = {inputs!r}: {nearest(inputs, KINDS)}")
    return inputs == "ids"


def as_targets(
    where: str, train: Values, test: Values, kind: str | None
) -> tuple[Inputs | None, Inputs | None]:
    """Numbers of any shape as float32 or ids as int64; nothing where labels are learned."""
    if kind is None or kind == "labels":
        return None, None
    if kind not in TARGETS:
        raise QuiverError(f"data.options.targets = {kind!r}: {nearest(kind, TARGETS)}")
    wanted: Any = np.integer if kind == "ids" else np.number
    for part in (train, test):
        if not np.issubdtype(part.dtype, wanted) and not (
            kind == "numbers" and part.dtype == np.bool_
        ):
            words = "whole numbers" if kind == "ids" else "numbers"
            raise QuiverError(
                f"{where}: targets are {part.dtype}; data.options.targets = {kind!r} needs {words}."
            )
    kinds = np.int64 if kind == "ids" else np.float32
    return np.ascontiguousarray(train, kinds), np.ascontiguousarray(test, kinds)


def as_labels(
    where: str, train: Values, test: Values, classes: int | None
) -> tuple[Integers, Integers, tuple[str, ...]]:
    """Whole numbers are labels as they stand; anything else is numbered in sorted order."""
    for labels in (train, test):
        if labels.ndim != 1:
            raise QuiverError(
                f"{where}: labels have the shape {list(labels.shape)}, not [n]; set "
                "data.options.targets = 'numbers' or 'ids' to learn several per example."
            )
    for labels in (train, test):
        if np.issubdtype(labels.dtype, np.floating) and len(labels):
            raise QuiverError(
                f"{where}: labels are {labels.dtype}; use whole numbers or text, or set "
                "data.options.targets = 'numbers' to learn numbers."
            )
    if np.issubdtype(train.dtype, np.integer):
        if len(test) and not np.issubdtype(test.dtype, np.integer):
            raise QuiverError(
                f"{where}: training labels are {train.dtype}, test labels {test.dtype}; they must "
                "be of one kind."
            )
        first, second = train.astype(np.int64), test.astype(np.int64)
        largest = max(int(part.max(initial=-1)) for part in (first, second))
        count = largest + 1 if classes is None else classes
        return first, second, tuple(str(label) for label in range(count))
    first, second, names = _numbered(train, test)
    if classes is not None and len(names) != classes:
        raise QuiverError(
            f"{where} holds {len(names)} classes ({', '.join(names[:5])}, …), not "
            f"data.options.classes = {classes}."
        )
    return first, second, names


def _numbered(train: Values, test: Values) -> tuple[Integers, Integers, tuple[str, ...]]:
    names, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
    numbers = numbers.astype(np.int64)
    return numbers[: len(train)], numbers[len(train) :], tuple(str(name) for name in names)
