"""Federated data: which client holds which examples.

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

from quiverfl.data import partition as ways
from quiverfl.data.augmentation import AUGMENTATIONS, CropFlip, Normalize, NormalizeParts
from quiverfl.data.dataset import Dataset, Inputs, InputTree
from quiverfl.data.examples import ClientExamples, concatenate_clients, find_memory_map
from quiverfl.data.partition import Partition
from quiverfl.data.sources import load_dataset
from quiverfl.data.unseen import UNSEEN_OPTIONS, Chosen, Unseen, choose_unseen
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.options import python_number, refuse_old_names
from quiverfl.seeds import Hashes
from quiverfl.support.cards import ReprCard, format_range, format_shape, format_thousands
from quiverfl.trees import Tree, first_leaf, tree_leaves, tree_map
from quiverfl.types import Integers


def concatenate_pairs(name: str, pairs: Sequence[tuple[Any, Any]]) -> ClientExamples:
    """Concatenate a pair (inputs, targets) per client; refuse, by client, what does not fit."""
    parts: list[tuple[Tree, Tree]] = []
    first: tuple[Tree, Tree] | None = None
    for client, pair in enumerate(pairs):
        where = f"{name}, client {client}"
        x, y = (_to_tensors(where, part) for part in _check_pair(where, pair))
        rows = _check_rows(where, x, y)
        y = tree_map(lambda leaf: leaf if leaf.is_floating_point() else leaf.long(), y)
        if first is not None and rows:
            _check_same_form(where, "inputs", x, first[0])
            _check_same_form(where, "targets", y, first[1])
        first = (x, y) if first is None and rows else first
        parts.append((x, y))
    if first is not None:  # a client without samples may have come with any shape
        empty_x, empty_y = (tree_map(lambda leaf: leaf[:0], part) for part in first)
        parts = [(x, y) if len(first_leaf(y)) else (empty_x, empty_y) for x, y in parts]
    return concatenate_clients(parts)


def _check_pair(where: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise QuiverError(f"{where}: give a pair (inputs, targets), not {type(pair).__name__}.")
    return pair[0], pair[1]


def _to_tensors(where: str, part: Any) -> Tree:
    several = isinstance(part, tuple) and any(hasattr(leaf, "__getitem__") for leaf in part)
    if isinstance(part, dict):
        return {str(key): _to_tensors(where, leaf) for key, leaf in part.items()}
    if several:
        return tuple(_to_tensors(where, leaf) for leaf in part)
    return _to_tensor(where, part)  # a list is rows


def _to_tensor(where: str, part: Any) -> Tensor:
    if not isinstance(part, Tensor | np.ndarray) and hasattr(part, "__array__"):
        part = np.array(part)  # of a table's columns: torch would ask for its rows by number
    elif isinstance(part, np.ndarray) and not (part.flags.writeable or isinstance(part, np.memmap)):
        part = part.copy()  # as pandas gives them: torch would warn
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


def _check_split(name: str, given: Any) -> ClientExamples:
    """The examples of all clients from (inputs, targets, offsets)."""
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise QuiverError(
            f"{name}: give (inputs, targets, offsets), where client i has rows offsets[i] to "
            f"offsets[i + 1], not {type(given).__name__}."
        )
    x, y = (_to_tensors(name, part) for part in given[:2])
    rows, offsets = _check_rows(name, x, y), np.asarray(given[2])
    whole = offsets.ndim == 1 and len(offsets) > 1 and offsets.dtype.kind in "iu"
    if not whole or offsets[0] != 0 or offsets[-1] != rows or (np.diff(offsets) < 0).any():
        raise QuiverError(
            f"{name}: offsets are whole numbers that never fall, from 0 to the number of rows "
            f"({rows}), one more than there are clients."
        )
    y = tree_map(lambda leaf: leaf if leaf.is_floating_point() else leaf.long(), y)
    return ClientExamples(x, y, offsets.astype(np.int64))


def _check_rows(where: str, x: Tree, y: Tree) -> int:
    """Count the rows; refuse leaves of unequal length and numbers that are not finite."""
    rows: dict[str, int] = {}
    for kind, tree in (("inputs", x), ("targets", y)):
        for path, leaf in tree_leaves(tree):
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


def _check_same_form(where: str, what: str, tree: Tree, first: Tree) -> None:
    """Refuse leaves other than those of the first client that has samples."""
    mine, theirs = dict(tree_leaves(tree)), dict(tree_leaves(first))
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


InputTransform = Callable[[Tree], Tree]
"""Raw inputs [n, …] → model inputs, such as bytes to normalised floats. Pure."""
Augment = Callable[[Tree, Hashes], Tree]
"""(prepared inputs [n, …], 64 random bits per sample [n]) → inputs. Pure."""


@refuse_old_names(only="select")
@dataclass(frozen=True, eq=False, repr=False)
class FederatedData(ReprCard):
    """Training and test examples per client; how inputs are prepared and augmented.

    `names` says who the clients are, where that is known.
    """

    train: ClientExamples
    test: ClientExamples
    classes: int | None = None
    prepare: InputTransform | None = None
    augment: Augment | None = None
    names: tuple[str, ...] = ()
    normalize: InputTransform | None = None
    """Normalisation that was already applied; an exported model must apply it, too."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """The [data] section that makes the same partition; empty for your own arrays."""
    unseen: Unseen | None = None
    """Clients that take no part, and are tested like clients that come later."""

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[Any, Any]],
        test: Sequence[tuple[Any, Any]],
        *,
        classes: int | None = None,
        prepare: InputTransform | None = None,
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
        splits = concatenate_pairs("train", train), concatenate_pairs("test", test)
        return cls._from_splits(*splits, classes, prepare, augment, names)

    @classmethod
    def from_offsets(
        cls,
        train: tuple[Any, Any, Any],
        test: tuple[Any, Any, Any],
        *,
        classes: int | None = None,
        prepare: InputTransform | None = None,
        augment: Augment | None = None,
        names: Sequence[str] = (),
    ) -> FederatedData:
        """(inputs, targets, offsets) of all clients end to end, with no object for each of them.

        Client i has rows offsets[i] to offsets[i + 1]. Arrays are not copied where torch can share
        them, so do not change them afterwards.
        """
        first, second = (_check_split(n, part) for n, part in (("train", train), ("test", test)))
        if first.clients != second.clients:
            raise QuiverError(
                f"train has {first.clients} clients and test has {second.clients}: give offsets "
                "of the same clients in both (two equal offsets: no test data)."
            )
        _check_same_form("test", "inputs", second.x, first.x)
        _check_same_form("test", "targets", second.y, first.y)
        return cls._from_splits(first, second, classes, prepare, augment, names)

    @classmethod
    def _from_splits(
        cls,
        train: ClientExamples,
        test: ClientExamples,
        classes: int | None,
        prepare: InputTransform | None,
        augment: Augment | None,
        names: Sequence[str],
    ) -> FederatedData:
        names = tuple(map(str, names))
        if names and len(names) != train.clients:
            raise QuiverError(f"{len(names)} names for {train.clients} clients: give one each.")
        empty = np.flatnonzero(train.sizes == 0)
        if len(empty):
            raise QuiverError(
                f"client {empty[0]} has no training data: leave it out, or partition the data "
                "so that every client gets some."
            )
        class_count = _count_classes(train, test, classes)
        return cls(train, test, class_count, prepare, augment, names)

    @property
    def clients(self) -> int:
        return self.train.clients

    def fields(self) -> dict[str, str]:
        sizes, tests = self.train.sizes, self.test.sizes
        return {
            "clients": format_thousands(self.clients),
            "training examples each": format_range(sizes.min(), sizes.max()),
            "test examples each": format_range(tests.min(), tests.max()),
            "inputs": _describe_inputs(self.train.x),
            "classes": "none" if self.classes is None else format_thousands(self.classes),
        }

    def select(self, clients: Sequence[int]) -> FederatedData:
        """The data of some clients, renumbered from 0: what one shard or one peer holds."""
        chosen, last = np.asarray(clients), self.clients - 1
        whole = chosen.size and np.issubdtype(chosen.dtype, np.integer)
        if not whole or chosen.min() < 0 or chosen.max() > last:
            raise QuiverError(
                f"select({clients!r}): give numbers of clients; there are {self.clients}, "
                f"0 … {last}."
            )
        names = tuple(self.names[client] for client in clients) if self.names else ()
        train, test = self.train.select(clients), self.test.select(clients)
        return replace(self, train=train, test=test, names=names)

    def hold_out(self, unseen: Chosen, seed: int = 0, **options: Any) -> FederatedData:
        """The data without some clients, which are tested as unseen clients.

        `unseen` is how many, or a list of numbers or names. `options` are start, epochs, part and
        when (data/unseen.py).
        """
        away = choose_unseen(unseen, self.clients, self.names, seed)
        held = Unseen(self.select(away.tolist()), **options)
        stay = np.setdiff1d(np.arange(self.clients), away)
        return replace(self.select(stay.tolist()), unseen=held)


def number_own_labels(data: FederatedData) -> tuple[FederatedData, list[Integers]]:
    """Labels numbered from 0 at every client, and which classes its numbers stand for."""
    if data.classes is None or not isinstance(data.train.y, Tensor):
        raise QuiverError(
            'task.labels = "own" needs one class label per sample; leave it out where numbers, '
            "several labels or words are learned."
        )
    known: list[Integers] = []
    numbered = [split.y.clone() for split in (data.train, data.test)]
    for client in range(data.clients):
        rows = [
            slice(int(split.offsets[client]), int(split.offsets[client + 1]))
            for split in (data.train, data.test)
        ]
        both = torch.cat([y[own] for y, own in zip(numbered, rows, strict=True)])
        classes: Integers = np.unique(both.numpy())
        for y, own in zip(numbered, rows, strict=True):
            y[own] = torch.searchsorted(torch.from_numpy(classes), y[own])
        known.append(classes)
    train, test = (
        replace(split, y=y) for split, y in zip((data.train, data.test), numbered, strict=True)
    )
    most = max((len(classes) for classes in known), default=0)
    return replace(data, train=train, test=test, classes=most), known


def _describe_inputs(x: Any) -> str:
    """The shape of one example; of a tree of tensors, its parts."""
    if isinstance(x, Tensor):
        return f"{format_shape(tuple(x.shape[1:]))} ({str(x.dtype).removeprefix('torch.')})"
    parts = x.items() if isinstance(x, Mapping) else enumerate(x)
    return ", ".join(f"{name}: {_describe_inputs(part)}" for name, part in parts)


def _count_classes(train: ClientExamples, test: ClientExamples, classes: int | None) -> int | None:
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
                f"{limit} - 1. Number the classes from 0."
            )
    labels = torch.cat([train.y, test.y])
    if bool((labels == labels[0]).all()):
        warnings.warn(
            f"all labels are {int(labels[0])}: with one class alone there is nothing to tell "
            "apart, and an accuracy says nothing.",
            QuiverWarning,
            stacklevel=3,
        )
    largest = max(int(s.y.max()) for s in (train, test) if len(s.y))
    return largest + 1 if classes is None else classes


def make_federated(
    dataset: Dataset,
    partition: Partition,
    augment: str | Augment | None = None,
    mapped: bool = False,
) -> FederatedData:
    """Give each client its examples of a partition. Images stay bytes until they are used, numbers
    are normalised now, ids are never touched.

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
    split = _map_examples if mapped else _copy_examples
    data = FederatedData(
        split(dataset.train_x, train_y, partition.train),
        split(test_x, test_y, partition.test),
        None if learned else dataset.classes,
        augment=_make_augmentation(dataset, augment),
        names=partition.names,
    )
    normalize = _make_normalizer(dataset)
    if normalize is None:
        return data
    if mapped or not dataset.is_single_array or dataset.train_x.dtype == np.uint8:
        return replace(data, prepare=normalize)
    train, test = (replace(part, x=normalize(part.x)) for part in (data.train, data.test))
    return replace(data, train=train, test=test, normalize=normalize)


