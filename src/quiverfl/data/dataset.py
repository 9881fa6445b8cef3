"""A data set before it is partitioned between clients."""

from __future__ import annotations

import hashlib
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quiverfl.data.examples import LARGE, iterate_pieces
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.support.cards import ReprCard, format_shape, format_thousands
from quiverfl.trees import tree_leaves, tree_map
from quiverfl.types import Floats, Integers

log = logging.getLogger("quiverfl.data")
Inputs = npt.NDArray[Any]
"""uint8 images [n, channels, height, width]; or numbers (float32) or ids (int32, int64) of any
shape [n, …]."""
InputTree: TypeAlias = Any
"""An array, or a dictionary or tuple of arrays, each with a row per example."""
PerChannel: TypeAlias = Any
"""A number per channel; with several inputs a dictionary of them, by input name."""
IDS = (np.int32, np.int64)
"""Kept as given: an embedding takes both."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(ReprCard):
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
    """Targets that are not labels: numbers (float32) or ids (int64), [n, …], or several of them.
    Labels are then used only for partitioning."""
    known_digest: str = ""
    """The value of `digest`, if it was computed before."""
    notes: tuple[str, ...] = ()
    """Decisions of the reader, such as which columns are inputs: a sentence each."""
    doubts: tuple[str, ...] = ()
    """Possible mistakes in the data that stop nothing: a sentence each."""
    columns: Any = ()
    """Names of the input columns of a table; with several inputs a dictionary of them."""
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of the columns that hold numbers in place of text: 0 stands for the first."""

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
            where = f"{self.name}, {part}"
            for path, leaf in tree_leaves(x):
                _check_inputs(f"{where}, {path!r}" if path else where, leaf, len(y))
                if not self.known_digest:  # the same data was checked before
                    _check_finite(f"{where}, {path!r}" if path else where, leaf)
            _check_labels(where, y, self.classes)
            owner = getattr(self, f"{part}_owner")
            _check_owners(where, owner, len(y), len(self.owner_names))
        if not len(self.train_y):
            raise QuiverError(f"{self.name} holds no training examples.")
        _check_same_form(self.name, "inputs", self.train_x, self.test_x)
        _check_standardised(self)
        _check_targets(self)
        if not self.class_names:
            names = tuple(str(label) for label in range(self.classes))
            object.__setattr__(self, "class_names", names)
        if len(self.class_names) != self.classes:
            raise QuiverError(
                f"{self.name}: {len(self.class_names)} class names for {self.classes} classes."
            )

    def title(self) -> str:
        return f"Dataset {self.name}"

    def fields(self) -> dict[str, str]:
        owners = 0 if self.train_owner is None else len(np.unique(self.train_owner))
        inputs = [
            f"{name}: {_describe_inputs(leaf)}" if name else _describe_inputs(leaf)
            for name, leaf in tree_leaves(self.train_x)
        ]
        return {
            "train": format_thousands(len(self.train_y)),
            "test": format_thousands(len(self.test_y)),
            "inputs": ", ".join(inputs),
            "classes": format_thousands(self.classes),
            **({"owners": format_thousands(owners)} if owners else {}),
            **({"notes": " ".join(self.notes)} if self.notes else {}),
        }

    def with_normalization(self, mean: Sequence[float], std: Sequence[float]) -> Dataset:
        """The same examples, standardised by these numbers per channel, as given weights want it.

        Those of images are on the scale of [0, 1].
        """
        if not self.is_single_array or self.is_ids:
            raise QuiverError(f"{self.name}: only a single array of numbers can be normalised.")
        # The examples are the same, so the digest stays.
        return replace(self, mean=tuple(mean), std=tuple(std), known_digest=self.digest)

    @property
    def input_shape(self) -> Any:
        """The shape of one example, for which a model is made; a tree for several inputs."""
        return tree_map(lambda leaf: tuple(int(side) for side in leaf.shape[1:]), self.train_x)

    @property
    def outputs(self) -> Any:
        """Size of a model's output: one number per class, per target, or per known id.

        A tree of sizes if there are several targets.
        """
        if self.train_target is None:
            return self.classes
        return tree_map(_output_size, self.train_target, self.test_target)

    @property
    def is_ids(self) -> bool:
        """Whether the inputs are ids, such as those of words: whole numbers to be looked up."""
        return all(leaf.dtype in IDS for _, leaf in tree_leaves(self.train_x))

    @property
    def is_image(self) -> bool:
        return self.is_single_array and self.train_x.ndim == 4 and not self.is_ids

    @property
    def is_single_array(self) -> bool:
        """Whether the inputs are one array."""
        return not isinstance(self.train_x, dict | tuple | list)

    @cached_property
    def digest(self) -> str:
        """A hash of every example: runs on other data are other runs, whatever its name."""
        if self.known_digest:
            return self.known_digest
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.classes, self.mean, self.std)).encode())
        parts = (self.train_x, self.train_y, self.test_x, self.test_y)
        targets = (self.train_target, self.test_target)
        for tree in (*parts, self.train_owner, self.test_owner, *targets):
            for path, array in tree_leaves(tree):
                if array is not None:
                    digest.update(path.encode())
                    digest.update(repr((array.shape, array.dtype.str)).encode())
                    for piece in iterate_pieces(array):
                        digest.update(np.ascontiguousarray(piece).data)
        return digest.hexdigest()


