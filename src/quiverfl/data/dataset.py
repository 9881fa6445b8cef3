"""A data set before it is shared out between clients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quiverfl.card import Shown, shape, thousands
from quiverfl.data.on_disk import LARGE, pieces
from quiverfl.errors import QuiverError
from quiverfl.trees import leaves, mapped

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Inputs = npt.NDArray[Any]
"""uint8 images [n, channels, height, width]; or numbers (float32) or ids (int32, int64) of any
shape [n, …]."""
InputTree: TypeAlias = Any
"""Such an array, or several: a dictionary or tuple of them, each with a row per example."""
PerChannel: TypeAlias = Any
"""A number per channel; of several inputs a dictionary of them, by the names of the inputs."""
IDS = (np.int32, np.int64)
"""Kept as given: an embedding takes both."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(Shown):
    """Examples for training and testing, in the source's own order.

    Labels are 0 … classes - 1; their names are these numbers unless given. `mean` and `std` are
    per channel (axis 1), of inputs on the scale of [0, 1] where they are bytes; both empty means
    that the inputs are used as they are, and ids always are. Of several inputs those that are
    standardised are in both, by name. The owners, where given, are numbers
    0 … k - 1 that say whose example it is: what the `natural` partition follows.
    """

    name: str
    train_x: InputTree
    train_y: Integers
    test_x: InputTree
    test_y: Integers
    classes: int
    class_names: tuple[str, ...] = ()
    mean: PerChannel = ()
    std: PerChannel = ()
    train_owner: Integers | None = None
    test_owner: Integers | None = None
    owner_names: tuple[str, ...] = ()
    train_target: InputTree | None = None
    test_target: InputTree | None = None
    """What is to be learned where that is no label: numbers (float32) or ids (int64), [n, …], or
    several of them. The labels then only say who is shared out with whom."""
    known_digest: str = ""
    """What `digest` is, where it was computed before."""

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
            where = f"{self.name}, {part}"
            for path, leaf in leaves(x):
                _check_inputs(f"{where}, {path!r}" if path else where, leaf, len(y))
                if not self.known_digest:  # it was looked at before
                    _check_finite(f"{where}, {path!r}" if path else where, leaf)
            _check_labels(where, y, self.classes)
            owner = getattr(self, f"{part}_owner")
            _check_owners(where, owner, len(y), len(self.owner_names))
        if not len(self.train_y):
            raise QuiverError(f"{self.name} holds no training examples.")
        _check_both(self)
        _check_targets(self.name, self)
        if not self.class_names:
            names = tuple(str(label) for label in range(self.classes))
            object.__setattr__(self, "class_names", names)
        if len(self.class_names) != self.classes:
            raise QuiverError(
                f"{self.name}: {len(self.class_names)} class names for {self.classes} classes."
            )

    def title(self) -> str:
        return f"Dataset {self.name}"

    def facts(self) -> dict[str, str]:
        owners = 0 if self.train_owner is None else len(np.unique(self.train_owner))
        inputs = [
            f"{name}: {_inputs(leaf)}" if name else _inputs(leaf)
            for name, leaf in leaves(self.train_x)
        ]
        return {
            "train": thousands(len(self.train_y)),
            "test": thousands(len(self.test_y)),
            "inputs": ", ".join(inputs),
            "classes": thousands(self.classes),
            **({"owners": thousands(owners)} if owners else {}),
        }

    @property
    def input_shape(self) -> Any:
        """The shape of one example: what a model is made for. Of several inputs, of each."""
        return mapped(lambda leaf: tuple(int(side) for side in leaf.shape[1:]), self.train_x)

    @property
    def outputs(self) -> Any:
        """How many numbers a model has to say: one per class, per target, or per id there is.

        Of several targets, of each.
        """
        if self.train_target is None:
            return self.classes
        return mapped(_outputs, self.train_target, self.test_target)

    @property
    def is_ids(self) -> bool:
        """Whether the inputs are ids, such as those of words: whole numbers to be looked up."""
        return all(leaf.dtype in IDS for _, leaf in leaves(self.train_x))

    @property
    def is_image(self) -> bool:
        return self.is_one and self.train_x.ndim == 4 and not self.is_ids

    @property
    def is_one(self) -> bool:
        """Whether the inputs are one array."""
        return not isinstance(self.train_x, dict | tuple | list)

    @cached_property
    def digest(self) -> str:
        """A hash of every example: runs on other data are other runs, whatever its name."""
        if self.known_digest:
            return self.known_digest
        found = hashlib.blake2b(digest_size=16)
        found.update(repr((self.classes, self.mean, self.std)).encode())
        parts = (self.train_x, self.train_y, self.test_x, self.test_y)
        targets = (self.train_target, self.test_target)
        for tree in (*parts, self.train_owner, self.test_owner, *targets):
            for path, array in leaves(tree):
                if array is not None:
                    found.update(path.encode())
                    found.update(repr((array.shape, array.dtype.str)).encode())
                    for piece in pieces(array):
                        found.update(np.ascontiguousarray(piece).data)
        return found.hexdigest()