def federate(
    dataset: Dataset,
    partition: Partition,
    augment: str | Augment | None,
    mapped: bool,
    unseen: Mapping[str, Any],
) -> FederatedData:
    """The same, with the clients that the partition holds out; `unseen` says how to test them."""
    data = make_federated(dataset, partition, augment, mapped)
    if partition.unseen is None:
        return data
    options = {key.removeprefix("unseen_"): value for key, value in unseen.items()}
    return replace(
        data, unseen=Unseen(make_federated(dataset, partition.unseen, augment, mapped), **options)
    )


def _make_normalizer(dataset: Dataset) -> InputTransform | None:
    """Make the input transform; None if inputs are used as they are."""
    parts = {}
    for path, leaf in tree_leaves(dataset.train_x):
        mean = dataset.mean if not path else (dataset.mean or {}).get(path)
        if mean:
            parts[path] = Normalize(mean, dataset.std if not path else dataset.std[path])
        elif leaf.dtype == np.uint8:
            parts[path] = Normalize((0.0,) * leaf.shape[1], (1.0,) * leaf.shape[1])
    return parts.get("") if dataset.is_single_array else NormalizeParts(parts) if parts else None


def _copy_examples(x: InputTree, y: InputTree, client_rows: Sequence[Integers]) -> ClientExamples:
    rows = np.concatenate(client_rows)
    x, y = (tree_map(lambda leaf: torch.from_numpy(leaf[rows]), part) for part in (x, y))
    return ClientExamples(x, y, _client_offsets(client_rows))