MOST_LOOKED_AT = 100
"""Examples whose smallest and largest number are taken for those of a description."""


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Describe, for JSON, what a trained model needs without its data. It has no example."""

    def describe(leaf: Inputs) -> dict[str, Any]:
        few = np.asarray(leaf[:MOST_LOOKED_AT])
        ends = [few.min(initial=0).item(), few.max(initial=0).item()]
        return {"shape": list(leaf.shape[1:]), "dtype": str(leaf.dtype), "range": ends}

    targets = dataset.train_target
    return {
        "name": dataset.name,
        "inputs": tree_map(describe, dataset.train_x),
        "targets": None if targets is None else tree_map(describe, targets),
        "outputs": dataset.outputs,
        "classes": dataset.class_names,
        "mean": dataset.mean,
        "std": dataset.std,
        "columns": dataset.columns,
        "categories": {name: list(values) for name, values in dataset.categories.items()},
    }


def make_stand_in(described: Mapping[str, Any]) -> Dataset:
    """A data set of the described form with two made-up examples: models are made for it."""

    def is_leaf(tree: Any) -> bool:
        return isinstance(tree, Mapping) and "dtype" in tree and "shape" in tree

    def draw(tree: Any) -> InputTree:
        if is_leaf(tree):
            low, high = tree["range"]
            numbers = np.linspace(low, high, 2 * math.prod(tree["shape"]))
            return numbers.reshape(2, *tree["shape"]).astype(tree["dtype"])
        if isinstance(tree, Mapping):
            return {name: draw(part) for name, part in tree.items()}
        return tuple(draw(part) for part in tree)

    x, targets = draw(described["inputs"]), described["targets"]
    labels = np.zeros(2, dtype=np.int64)
    target = None if targets is None else draw(targets)
    return Dataset(
        described["name"],
        train_x=x,
        train_y=labels,
        test_x=x,
        test_y=labels,
        classes=len(described["classes"]),
        class_names=tuple(described["classes"]),
        mean=_as_tuples(described["mean"]),
        std=_as_tuples(described["std"]),
        train_target=target,
        test_target=target,
        known_digest="none",
        columns=_as_tuples(described["columns"]),
        categories=described["categories"],
    )


def _as_tuples(value: Any) -> Any:
    """Turn JSON's lists back into tuples."""
    if isinstance(value, Mapping):
        return {name: _as_tuples(part) for name, part in value.items()}
    return tuple(value) if isinstance(value, list) else value


def report_notes(dataset: Dataset) -> Dataset:
    """Log a data set's notes, which the command line prints, and warn of its doubts; return it."""
    for note in dataset.notes:
        log.info(note)
    for doubt in dataset.doubts:
        warnings.warn(doubt, QuiverWarning, stacklevel=3)
    return dataset


def _describe_inputs(leaf: Inputs) -> str:
    return f"{format_shape(tuple(leaf.shape[1:]))} ({leaf.dtype})"


def _output_size(train: Inputs, test: Inputs) -> int:
    if train.dtype == np.float32:
        return 1 if train.ndim == 1 else int(train.shape[-1])
    return int(max(part.max(initial=0) for part in (train, test))) + 1


