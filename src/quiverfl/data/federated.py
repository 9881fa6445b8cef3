"""Who holds which examples.

The examples of all clients lie end to end in one tensor; a client is a slice. So nothing is padded
however unequal the clients are, and a batch of any clients is one gather. Inputs or targets of
several tensors (a dictionary of ids and a mask, a tuple) are a tree of such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.card import Shown, between, shape, whole
from quiverfl.data.augmentation import AUGMENTATIONS, CropFlip, constant
from quiverfl.data.dataset import Dataset, Inputs, Integers
from quiverfl.data.partition import Partition
from quiverfl.errors import QuiverError, nearest
from quiverfl.seeds import Hashes
from quiverfl.trees import Tree, first_leaf, leaves, mapped

Prepare = Callable[[Tree], Tree]
"""Raw inputs [n, …] → model inputs, such as bytes to normalised floats. Pure."""
Augment = Callable[[Tree, Hashes], Tree]
"""(prepared inputs [n, …], 64 random bits per sample [n]) → inputs. Pure."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of all clients end to end: client i owns rows offsets[i]:offsets[i + 1]."""

    x: Tree
    y: Tree
    offsets: Integers

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Integers:
        return np.diff(self.offsets)

    @property
    def longest(self) -> int:
        """How many examples the largest client has."""
        return int(self.sizes.max(initial=0))

    def of(self, client: int) -> tuple[Tree, Tree]:
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        x, y = (mapped(lambda leaf: leaf[rows], part) for part in (self.x, self.y))
        return x, y

    def only(self, clients: Sequence[int]) -> Split:
        """The same examples for some of the clients, renumbered from 0."""
        return _joined([self.of(client) for client in clients])


