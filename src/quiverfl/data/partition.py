"""Partition examples between clients: training examples by one of `partitioners`, and a test part.

A client's test part follows the class proportions its training part really has, drawn without
repetition within a client. Test examples may be shared between clients; training examples never.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.data import partitioners
from quiverfl.data.dataset import Dataset
from quiverfl.data.unseen import Chosen, choose_unseen
from quiverfl.errors import QuiverError, QuiverWarning, say_leave_out, suggest
from quiverfl.seeds import stream
from quiverfl.support.references import Registry
from quiverfl.types import Integers

_PARTITIONS: dict[str, Callable[..., list[Integers]]] = {
    "dirichlet": partitioners.dirichlet,
    "dirichlet_by_class": partitioners.dirichlet_by_class,
    "pathological": partitioners.pathological,
    "iid": partitioners.iid,
    "natural": partitioners.natural,
}
PARTITIONS = Registry("partition", _PARTITIONS)
COMMON_PARAMETERS = ("dataset", "clients", "samples", "seed")


@dataclass(frozen=True, eq=False)
class Partition:
    """Per client, the numbers of its training and test examples in the data set.

    With `held_out` the test examples are training examples of the data set that were set aside,
    so `test` counts in its training part. Counts are [clients, classes]. `names` are the owners
    that the clients are, under `natural`; empty otherwise. `unseen` are clients that were held out
    of the federation.
    """

    train: tuple[Integers, ...]
    test: tuple[Integers, ...]
    train_counts: Integers
    test_counts: Integers
    held_out: bool = False
    names: tuple[str, ...] = ()
    unseen: Partition | None = None

    @property
    def clients(self) -> int:
        return len(self.train)

    def heterogeneity(self) -> float:
        """Mean total-variation distance of the clients' class proportions from the overall ones.

        0 when all clients have the same proportions; towards 1 the less they have in common.
        """
        own = self.train_counts / self.train_counts.sum(axis=1, keepdims=True)
        everyone = self.train_counts.sum(axis=0) / self.train_counts.sum()
        return float(0.5 * np.abs(own - everyone).sum(axis=1).mean())

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Flat arrays for a file: client i has indices[offsets[i]:offsets[i + 1]].

        `names` is there only where clients have some, as it was in no file of earlier versions.
        """
        arrays: dict[str, npt.NDArray[Any]] = {
            "train_counts": self.train_counts,
            "test_counts": self.test_counts,
        }
        if self.names:
            arrays["names"] = np.array(self.names, dtype=np.str_)
        for part, rows in (("train", self.train), ("test", self.test)):
            arrays[f"{part}_indices"] = np.concatenate(rows).astype(np.int64)
            sizes = [0, *(len(part) for part in rows)]
            arrays[f"{part}_offsets"] = np.cumsum(sizes).astype(np.int64)
        if self.unseen is not None:
            theirs = self.unseen.arrays().items()
            arrays.update((f"unseen_{name}", array) for name, array in theirs)
        return arrays

    def select(self, clients: Sequence[int]) -> Partition:
        """The examples of some clients, renumbered from 0."""
        return replace(
            self,
            train=tuple(self.train[client] for client in clients),
            test=tuple(self.test[client] for client in clients),
            train_counts=self.train_counts[list(clients)],
            test_counts=self.test_counts[list(clients)],
            names=tuple(self.names[client] for client in clients) if self.names else (),
        )

    def hold_out(self, unseen: Chosen, seed: int) -> Partition:
        """Without some clients, drawn by the seed or named; they are its `unseen`."""
        away = choose_unseen(unseen, self.clients, self.names, seed).tolist()
        stay = [client for client in range(self.clients) if client not in set(away)]
        return replace(self.select(stay), unseen=self.select(away))


def make_partition(
    dataset: Dataset,
    name: str,
    clients: int | None,
    seed: int,
    *,
    samples_per_client: int | None = None,
    test_per_client: int | None = None,
    validation: float | None = None,
    **options: Any,
) -> Partition:
    """Share a data set out between clients; a pure function of its arguments.

    `samples_per_client` takes fewer examples than there are; `test_per_client` is a test set's
    size unless proportions cannot be kept at that size (None: the test examples divided by the
    number of clients). `validation` sets that fraction of every client's training examples aside as
    its test set and leaves the data set's own test examples untouched: for tuning.
    """
    settings = partition_options(name, options)
    train = PARTITIONS[name](dataset, clients, samples_per_client, seed, **settings)
    names = _owner_names(dataset, clients, seed) if name == "natural" else ()
    if validation is not None:
        return replace(_hold_out(dataset, train, validation, seed), names=names)
    if test_per_client is not None and test_per_client < 1:
        raise QuiverError(f"data.test_per_client = {test_per_client}: it must be at least 1.")
    if name == "natural" and dataset.test_owner is not None:
        chosen = partitioners.choose_owners(dataset, clients, seed)
        test = partitioners.find_rows_by_owner(dataset.test_owner, chosen)
        test = _limit_test_examples(dataset, test, test_per_client, seed)
    else:
        test = _draw_test_like_train(dataset, train, test_per_client, seed)
    return replace(_build_partition(dataset, train, test, held_out=False), names=names)


