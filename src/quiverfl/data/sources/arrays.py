"""From whatever arrays a person has to a Dataset: inputs, labels and owners of any type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quiverfl.data.dataset import Dataset, Inputs, Integers, PerChannel, channel_statistics
from quiverfl.data.on_disk import Rows
from quiverfl.errors import QuiverError, nearest
from quiverfl.trees import first_leaf, leaves, mapped_by_path

Values = npt.NDArray[Any]
Kinds: TypeAlias = str | Mapping[str, str] | None
"""One word for all inputs, or for all targets; or one for each, by name."""
COLOURS = (1, 3, 4)
KINDS = ("ids", "numbers")
"""What `data.options.inputs` may be."""
TARGETS = ("labels", "numbers", "ids")
"""What `data.options.targets` may be."""


def from_arrays(
    name: str,
    where: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    owners: tuple[Values, Values] | None = None,
    classes: int | None = None,
    inputs: Kinds = None,
    targets: Kinds = None,
    are_ids: Callable[[str, Values], bool] = lambda path, x: False,
) -> Dataset:
    """A Dataset whose inputs are normalised by channel, or ids; `where` is the file, for messages.

    Inputs and targets may be dictionaries. `inputs` says which of them are "ids" and which
    "numbers", `are_ids` where it does not. `targets` says that what is learned is "numbers" or
    "ids" and not a label, as several targets always are; all examples then have one label.
    """
    ids = {path: _ids(path, x, inputs, are_ids) for path, x in leaves(train[0])}

    def ready(path: str, x: Values) -> Inputs:
        called = f"{where}, {path!r}" if path else where
        return as_ids(called, x) if ids[path] else as_inputs(called, x)

    train_x, test_x = (mapped_by_path(ready, x) for x, _ in (train, test))
    train_target, test_target = as_targets(where, train[1], test[1], targets)
    labels = (train[1], test[1])
    if train_target is not None:
        first, second = (np.zeros(len(first_leaf(part)), np.int64) for part in labels)
        labels, classes = (first, second), 1
    train_y, test_y, class_names = as_labels(where, *labels, classes)
    train_owner = test_owner = None
    owner_names: tuple[str, ...] = ()
    if owners is not None:
        train_owner, test_owner, owner_names = _numbered(*owners)
    mean, std = _statistics(train_x, ids)
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


def _statistics(x: Any, ids: Mapping[str, bool]) -> tuple[PerChannel, PerChannel]:
    found = {
        path: channel_statistics(leaf) for path, leaf in leaves(x) if len(leaf) and not ids[path]
    }
    if "" in ids:
        return found.get("", ((), ()))
    return {path: mean for path, (mean, _) in found.items()}, {
        path: std for path, (_, std) in found.items()
    }


def as_inputs(where: str, x: Any) -> Inputs:
    """Bytes with two or three sides are images, channels first in the end; the rest is float32."""
    if isinstance(x, Rows):
        return x.changed(lambda part: as_inputs(where, part))  # type: ignore[return-value]
    if x.ndim == 4 and x.shape[3] in COLOURS and x.shape[1] not in COLOURS:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x)
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
        raise QuiverError(f"{where}: inputs are {x.dtype}; they must be numbers.")
    _check_axes(where, x)
    return np.ascontiguousarray(x, dtype=np.float32)


def as_ids(where: str, x: Any) -> Inputs:
    """Whole numbers of any shape [n, …]: int32 where given, which saves memory, else int64."""
    if isinstance(x, Rows):
        return x.changed(lambda part: as_ids(where, part))  # type: ignore[return-value]
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


def _ids(path: str, x: Values, inputs: Kinds, unless_said: Callable[[str, Values], bool]) -> bool:
    """What `data.options.inputs` says of one of the inputs."""
    said = _said("inputs", path, inputs, KINDS)
    return unless_said(path, x) if said is None else said == "ids"


def _said(option: str, path: str, kinds: Kinds, known: Sequence[str]) -> str | None:
    """One word for all of them, or a dictionary by their names."""
    said = kinds.get(path) if isinstance(kinds, Mapping) else kinds
    if said is not None and said not in known:
        called = f"{option}.{path}" if isinstance(kinds, Mapping) else option
        raise QuiverError(f"data.options.{called} = {said!r}: {nearest(str(said), known)}")
    return said


def as_targets(where: str, train: Any, test: Any, kinds: Kinds) -> tuple[Any, Any]:
    """Numbers of any shape as float32 or ids as int64; nothing where labels are learned."""
    several = isinstance(train, dict | tuple)
    if not several and _said("targets", "", kinds, TARGETS) in (None, "labels"):
        return None, None

    def kind_of(path: str) -> str:
        said = _said("targets", path, kinds, TARGETS[1:] if several else TARGETS)
        whole = np.issubdtype(dict(leaves(train))[path].dtype, np.integer)
        return said or ("ids" if whole else "numbers")

    def ready(path: str, part: Values) -> Inputs:
        called = f"{where}, {path!r}" if path else where
        return _as_target(called, part, kind_of(path))

    return mapped_by_path(ready, train), mapped_by_path(ready, test)


def _as_target(where: str, part: Values, kind: str) -> Inputs:
    wanted: Any = np.integer if kind == "ids" else np.number
    truth = kind == "numbers" and part.dtype == np.bool_
    if not np.issubdtype(part.dtype, wanted) and not truth:
        words = "whole numbers" if kind == "ids" else "numbers"
        raise QuiverError(
            f"{where}: targets are {part.dtype}; data.options.targets = {kind!r} needs {words}."
        )
    return np.ascontiguousarray(part, np.int64 if kind == "ids" else np.float32)


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