@dataclass(frozen=True, eq=False, repr=False)
class FederatedData(Shown):
    """Training and test examples per client; how inputs are prepared and augmented.

    `names` says who the clients are, where that is known.
    """

    train: Split
    test: Split
    classes: int | None = None
    prepare: Prepare | None = None
    augment: Augment | None = None
    names: tuple[str, ...] = ()
    normalize: Prepare | None = None
    """What was done to the inputs before they came here: a model in use must do it, too."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """How `partition` made it, as [data] of a configuration says it; empty for your own arrays."""

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[Any, Any]],
        test: Sequence[tuple[Any, Any]],
        *,
        classes: int | None = None,
        prepare: Prepare | None = None,
        augment: Augment | None = None,
        names: Sequence[str] = (),
    ) -> FederatedData:
        """One (inputs, targets) pair per client, numpy or torch; perhaps one name per client.

        Either may be a dictionary or tuple of arrays with the same number of rows.
        """
        for part, pairs in (("train", train), ("test", test)):
            if not isinstance(pairs, list | tuple):
                raise QuiverError(
                    f"{part} is a {type(pairs).__name__}: give a list with one (x, y) pair per "
                    "client (an empty test pair is allowed)."
                )
        if len(train) != len(test):
            raise QuiverError(
                f"train has {len(train)} clients and test has {len(test)}: give one (x, y) pair "
                "per client in both (an empty test pair is allowed)."
            )
        if not train:
            raise QuiverError("train is empty: give one (x, y) pair per client.")
        if names and len(names) != len(train):
            raise QuiverError(f"{len(names)} names for {len(train)} clients: give one each.")
        first, second = _end_to_end("train", train), _end_to_end("test", test)
        for client, size in enumerate(first.sizes):
            if size == 0:
                raise QuiverError(
                    f"client {client} has no training data: leave it out, or partition the data "
                    "so that every client gets some."
                )
        found = _classes(first, second, classes)
        return cls(first, second, found, prepare, augment, tuple(names))

    @property
    def clients(self) -> int:
        return self.train.clients

    def facts(self) -> dict[str, str]:
        sizes, tests = self.train.sizes, self.test.sizes
        return {
            "clients": whole(self.clients),
            "training examples each": between(sizes.min(), sizes.max()),
            "test examples each": between(tests.min(), tests.max()),
            "inputs": _inputs(self.train.x),
            "classes": "none" if self.classes is None else whole(self.classes),
        }

    def only(self, clients: Sequence[int]) -> FederatedData:
        """The data of some clients, renumbered from 0: what one shard or one peer holds."""
        names = tuple(self.names[client] for client in clients) if self.names else ()
        train, test = self.train.only(clients), self.test.only(clients)
        return replace(self, train=train, test=test, names=names)


def _joined(parts: Sequence[tuple[Tree, Tree]]) -> Split:
    sizes = [len(first_leaf(y)) for _, y in parts]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    x, y = (mapped(lambda *rows: torch.cat(rows), *trees) for trees in zip(*parts, strict=True))
    return Split(x, y, offsets)


def _inputs(x: Any) -> str:
    """The shape of one example; of a tree of tensors, its parts."""
    if isinstance(x, Tensor):
        return f"{shape(tuple(x.shape[1:]))} ({str(x.dtype).removeprefix('torch.')})"
    parts = x.items() if isinstance(x, Mapping) else enumerate(x)
    return ", ".join(f"{name}: {_inputs(part)}" for name, part in parts)


def _end_to_end(name: str, pairs: Sequence[tuple[Any, Any]]) -> Split:
    parts: list[tuple[Tree, Tree]] = []
    first: tuple[Tree, Tree] | None = None
    for client, pair in enumerate(pairs):
        where = f"{name}, client {client}"
        x, y = (_tensors(where, part) for part in _pair(where, pair))
        rows = _check_rows(where, x, y)
        y = mapped(lambda leaf: leaf if leaf.is_floating_point() else leaf.long(), y)
        if first is not None and rows:
            _check_like(where, "inputs", x, first[0])
            _check_like(where, "targets", y, first[1])
        first = (x, y) if first is None and rows else first
        parts.append((x, y))
    if first is not None:  # a client without samples may have come with any shape
        empty_x, empty_y = (mapped(lambda leaf: leaf[:0], part) for part in first)
        parts = [(x, y) if len(first_leaf(y)) else (empty_x, empty_y) for x, y in parts]
    return _joined(parts)


def _pair(where: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise QuiverError(f"{where}: give a pair (inputs, targets), not {type(pair).__name__}.")
    return pair[0], pair[1]


def _tensors(where: str, part: Any) -> Tree:
    several = isinstance(part, tuple) and any(hasattr(leaf, "__getitem__") for leaf in part)
    if isinstance(part, dict):
        return {str(key): _tensors(where, leaf) for key, leaf in part.items()}
    if several:
        return tuple(_tensors(where, leaf) for leaf in part)
    return _tensor(where, part)  # a list is rows


def _tensor(where: str, part: Any) -> Tensor:
    kind = getattr(part, "dtype", None)
    text = kind is not None and getattr(kind, "kind", "") in ("U", "O")
    if text or (isinstance(part, list) and part and isinstance(part[0], str)):
        raise QuiverError(
            f"{where}: text or objects ({kind or 'str'}): give numbers; labels that are text become"
            " numbers with names, y = numpy.unique(labels, return_inverse=True)."
        )
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError) as error:
        said = str(error).rstrip(". ")
        raise QuiverError(f"{where}: a {type(part).__name__} is not an array: {said}.") from error


def _check_rows(where: str, x: Tree, y: Tree) -> int:
    """How many rows there are: every leaf has as many, and they are numbers."""
    rows: dict[str, int] = {}
    for kind, tree in (("inputs", x), ("targets", y)):
        for path, leaf in leaves(tree):
            called = f"{kind} {path!r}" if path else kind
            if not leaf.ndim:
                raise QuiverError(f"{where}: {called}: give an array with a row per sample.")
            if leaf.is_floating_point() and not torch.isfinite(leaf).all():
                advice = "; clean the data first." if kind == "inputs" else "."
                raise QuiverError(f"{where}: the {called} hold NaN or infinity{advice}")
            rows[called] = len(leaf)
    if not rows:
        raise QuiverError(f"{where}: there are no inputs and no targets.")
    if len(set(rows.values())) > 1:
        counts = " but ".join(f"{count} {called}" for called, count in rows.items())
        raise QuiverError(f"{where}: {counts}.")
    return next(iter(rows.values()))


def _check_like(where: str, what: str, tree: Tree, first: Tree) -> None:
    """Refuse leaves other than those of the first client that has samples."""
    mine, theirs = dict(leaves(tree)), dict(leaves(first))
    if list(mine) != list(theirs):
        raise QuiverError(
            f"{where}: {what} {list(mine)}, other clients have {list(theirs)}: give the same, in "
            "the same order."
        )
    for path, leaf in mine.items():
        if leaf.shape[1:] != theirs[path].shape[1:]:
            called = f"{what} {path!r}" if path else what
            raise QuiverError(
                f"{where}: {called} of shape {tuple(leaf.shape[1:])}, "
                f"other clients have {tuple(theirs[path].shape[1:])}."
            )


def _classes(train: Split, test: Split, classes: int | None) -> int | None:
    one = isinstance(train.y, Tensor) and not train.y.is_floating_point() and train.y.ndim == 1
    if not one:
        return classes
    for name, split in (("train", train), ("test", test)):
        if not len(split.y):
            continue
        low, high = int(split.y.min()), int(split.y.max())
        if low < 0 or (classes is not None and high >= classes):
            value = low if low < 0 else high
            row = int((split.y == value).nonzero()[0])
            client = int(np.searchsorted(split.offsets, row, side="right")) - 1
            limit = "the number of classes" if classes is None else str(classes)
            raise QuiverError(
                f"{name}, client {client}: label {value} is out of range; labels are 0 … "
                f"{limit} - 1."
            )
    largest = max(int(s.y.max()) for s in (train, test) if len(s.y))
    return largest + 1 if classes is None else classes


@dataclass(frozen=True)
class Normalize:
    """To float32, bytes on the scale of [0, 1]; then (x - mean) / std per channel (axis 1)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        factors = self.factors(255.0 if x.dtype == torch.uint8 else 1.0, x.device)
        scale, shift = (factor.view(shape) for factor in factors)
        return x.to(torch.float32) * scale + shift

    def factors(
        self, unit: float, device: torch.device = torch.device("cpu")
    ) -> tuple[Tensor, Tensor]:
        """(scale, shift) per channel for inputs on the scale of [0, unit]."""
        scale = tuple(1 / (unit * std) for std in self.std)
        return constant(scale, torch.float32, device), constant(self.black, torch.float32, device)

    @property
    def black(self) -> tuple[float, ...]:
        """What a black pixel becomes, per channel."""
        return tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True))


