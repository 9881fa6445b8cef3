"""A data set before it is shared out between clients."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.card import Shown, shape, whole
from quiverfl.errors import QuiverError

Integers = npt.NDArray[np.int64]
Inputs = npt.NDArray[Any]
"""uint8 images [n, channels, height, width]; or numbers (float32) or ids (int32, int64) of any
shape [n, …]."""
IDS = (np.int32, np.int64)
"""Kept as given: an embedding takes both."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(Shown):
    """Examples for training and testing, in the source's own order.

    Labels are 0 … classes - 1; their names are these numbers unless given. `mean` and `std` are
    per channel (axis 1), of inputs on the scale of [0, 1] where they are bytes; both empty means
    that the inputs are used as they are, and ids always are. The owners, where given, are numbers
    0 … k - 1 that say whose example it is: what the `natural` partition follows.
    """

    name: str
    train_x: Inputs
    train_y: Integers
    test_x: Inputs
    test_y: Integers
    classes: int
    class_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    train_owner: Integers | None = None
    test_owner: Integers | None = None
    owner_names: tuple[str, ...] = ()
    train_target: Inputs | None = None
    test_target: Inputs | None = None
    """What is to be learned where that is no label: numbers (float32) or ids (int64), [n, …]. The
    labels then only say who is shared out with whom."""
    known_digest: str = ""
    """What `digest` is, where it was computed before."""

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
            owner = getattr(self, f"{part}_owner")
            _check_part(f"{self.name}, {part}", x, y, self.classes)
            _check_owners(f"{self.name}, {part}", owner, len(y), len(self.owner_names))
        if not len(self.train_y):
            raise QuiverError(f"{self.name} holds no training examples.")
        if len(self.test_y) and self.test_x.dtype != self.train_x.dtype:
            raise QuiverError(
                f"{self.name}: training inputs are {self.train_x.dtype}, test inputs "
                f"{self.test_x.dtype}; they must be the same."
            )
        if len(self.test_y) and self.test_x.shape[1:] != self.train_x.shape[1:]:
            raise QuiverError(
                f"{self.name}: training inputs have the shape {self.train_x.shape[1:]}, "
                f"test inputs {self.test_x.shape[1:]}; they must be the same."
            )
        _check_targets(self.name, self)
        if self.is_ids and (self.mean or self.std):
            raise QuiverError(
                f"{self.name}: the inputs are {self.train_x.dtype}, and ids are not standardised: "
                "leave mean and std out, or make the inputs float32 if they are numbers."
            )
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
        return {
            "train": whole(len(self.train_y)),
            "test": whole(len(self.test_y)),
            "inputs": f"{shape(self.input_shape)} ({self.train_x.dtype})",
            "classes": whole(self.classes),
            **({"owners": whole(owners)} if owners else {}),
        }

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example: what a model is made for."""
        return tuple(int(side) for side in self.train_x.shape[1:])

    @property
    def outputs(self) -> int:
        """How many numbers a model has to say: one per class, per target, or per id there is."""
        target = self.train_target
        if target is None:
            return self.classes
        if target.dtype == np.float32:
            return 1 if target.ndim == 1 else int(target.shape[-1])
        parts = [part for part in (target, self.test_target) if part is not None]
        return int(max(part.max(initial=0) for part in parts)) + 1

    @property
    def is_ids(self) -> bool:
        """Whether the inputs are ids, such as those of words: whole numbers to be looked up."""
        return self.train_x.dtype in IDS

    @property
    def is_image(self) -> bool:
        return len(self.input_shape) == 3 and not self.is_ids

    @cached_property
    def digest(self) -> str:
        """A hash of every example: runs on other data are other runs, whatever its name."""
        if self.known_digest:
            return self.known_digest
        found = hashlib.blake2b(digest_size=16)
        found.update(repr((self.classes, self.mean, self.std)).encode())
        parts = (self.train_x, self.train_y, self.test_x, self.test_y)
        targets = (self.train_target, self.test_target)
        for array in (*parts, self.train_owner, self.test_owner, *targets):
            if array is not None:
                found.update(repr((array.shape, array.dtype.str)).encode())
                found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def _check_targets(name: str, dataset: Dataset) -> None:
    train, test = dataset.train_target, dataset.test_target
    if train is None and test is None:
        return
    if train is None or test is None:
        raise QuiverError(f"{name}: train_target and test_target come together.")
    for part, target, rows in (("train", train, dataset.train_y), ("test", test, dataset.test_y)):
        if len(target) != len(rows):
            raise QuiverError(f"{name}, {part}: {len(target)} targets but {len(rows)} labels.")
        if target.dtype not in (np.float32, np.int64):
            raise QuiverError(
                f"{name}, {part}: targets are {target.dtype}; use float32 numbers or int64 ids."
            )
        if target.dtype == np.float32 and not np.isfinite(target).all():
            raise QuiverError(f"{name}, {part}: the targets hold NaN or infinity.")
    if len(test) and (test.shape[1:] != train.shape[1:] or test.dtype != train.dtype):
        raise QuiverError(
            f"{name}: training targets are {train.dtype} of shape {list(train.shape[1:])}, test "
            f"targets {test.dtype} of shape {list(test.shape[1:])}; they must be the same."
        )


def _check_part(where: str, x: Inputs, y: Integers, classes: int) -> None:
    if len(x) != len(y):
        raise QuiverError(f"{where}: {len(x)} inputs but {len(y)} labels.")
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
    if x.dtype == np.float32 and not np.isfinite(x).all():
        raise QuiverError(f"{where}: the inputs hold NaN or infinity; clean the data first.")
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

    In pieces and from the histogram of the bytes, so that a memory-mapped set is read once and
    never becomes floats as a whole.
    """
    if x.dtype == np.uint8:
        levels = np.arange(256) / 255
        counts = np.stack([_histogram(x, channel) for channel in range(x.shape[1])])
        shares = counts / counts.sum(axis=1, keepdims=True)
        mean = shares @ levels
        std = np.sqrt(np.maximum(shares @ levels**2 - mean**2, 0.0))
    else:
        axes = (0, *range(2, x.ndim))
        mean = np.asarray(x.mean(axis=axes, dtype=np.float64))
        std = np.asarray(x.std(axis=axes, dtype=np.float64))
    # A channel that never changes is only centred; dividing by zero would make it NaN.
    std = np.where(std > 0, std, 1.0)
    return tuple(float(v) for v in mean), tuple(float(v) for v in std)


def _histogram(x: Inputs, channel: int, rows: int = 4096) -> Integers:
    counts = np.zeros(256, dtype=np.int64)
    for start in range(0, len(x), rows):
        counts += np.bincount(x[start : start + rows, channel].ravel(), minlength=256)
    return counts