def _map_examples(x: InputTree, y: InputTree, client_rows: Sequence[Integers]) -> ClientExamples:
    """Leave the inputs on disk; a batch is read when it is used."""
    rows = np.concatenate(client_rows).astype(np.int64)
    y = tree_map(lambda leaf: torch.from_numpy(leaf[rows]), y)
    files = [find_memory_map(leaf) for _, leaf in tree_leaves(x)]
    behind = tuple(file for file in files if file is not None)
    return ClientExamples(
        tree_map(_as_mapped_tensor, x), y, _client_offsets(client_rows), rows, behind
    )


def _as_mapped_tensor(leaf: Inputs) -> Tensor:
    if not isinstance(leaf, np.ndarray):
        raise QuiverError(
            "data.mapped = true: the data set could not be written to the cache, from which it "
            "would be mapped; set data.options.cache to a folder that can be written."
        )
    with warnings.catch_warnings():
        # Torch has no read-only tensors; no code writes to these.
        warnings.simplefilter("ignore")
        return torch.from_numpy(leaf)


def _client_offsets(client_rows: Sequence[Integers]) -> Integers:
    return np.cumsum([0, *(len(part) for part in client_rows)]).astype(np.int64)


def _make_augmentation(dataset: Dataset, augment: str | Augment | None) -> Augment | None:
    if isinstance(augment, str):
        augment = AUGMENTATIONS.find(augment)
    if augment is None:
        return None
    if isinstance(augment, CropFlip):
        if not dataset.is_image:
            raise QuiverError(
                f"random crop and flip need images [channels, height, width]; {dataset.name} has "
                f"inputs of shape {_describe_shape(dataset)}: set data.augment = 'none'."
            )
        channels = dataset.train_x.shape[1]
        mean, std = dataset.mean or (0.0,) * channels, dataset.std or (1.0,) * channels
        if not augment.fill:
            return replace(augment, fill=Normalize(mean, std).black)
    return augment