def federate(
    dataset: Dataset, partition: Partition, augment: str | Augment | None = None
) -> FederatedData:
    """What each client holds: images stay bytes until they are used, numbers are normalised now,
    ids are never touched.

    `augment` is a name in AUGMENTATIONS or your own function, applied in training alone.
    """
    channels = dataset.train_x.shape[1] if dataset.train_x.ndim > 1 else 1
    mean = dataset.mean or (0.0,) * channels
    std = dataset.std or (1.0,) * channels
    normalize = Normalize(mean, std)
    learned = dataset.train_target is not None
    train_y, test_y = (
        (dataset.train_target, dataset.test_target)
        if learned
        else (dataset.train_y, dataset.test_y)
    )
    classes = None if learned else dataset.classes
    test_x = dataset.test_x
    if partition.held_out:
        test_x, test_y = dataset.train_x, train_y
    train = _split(dataset.train_x, train_y, partition.train)
    test = _split(test_x, test_y, partition.test)
    chosen = _augmentation(dataset, normalize, augment)
    if dataset.train_x.dtype == np.uint8:
        return FederatedData(train, test, classes, normalize, chosen, partition.names)
    if dataset.mean:
        train, test = (replace(part, x=normalize(part.x)) for part in (train, test))
        return FederatedData(train, test, classes, None, chosen, partition.names, normalize)
    return FederatedData(train, test, classes, None, chosen, partition.names)


def _split(x: Inputs, y: Inputs | None, shares: Sequence[Integers]) -> Split:
    assert y is not None
    rows = np.concatenate(shares)
    offsets = np.cumsum([0, *(len(share) for share in shares)]).astype(np.int64)
    return Split(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]), offsets)


def _augmentation(
    dataset: Dataset, normalize: Normalize, augment: str | Augment | None
) -> Augment | None:
    if isinstance(augment, str):
        if augment not in AUGMENTATIONS:
            raise QuiverError(
                f"unknown augmentation {augment!r}; {nearest(augment, AUGMENTATIONS)}"
            )
        augment = AUGMENTATIONS[augment]
    if augment is None:
        return None
    if isinstance(augment, CropFlip):
        if not dataset.is_image:
            raise QuiverError(
                f"random crop and flip need images [channels, height, width]; {dataset.name} has "
                f"inputs of shape {list(dataset.input_shape)}: set data.augment = 'none'."
            )
        if not augment.fill:
            return replace(augment, fill=normalize.black)
    return augment