def _inputs(leaf: Inputs) -> str:
    return f"{shape(tuple(leaf.shape[1:]))} ({leaf.dtype})"


def _outputs(train: Inputs, test: Inputs) -> int:
    if train.dtype == np.float32:
        return 1 if train.ndim == 1 else int(train.shape[-1])
    return int(max(part.max(initial=0) for part in (train, test))) + 1


def _check_both(dataset: Dataset) -> None:
    """Training and test inputs are of one kind, and what is standardised can be."""
    train, test = dict(leaves(dataset.train_x)), dict(leaves(dataset.test_x))
    if not train:
        raise QuiverError(f"{dataset.name} has no inputs.")
    if list(train) != list(test):
        raise QuiverError(
            f"{dataset.name}: training inputs are {list(train)}, test inputs {list(test)}; they "
            "must be the same, in the same order."
        )
    for path, leaf in train.items():
        called = f"{path!r}: " if path else ""
        if len(dataset.test_y) and test[path].dtype != leaf.dtype:
            raise QuiverError(
                f"{dataset.name}: {called}training inputs are {leaf.dtype}, test inputs "
                f"{test[path].dtype}; they must be the same."
            )
        if len(dataset.test_y) and test[path].shape[1:] != leaf.shape[1:]:
            raise QuiverError(
                f"{dataset.name}: {called}training inputs have the shape {leaf.shape[1:]}, "
                f"test inputs {test[path].shape[1:]}; they must be the same."
            )
        standardised = dataset.mean if not path else path in (dataset.mean or ())
        if leaf.dtype in IDS and standardised:
            raise QuiverError(
                f"{dataset.name}: {called}the inputs are {leaf.dtype}, and ids are not "
                "standardised: leave mean and std out, or make the inputs float32 if they are "
                "numbers."
            )


def _check_targets(name: str, dataset: Dataset) -> None:
    train, test = dataset.train_target, dataset.test_target
    if train is None and test is None:
        return
    if train is None or test is None:
        raise QuiverError(f"{name}: train_target and test_target come together.")
    first, second = dict(leaves(train)), dict(leaves(test))
    if list(first) != list(second) or not first:
        raise QuiverError(
            f"{name}: training targets are {list(first)}, test targets {list(second)}; they must "
            "be the same, in the same order."
        )
    for path, target in first.items():
        called = f"{name}, {path!r}" if path else name
        other = second[path]
        _check_target(f"{called}, train", target, len(dataset.train_y))
        _check_target(f"{called}, test", other, len(dataset.test_y))
        if len(other) and (other.shape[1:] != target.shape[1:] or other.dtype != target.dtype):
            raise QuiverError(
                f"{called}: training targets are {target.dtype} of shape {list(target.shape[1:])}, "
                f"test targets {other.dtype} of shape {list(other.shape[1:])}; they must be the "
                "same."
            )


