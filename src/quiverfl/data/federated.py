"""Who holds which examples.

The examples of all clients lie end to end in one tensor; a client is a slice. So nothing is padded
however unequal the clients are, and a batch of any clients is one gather. Inputs or targets of
several tensors (a dictionary of ids and a mask, a tuple) are a tree of such tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.card import Shown, between, shape, thousands
from quiverfl.data.augmentation import AUGMENTATIONS, CropFlip
from quiverfl.data.dataset import Dataset, Inputs, InputTree, Integers
from quiverfl.data.normalize import Normalize, NormalizeParts
from quiverfl.data.on_disk import map_behind
from quiverfl.data.pairs import end_to_end
from quiverfl.data.partition import Partition
from quiverfl.data.split import Split
from quiverfl.errors import QuiverError, nearest
from quiverfl.seeds import Hashes
from quiverfl.trees import Tree, leaves, mapped

Prepare = Callable[[Tree], Tree]
"""Raw inputs [n, …] → model inputs, such as bytes to normalised floats. Pure."""
Augment = Callable[[Tree, Hashes], Tree]
"""(prepared inputs [n, …], 64 random bits per sample [n]) → inputs. Pure."""


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
        first, second = end_to_end("train", train), end_to_end("test", test)
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
            "clients": thousands(self.clients),
            "training examples each": between(sizes.min(), sizes.max()),
            "test examples each": between(tests.min(), tests.max()),
            "inputs": _inputs(self.train.x),
            "classes": "none" if self.classes is None else thousands(self.classes),
        }

    def only(self, clients: Sequence[int]) -> FederatedData:
        """The data of some clients, renumbered from 0: what one shard or one peer holds."""
        names = tuple(self.names[client] for client in clients) if self.names else ()
        train, test = self.train.only(clients), self.test.only(clients)
        return replace(self, train=train, test=test, names=names)


def _inputs(x: Any) -> str:
    """The shape of one example; of a tree of tensors, its parts."""
    if isinstance(x, Tensor):
        return f"{shape(tuple(x.shape[1:]))} ({str(x.dtype).removeprefix('torch.')})"
    parts = x.items() if isinstance(x, Mapping) else enumerate(x)
    return ", ".join(f"{name}: {_inputs(part)}" for name, part in parts)


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


def federate(
    dataset: Dataset,
    partition: Partition,
    augment: str | Augment | None = None,
    mapped: bool = False,
) -> FederatedData:
    """What each client holds: images stay bytes until they are used, numbers are normalised now,
    ids are never touched.

    `augment` is a name in AUGMENTATIONS or your own function, applied in training alone. `mapped`
    leaves the inputs where they are, which for a data set from the cache is on disk: a batch is
    read and normalised when it is used, with the same numbers.
    """
    learned = dataset.train_target is not None
    train_y, test_y = (
        (dataset.train_target, dataset.test_target)
        if learned
        else (dataset.train_y, dataset.test_y)
    )
    test_x = dataset.test_x
    if partition.held_out:
        test_x, test_y = dataset.train_x, train_y
    split = _left if mapped else _split
    data = FederatedData(
        split(dataset.train_x, train_y, partition.train),
        split(test_x, test_y, partition.test),
        None if learned else dataset.classes,
        augment=_augmentation(dataset, augment),
        names=partition.names,
    )
    normalize = _normalizer(dataset)
    if normalize is None:
        return data
    if mapped or not dataset.is_one or dataset.train_x.dtype == np.uint8:
        return replace(data, prepare=normalize)
    train, test = (replace(part, x=normalize(part.x)) for part in (data.train, data.test))
    return replace(data, train=train, test=test, normalize=normalize)


def _normalizer(dataset: Dataset) -> Prepare | None:
    """None where inputs are used as they are."""
    parts = {}
    for path, leaf in leaves(dataset.train_x):
        mean = dataset.mean if not path else (dataset.mean or {}).get(path)
        if mean:
            parts[path] = Normalize(mean, dataset.std if not path else dataset.std[path])
        elif leaf.dtype == np.uint8:
            parts[path] = Normalize((0.0,) * leaf.shape[1], (1.0,) * leaf.shape[1])
    return parts.get("") if dataset.is_one else NormalizeParts(parts) if parts else None


def _split(x: InputTree, y: InputTree, shares: Sequence[Integers]) -> Split:
    rows = np.concatenate(shares)
    x, y = (mapped(lambda leaf: torch.from_numpy(leaf[rows]), part) for part in (x, y))
    return Split(x, y, _offsets(shares))


def _left(x: InputTree, y: InputTree, shares: Sequence[Integers]) -> Split:
    """Inputs stay where they are."""
    rows = np.concatenate(shares).astype(np.int64)
    y = mapped(lambda leaf: torch.from_numpy(leaf[rows]), y)
    files = [map_behind(leaf) for _, leaf in leaves(x)]
    behind = tuple(file for file in files if file is not None)
    return Split(mapped(_as_it_lies, x), y, _offsets(shares), rows, behind)


def _as_it_lies(leaf: Inputs) -> Tensor:
    if not isinstance(leaf, np.ndarray):
        raise QuiverError(
            "data.mapped = true: the data set could not be written to the cache, from which it "
            "would be mapped; set data.options.cache to a folder that can be written."
        )
    with warnings.catch_warnings():
        # Torch has no tensors that cannot be written to; nobody writes to these.
        warnings.simplefilter("ignore")
        return torch.from_numpy(leaf)


def _offsets(shares: Sequence[Integers]) -> Integers:
    return np.cumsum([0, *(len(share) for share in shares)]).astype(np.int64)


def _augmentation(dataset: Dataset, augment: str | Augment | None) -> Augment | None:
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
                f"inputs of shape {_shape(dataset)}: set data.augment = 'none'."
            )
        channels = dataset.train_x.shape[1]
        mean, std = dataset.mean or (0.0,) * channels, dataset.std or (1.0,) * channels
        if not augment.fill:
            return replace(augment, fill=Normalize(mean, std).black)
    return augment


def _shape(dataset: Dataset) -> Any:
    return list(dataset.input_shape) if dataset.is_one else dataset.input_shape
