"""Turn arrays of any type into a Dataset: inputs, labels, targets and owners.

Sources that come in one piece are split into training and test examples here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quiverfl.data.dataset import Dataset, Inputs, PerChannel, compute_channel_statistics
from quiverfl.data.examples import DiskRows
from quiverfl.errors import QuiverError, suggest
from quiverfl.seeds import stream
from quiverfl.trees import first_leaf, tree_leaves, tree_map_with_path
from quiverfl.types import AnyArray, Integers

Kinds: TypeAlias = str | Mapping[str, str] | None
"""One word for all inputs, or for all targets; or one for each, by name."""
COLOURS = (1, 3, 4)
KINDS = ("ids", "numbers")
"""Values of `data.options.inputs`."""
TARGETS = ("labels", "numbers", "ids")
"""Values of `data.options.targets`."""


MOST_CLASSES = 1_000_000


def from_arrays(
    name: str,
    where: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any],
    owners: tuple[AnyArray, AnyArray] | None = None,
    classes: int | None = None,
    inputs: Kinds = None,
    targets: Kinds = None,
    are_ids: Callable[[str, AnyArray], bool] = lambda path, x: False,
    notes: Sequence[str] = (),
    doubts: Sequence[str] = (),
) -> Dataset:
    """A Dataset whose inputs are normalised by channel, or ids; `where` is the file, for messages.

    Inputs and targets may be dictionaries. `inputs` says which of them are "ids" and which
    "numbers", `are_ids` where it does not. `targets` says that what is learned is "numbers" or
    "ids" and not a label, as several targets always are; all examples then have one label. To
    `notes` and `doubts` those about labels and owners are added.
    """
    ids = {path: _is_ids(path, x, inputs, are_ids) for path, x in tree_leaves(train[0])}

    def ready(path: str, x: AnyArray) -> Inputs:
        called = f"{where}, {path!r}" if path else where
        return to_ids(called, x) if ids[path] else to_inputs(called, x)

    train_x, test_x = (tree_map_with_path(ready, x) for x, _ in (train, test))
    train_target, test_target = to_targets(where, train[1], test[1], targets)
    labels = (train[1], test[1])
    if train_target is not None:
        first, second = (np.zeros(len(first_leaf(part)), np.int64) for part in labels)
        labels, classes = (first, second), 1
    elif classes is not None and (type(classes) is not int or not 1 <= classes <= MOST_CLASSES):
        raise QuiverError(
            f"data.options.classes = {classes!r}: it must be a whole number from 1 to "
            f"{MOST_CLASSES:,}, or left out."
        )
    train_y, test_y, class_names = to_labels(where, *labels, classes)
    train_owner = test_owner = None
    owner_names: tuple[str, ...] = ()
    if owners is not None:
        train_owner, test_owner, owner_names = _number_labels(*owners)
    mean, std = _channel_statistics(train_x, ids)
    alike = [
        *_doubt_similar_names(where, "classes", class_names),
        *_doubt_similar_names(where, "owners", owner_names),
    ]
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
        notes=(*notes, *_note_renumbering(where, labels[0], class_names)),
        doubts=(*doubts, *alike),
    )


def _channel_statistics(x: Any, ids: Mapping[str, bool]) -> tuple[PerChannel, PerChannel]:
    statistics = {
        path: compute_channel_statistics(leaf)
        for path, leaf in tree_leaves(x)
        if len(leaf) and not ids[path]
    }
    if "" in ids:
        return statistics.get("", ((), ()))
    return {path: mean for path, (mean, _) in statistics.items()}, {
        path: std for path, (_, std) in statistics.items()
    }


def to_inputs(where: str, x: Any) -> Inputs:
    """Bytes with two or three sides are images, channels first in the end; the rest is float32."""
    if isinstance(x, DiskRows):
        return x.with_change(lambda part: to_inputs(where, part))  # type: ignore[return-value]
    if x.ndim == 4 and x.shape[3] in COLOURS and x.shape[1] not in COLOURS:
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x)
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_):
        raise QuiverError(f"{where}: inputs are {x.dtype}; they must be numbers.")
    _check_axes(where, x)
    with np.errstate(over="ignore"):  # the data set refuses the infinity by name
        return np.ascontiguousarray(x, dtype=np.float32)


def to_ids(where: str, x: Any) -> Inputs:
    """Whole numbers of any shape [n, …]: int32 where given, which saves memory, else int64."""
    if isinstance(x, DiskRows):
        return x.with_change(lambda part: to_ids(where, part))  # type: ignore[return-value]
    if not np.issubdtype(x.dtype, np.integer):
        raise QuiverError(
            f"{where}: inputs are {x.dtype}, and ids are whole numbers: store them as integers, "
            "or set data.options.inputs = 'numbers'."
        )
    _check_axes(where, x)
    return np.ascontiguousarray(x, dtype=np.int32 if x.dtype == np.int32 else np.int64)


def _check_axes(where: str, x: AnyArray) -> None:
    if x.ndim < 2:
        raise QuiverError(
            f"{where}: inputs have the shape {list(x.shape)}; the first axis counts examples, so "
            "there must be at least one more."
        )


def _is_ids(
    path: str, x: AnyArray, inputs: Kinds, unless_said: Callable[[str, AnyArray], bool]
) -> bool:
    """Whether an input holds ids: by `data.options.inputs`, or by `unless_said` if it is silent."""
    said = _option_of("inputs", path, inputs, KINDS)
    return unless_said(path, x) if said is None else said == "ids"


def _option_of(option: str, path: str, kinds: Kinds, known: Sequence[str]) -> str | None:
    """The option for one input: one word for all, or a dictionary by name."""
    said = kinds.get(path) if isinstance(kinds, Mapping) else kinds
    if said is not None and said not in known:
        called = f"{option}.{path}" if isinstance(kinds, Mapping) else option
        raise QuiverError(f"data.options.{called} = {said!r}: {suggest(str(said), known)}")
    return said


def to_targets(where: str, train: Any, test: Any, kinds: Kinds) -> tuple[Any, Any]:
    """Numbers of any shape as float32 or ids as int64; nothing where labels are learned."""
    several = isinstance(train, dict | tuple)
    if not several and _option_of("targets", "", kinds, TARGETS) in (None, "labels"):
        return None, None

    def kind_of(path: str) -> str:
        said = _option_of("targets", path, kinds, TARGETS[1:] if several else TARGETS)
        whole = np.issubdtype(dict(tree_leaves(train))[path].dtype, np.integer)
        return said or ("ids" if whole else "numbers")

    def ready(path: str, part: AnyArray) -> Inputs:
        called = f"{where}, {path!r}" if path else where
        return _to_target(called, part, kind_of(path))

    return tree_map_with_path(ready, train), tree_map_with_path(ready, test)


def _to_target(where: str, part: AnyArray, kind: str) -> Inputs:
    wanted: Any = np.integer if kind == "ids" else np.number
    truth = kind == "numbers" and part.dtype == np.bool_
    if not np.issubdtype(part.dtype, wanted) and not truth:
        words = "whole numbers" if kind == "ids" else "numbers"
        raise QuiverError(
            f"{where}: targets are {part.dtype}; data.options.targets = {kind!r} needs {words}."
        )
    with np.errstate(over="ignore"):  # the data set refuses the infinity by name
        return np.ascontiguousarray(part, np.int64 if kind == "ids" else np.float32)


def to_labels(
    where: str, train: AnyArray, test: AnyArray, classes: int | None
) -> tuple[Integers, Integers, tuple[str, ...]]:
    """Labels as 0 … n - 1, and their names.

    0 … n - 1 stay as they are, and so do all whole numbers where `classes` says how many classes
    there are. Anything else is numbered in sorted order: text, and whole numbers such as 1, 2, 3.
    """
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
        if classes is None:
            return _whole_labels(where, first, second)
        _check_label_range(where, (first, second), classes)
        return first, second, tuple(str(label) for label in range(classes))
    first, second, names = _number_labels(train, test)
    if classes is not None and len(names) != classes:
        raise QuiverError(
            f"{where} holds {len(names)} classes ({', '.join(names[:5])}, …), not "
            f"data.options.classes = {classes}."
        )
    return first, second, names


def _whole_labels(
    where: str, train: Integers, test: Integers
) -> tuple[Integers, Integers, tuple[str, ...]]:
    values = np.unique(np.concatenate([train, test]))
    if len(values) and np.array_equal(values, np.arange(-1, len(values) - 1)):
        # By custom -1 marks an example without a label: a class of them would be learned.
        raise QuiverError(
            f"{where}: label -1 is out of range; labels are 0 … {max(len(values) - 2, 0)}. Leave "
            "out the examples that have no label; if -1 is a class, write the classes as text."
        )
    if np.array_equal(values, np.arange(len(values))):
        return train, test, tuple(str(label) for label in values)
    return _number_labels(train, test)


def _check_label_range(where: str, parts: Sequence[Integers], classes: int) -> None:
    for labels in parts:
        if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
            value = int(labels.min()) if labels.min() < 0 else int(labels.max())
            raise QuiverError(
                f"{where}: label {value} is out of range; labels are 0 … {classes - 1} where "
                f"data.options.classes = {classes}. Leave it out to have the labels numbered in "
                "their order."
            )


def _note_renumbering(where: str, labels: AnyArray, names: Sequence[str]) -> list[str]:
    """A note where whole-number labels got new numbers."""
    whole = np.issubdtype(labels.dtype, np.integer)
    if not whole or len(names) == 1 or list(names) == [str(label) for label in range(len(names))]:
        return []
    as_they_stand = "; data.options.classes = COUNT takes them as they stand"
    return [
        f"{where}: the labels {format_names(names)} are numbered 0 … {len(names) - 1} in this order"
        f"{as_they_stand if names[0][0] != '-' else ''}."
    ]


def _doubt_similar_names(where: str, what: str, names: Sequence[str]) -> list[str]:
    """A doubt where names differ only in case or in spaces at their ends."""
    same: dict[str, list[str]] = {}
    for name in names:
        same.setdefault(name.strip().casefold(), []).append(repr(name))
    several = [name for group in same.values() if len(group) > 1 for name in group]
    if not several:
        return []
    return [
        f"{where}: {format_names(several)} count as {len(several)} {what}, though they differ in "
        "case or in spaces alone: write them alike if they are the same."
    ]


def format_names(names: Sequence[str], most: int = 20) -> str:
    """Names in a sentence: all of them, or the first and the last ones and how many there are."""
    if len(names) <= most:
        return ", ".join(names)
    half = most // 2
    return f"{', '.join(names[:half])}, …, {', '.join(names[-half:])} ({len(names):,})"


def _number_labels(train: AnyArray, test: AnyArray) -> tuple[Integers, Integers, tuple[str, ...]]:
    names, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
    numbers = numbers.astype(np.int64)
    return numbers[: len(train)], numbers[len(train) :], tuple(str(name) for name in names)


def split_train_test(groups: npt.NDArray[Any], test_share: float) -> tuple[Integers, Integers]:
    """Positions for training and for testing, the same share of every group, always the same.

    Groups are classes or owners, by any value; each keeps something for training. The split
    belongs to the data set, not to an experiment, so it does not depend on its seed.
    """
    if not 0 <= test_share < 1:
        raise QuiverError(f"data.options.test_share = {test_share}: it must be in [0, 1).")
    chosen = np.zeros(len(groups), dtype=bool)
    _, numbers = np.unique(groups, return_inverse=True)
    for number in range(int(numbers.max(initial=-1)) + 1):
        members = np.flatnonzero(numbers == number)
        order = stream(0, "train-and-test", number).permutation(members)
        chosen[order[: min(round(test_share * len(members)), len(members) - 1)]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