def check_partition(dataset: Dataset, partition: Partition) -> None:
    """Refuse a partition in which no client can be tested; warn of one with a single class."""
    if not partition.test_counts.sum():
        raise QuiverError(
            f"none of the {partition.clients} clients has test data, so no model can be judged: "
            f"{dataset.name} has {len(dataset.test_y)} test examples for them. Raise "
            "data.options.test_share or set data.validation; where owners have a single row each, "
            "name another data.options.owner."
        )
    present = np.flatnonzero(partition.train_counts.sum(axis=0) + partition.test_counts.sum(axis=0))
    if dataset.train_target is None and len(present) == 1:
        warnings.warn(
            f"{dataset.name}: all labels are {dataset.class_names[present[0]]!r}: with one class "
            "alone there is nothing to tell apart, and an accuracy says nothing. Look at "
            "data.options.label.",
            QuiverWarning,
            stacklevel=3,
        )


def _owner_names(dataset: Dataset, clients: int | None, seed: int) -> tuple[str, ...]:
    """Names of the clients under `natural`; owners without names get their numbers."""
    chosen = partitioners.choose_owners(dataset, clients, seed).tolist()
    return tuple(dataset.owner_names[i] if dataset.owner_names else str(i) for i in chosen)


def partition_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a partition with their defaults filled in; an unknown one is refused."""
    parameters = inspect.signature(PARTITIONS.find(name)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in COMMON_PARAMETERS}
    for option in options:
        if option not in defaults:
            known = suggest(option, defaults) if defaults else "it has no options."
            raise QuiverError(
                f"partition {name!r} has no option {option!r}; {known} "
                f"{say_leave_out(f'data.{option}')}"
            )
    return defaults | dict(options)


def _build_partition(
    dataset: Dataset, train: Sequence[Integers], test: Sequence[Integers], held_out: bool
) -> Partition:
    test_labels = dataset.train_y if held_out else dataset.test_y
    return Partition(
        train=tuple(train),
        test=tuple(test),
        train_counts=_count_classes(dataset.train_y, train, dataset.classes),
        test_counts=_count_classes(test_labels, test, dataset.classes),
        held_out=held_out,
    )


def _count_classes(labels: Integers, rows_of_clients: Sequence[Integers], classes: int) -> Integers:
    return np.stack([np.bincount(labels[rows], minlength=classes) for rows in rows_of_clients])


def _draw_test_like_train(
    dataset: Dataset, train: Sequence[Integers], wanted: int | None, seed: int
) -> list[Integers]:
    if wanted is None:
        wanted = max(1, len(dataset.test_y) // len(train))
    by_class = [np.flatnonzero(dataset.test_y == label) for label in range(dataset.classes)]
    available = np.array([len(rows) for rows in by_class])
    test = []
    for client, rows in enumerate(train):
        generator = stream(seed, "partition-test", client)
        have = np.bincount(dataset.train_y[rows], minlength=dataset.classes)
        counts = proportional_counts(have, available, wanted, generator)
        picked = [
            generator.choice(by_class[label], counts[label], replace=False)
            for label in np.flatnonzero(counts)
        ]
        test.append(np.sort(np.concatenate(picked)) if picked else np.empty(0, dtype=np.int64))
    return test


def _limit_test_examples(
    dataset: Dataset, test: Sequence[Integers], wanted: int | None, seed: int
) -> list[Integers]:
    """Limit every owner's test examples to this number, in their class proportions."""
    limited = list(test)
    for client, rows in enumerate(test):
        if wanted is not None and len(rows) > wanted:
            generator = stream(seed, "partition-test", client)
            limited[client] = rows[
                _draw_in_proportion(dataset.test_y[rows], dataset.classes, wanted, generator)
            ]
    return limited


def _draw_in_proportion(
    labels: Integers, classes: int, wanted: int, generator: np.random.Generator
) -> Integers:
    """Draw positions of `wanted` labels in class proportions."""
    have = np.bincount(labels, minlength=classes)
    counts = proportional_counts(have, have, wanted, generator)
    picked = [
        generator.choice(np.flatnonzero(labels == label), counts[label], replace=False)
        for label in np.flatnonzero(counts)
    ]
    return np.sort(np.concatenate(picked))


def _hold_out(
    dataset: Dataset, train: Sequence[Integers], validation: float, seed: int
) -> Partition:
    if not 0 < validation < 1:
        raise QuiverError(f"data.validation = {validation}: it must be between 0 and 1.")
    kept: list[Integers] = []
    held: list[Integers] = []
    for client, rows in enumerate(train):
        if len(rows) < 2:
            raise QuiverError(
                f"data.validation = {validation}: client {client} has a single training example, "
                "so nothing can be set aside; take fewer clients."
            )
        generator = stream(seed, "partition-validation", client)
        labels = dataset.train_y[rows]
        wanted = min(max(1, round(validation * len(rows))), len(rows) - 1)
        aside = _draw_in_proportion(labels, dataset.classes, wanted, generator)
        held.append(rows[aside])
        kept.append(np.delete(rows, aside))
    return _build_partition(dataset, kept, held, held_out=True)


def proportional_counts(
    have: Integers, available: Integers, wanted: int, generator: np.random.Generator
) -> Integers:
    """Counts per class in the proportions of `have`, `wanted` in all, at most what is available.

    Largest remainders, ties drawn at random. A class without examples is left out. If a class has
    too few examples, the total shrinks rather than the proportions change.
    """
    have = np.where(available > 0, have, 0)
    total = int(have.sum())
    if total == 0:
        return np.zeros_like(have)
    nonempty = have > 0
    total_drawn = min(wanted, int((available[nonempty] * total // have[nonempty]).min()))
    counts, remainder = np.divmod(have * total_drawn, total)
    order = np.lexsort((generator.random(len(have)), -remainder))
    counts[order[: total_drawn - int(counts.sum())]] += 1
    return counts