def _check_target(where: str, target: Inputs, rows: int) -> None:
    if len(target) != rows:
        raise QuiverError(f"{where}: {len(target)} targets but {rows} labels.")
    if target.dtype not in (np.float32, np.int64):
        raise QuiverError(f"{where}: targets are {target.dtype}; use float32 numbers or int64 ids.")
    if target.dtype == np.float32 and not np.isfinite(target).all():
        raise QuiverError(f"{where}: the targets hold NaN or infinity.")


def _check_inputs(where: str, x: Inputs, labels: int) -> None:
    if len(x) != labels:
        raise QuiverError(f"{where}: {len(x)} inputs but {labels} labels.")
    if x.dtype not in (np.uint8, np.float32, *IDS):
        raise QuiverError(
            f"{where}: inputs are {x.dtype}; use uint8 images, float32 numbers, or int32 or int64 "
            "ids."
        )
    if x.dtype == np.uint8 and x.ndim != 4:
        raise QuiverError(
            f"{where}: inputs of type uint8 must be images [n, channels, height, width], not "
            f"{list(x.shape)}; use float32 for numbers and int64 for ids."
        )


def _check_finite(where: str, x: Inputs) -> None:
    if x.dtype == np.float32 and not all(np.isfinite(piece).all() for piece in pieces(x)):
        raise QuiverError(f"{where}: the inputs hold NaN or infinity; clean the data first.")


def _check_labels(where: str, y: Integers, classes: int) -> None:
    if len(y) and not (y.min() >= 0 and y.max() < classes):
        value = int(y.min()) if y.min() < 0 else int(y.max())
        raise QuiverError(f"{where}: label {value} is out of range; labels are 0 … {classes - 1}.")


def _check_owners(where: str, owner: Integers | None, examples: int, names: int) -> None:
    if owner is None:
        return
    if len(owner) != examples:
        raise QuiverError(f"{where}: {len(owner)} owners for {examples} examples.")
    if names and owner.max(initial=0) >= names:
        raise QuiverError(f"{where}: owner {owner.max()} has no name; there are {names} names.")


def channel_statistics(x: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel (axis 1), bytes on the scale of [0, 1].

    In pieces and from the histogram of the bytes, so that a set on disk never becomes floats as a
    whole.
    """
    if x.dtype == np.uint8:
        levels = np.arange(256) / 255
        counts = _histograms(x)
        shares = counts / counts.sum(axis=1, keepdims=True)
        mean = shares @ levels
        std = np.sqrt(np.maximum(shares @ levels**2 - mean**2, 0.0))
    elif x.nbytes <= LARGE:
        axes, all_of_it = (0, *range(2, x.ndim)), x[:]
        mean = np.asarray(all_of_it.mean(axis=axes, dtype=np.float64))
        std = np.asarray(all_of_it.std(axis=axes, dtype=np.float64))
    else:
        mean, std = _moments(x)
    # A channel that never changes is only centred; dividing by zero would make it NaN.
    std = np.where(std > 0, std, 1.0)
    return tuple(float(v) for v in mean), tuple(float(v) for v in std)


def _histograms(x: Inputs) -> Integers:
    counts = np.zeros((x.shape[1], 256), dtype=np.int64)
    for piece in pieces(x):
        for channel, of in enumerate(counts):
            of += np.bincount(piece[:, channel].ravel(), minlength=256)
    return counts


def _moments(x: Inputs) -> tuple[Floats, Floats]:
    """Mean and standard deviation per channel, in two passes over the pieces."""
    count = np.prod(x.shape) / x.shape[1]
    mean, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    axes, sides = (0, *range(2, x.ndim)), (1, -1, *(1,) * (x.ndim - 2))
    for piece in pieces(x):
        mean += piece.sum(axis=axes, dtype=np.float64) / count
    for piece in pieces(x):
        squares += ((piece - mean.reshape(sides)) ** 2).sum(axis=axes)
    return mean, np.sqrt(squares / count)