def _check_same_form(name: str, what: str, train: InputTree, test: InputTree) -> None:
    """Refuse training and test leaves of other names, types or shapes."""
    first, second = dict(tree_leaves(train)), dict(tree_leaves(test))
    if not first:
        raise QuiverError(f"{name} has no {what}.")
    if list(first) != list(second):
        raise QuiverError(
            f"{name}: training {what} are {list(first)}, test {what} {list(second)}; they must be "
            "the same, in the same order."
        )
    for path, leaf in first.items():
        called, other = f"{path!r}: " if path else "", second[path]
        if len(other) and other.dtype != leaf.dtype:
            raise QuiverError(
                f"{name}: {called}training {what} are {leaf.dtype}, test {what} {other.dtype}; "
                "they must be the same."
            )
        if len(other) and other.shape[1:] != leaf.shape[1:]:
            raise QuiverError(
                f"{name}: {called}training {what} have the shape {leaf.shape[1:]}, test {what} "
                f"{other.shape[1:]}; they must be the same."
            )


def _check_standardised(dataset: Dataset) -> None:
    """Refuse ids that would be standardised."""
    for path, leaf in tree_leaves(dataset.train_x):
        standardised = dataset.mean if not path else path in (dataset.mean or ())
        if leaf.dtype in IDS and standardised:
            called = f"{path!r}: " if path else ""
            raise QuiverError(
                f"{dataset.name}: {called}the inputs are {leaf.dtype}, and ids are not "
                "standardised: leave mean and std out, or make the inputs float32 if they are "
                "numbers."
            )


def _check_targets(dataset: Dataset) -> None:
    name, train, test = dataset.name, dataset.train_target, dataset.test_target
    if train is None and test is None:
        return
    if train is None or test is None:
        raise QuiverError(f"{name}: train_target and test_target come together.")
    _check_same_form(name, "targets", train, test)
    for part, tree, labels in (("train", train, dataset.train_y), ("test", test, dataset.test_y)):
        for path, target in tree_leaves(tree):
            called = f"{name}, {path!r}" if path else name
            _check_target(f"{called}, {part}", target, len(labels))


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
    if x.dtype == np.float32 and not all(np.isfinite(piece).all() for piece in iterate_pieces(x)):
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


def compute_channel_statistics(x: Inputs) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel (axis 1), bytes on the scale of [0, 1].

    They come from a histogram of the bytes, piece by piece, so that a set on disk is never turned
    into floats at once.
    """
    if x.dtype == np.uint8:
        levels = np.arange(256) / 255
        counts = _count_byte_values(x)
        frequencies = counts / counts.sum(axis=1, keepdims=True)
        mean = frequencies @ levels
        std = np.sqrt(np.maximum(frequencies @ levels**2 - mean**2, 0.0))
    else:
        # What is not finite is refused by name when the data set is made.
        with np.errstate(invalid="ignore", over="ignore"):
            mean, std = _number_statistics(x)
    # A channel that never changes is only centred; dividing by zero would make it NaN.
    std = np.where(std > 0, std, 1.0)
    return tuple(float(v) for v in mean), tuple(float(v) for v in std)


def _number_statistics(x: Inputs) -> tuple[Floats, Floats]:
    if x.nbytes > LARGE:
        return _compute_moments(x)
    axes, all_of_it = (0, *range(2, x.ndim)), x[:]
    mean = np.asarray(all_of_it.mean(axis=axes, dtype=np.float64))
    return mean, np.asarray(all_of_it.std(axis=axes, dtype=np.float64))


def _count_byte_values(x: Inputs) -> Integers:
    counts = np.zeros((x.shape[1], 256), dtype=np.int64)
    for piece in iterate_pieces(x):
        for channel, of in enumerate(counts):
            of += np.bincount(piece[:, channel].ravel(), minlength=256)
    return counts


def _compute_moments(x: Inputs) -> tuple[Floats, Floats]:
    """Mean and standard deviation per channel, in two passes over the pieces."""
    count = np.prod(x.shape) / x.shape[1]
    mean, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    axes, sides = (0, *range(2, x.ndim)), (1, -1, *(1,) * (x.ndim - 2))
    for piece in iterate_pieces(x):
        mean += piece.sum(axis=axes, dtype=np.float64) / count
    for piece in iterate_pieces(x):
        squares += ((piece - mean.reshape(sides)) ** 2).sum(axis=axes)
    return mean, np.sqrt(squares / count)