def _describe_shape(dataset: Dataset) -> Any:
    return list(dataset.input_shape) if dataset.is_single_array else dataset.input_shape


_SIZE_OPTIONS = ("samples_per_client", "test_per_client", "validation")


def partition(
    dataset: Dataset | str,
    name: str = "dirichlet",
    clients: int | None = None,
    seed: int = 0,
    *,
    augment: str | Augment | None = None,
    mapped: bool = False,
    unseen: Chosen | None = None,
    **options: Any,
) -> FederatedData:
    """Partition a data set (or one by its name) between clients: what `simulate` takes.

    `name` is a scheme in data.partition.PARTITIONS and `options` are its own (alpha,
    classes_per_client, min_samples) or samples_per_client, test_per_client and validation. 20
    clients unless given; under "natural" every owner is one. `mapped` leaves the inputs on disk,
    where they lie there, and reads a batch when it is used: for data larger than memory. `unseen`
    holds clients out of the federation (data/unseen.py), with unseen_start, unseen_epochs,
    unseen_part and unseen_when.
    """
    source = load_dataset(dataset) if isinstance(dataset, str) else dataset
    if not isinstance(source, Dataset):
        raise QuiverError(
            f"dataset is a {type(source).__name__}: give what qv.load_dataset returns, or its "
            "name; arrays of your own that are partitioned already go into "
            "qv.FederatedData.from_arrays."
        )
    if not isinstance(name, str):
        raise QuiverError(f"partition {name!r}: give a name, such as 'dirichlet'.")
    clients, seed, options = python_number(clients), python_number(seed), python_number(options)
    for what, count in (("clients", clients), ("seed", seed)):
        if not isinstance(count, int | None) or isinstance(count, bool):
            raise QuiverError(f"{what} = {count!r}: give a whole number.")
    number = 20 if clients is None and name != "natural" else clients
    tests = {key: options.pop(key) for key in UNSEEN_OPTIONS if key in options}
    parts = ways.make_partition(source, name, number, seed, **options)
    if unseen is not None:
        parts = parts.hold_out(unseen, seed)
    elif tests:
        raise QuiverError(f"{min(tests)} without unseen: say which clients are held out.")
    ways.check_partition(source, parts)
    origin = {
        "name": source.name,
        "clients": parts.clients + (0 if parts.unseen is None else parts.unseen.clients),
        "partition": name,
        **ways.partition_options(
            name, {k: v for k, v in options.items() if k not in _SIZE_OPTIONS}
        ),
        **{key: options[key] for key in _SIZE_OPTIONS if options.get(key) is not None},
        "augment": augment if isinstance(augment, str) else "none" if augment is None else "own",
        "seed": seed,
        **({} if unseen is None else {"unseen": python_number(unseen), **tests}),
    }
    return replace(federate(source, parts, augment, mapped, tests), origin=origin)
