"""Who holds which examples.

The examples of all clients lie end to end in one tensor; a client is a slice. So nothing is padded
however unequal the clients are, and a batch of any clients is one gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.seeds import Hashes

Integers = npt.NDArray[np.int64]
Prepare = Callable[[Tensor], Tensor]
"""Raw inputs [n, …] → model inputs, such as bytes to normalised floats. Pure."""
Augment = Callable[[Tensor, Hashes], Tensor]
"""(prepared inputs [n, …], 64 random bits per sample [n]) → inputs. Pure."""


@dataclass(frozen=True, eq=False)
class Split:
    """Examples of all clients end to end: client i owns rows offsets[i]:offsets[i + 1]."""

    x: Tensor
    y: Tensor
    offsets: Integers

    @property
    def clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Integers:
        return np.diff(self.offsets)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        rows = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
        return self.x[rows], self.y[rows]

    def only(self, clients: Sequence[int]) -> Split:
        """The same examples for some of the clients, renumbered from 0."""
        parts = [self.of(client) for client in clients]
        offsets = np.concatenate([[0], np.cumsum([len(y) for _, y in parts])]).astype(np.int64)
        return Split(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), offsets)


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Training and test examples per client; how inputs are prepared and augmented."""

    train: Split
    test: Split
    classes: int | None = None
    prepare: Prepare | None = None
    augment: Augment | None = None

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[Any, Any]],
        test: Sequence[tuple[Any, Any]],
        *,
        classes: int | None = None,
        prepare: Prepare | None = None,
        augment: Augment | None = None,
    ) -> FederatedData:
        """One (inputs, targets) pair per client, numpy or torch."""
        if len(train) != len(test):
            raise QuiverError(
                f"train has {len(train)} clients and test has {len(test)}: give one (x, y) pair "
                "per client in both (an empty test pair is allowed)."
            )
        if not train:
            raise QuiverError("train is empty: give one (x, y) pair per client.")
        first, second = _end_to_end("train", train), _end_to_end("test", test)
        for client, size in enumerate(first.sizes):
            if size == 0:
                raise QuiverError(
                    f"client {client} has no training data: leave it out, or partition the data "
                    "so that every client gets some."
                )
        return cls(first, second, _classes(first, second, classes), prepare, augment)

    @property
    def clients(self) -> int:
        return self.train.clients

    def only(self, clients: Sequence[int]) -> FederatedData:
        """The data of some clients, renumbered from 0: what one shard or one peer holds."""
        return replace(self, train=self.train.only(clients), test=self.test.only(clients))


def _end_to_end(name: str, pairs: Sequence[tuple[Any, Any]]) -> Split:
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for client, pair in enumerate(pairs):
        x, y = (torch.as_tensor(part) for part in pair)
        if len(x) != len(y):
            raise QuiverError(f"{name}, client {client}: {len(x)} inputs but {len(y)} targets.")
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise QuiverError(
                f"{name}, client {client}: the inputs hold NaN or infinity; clean the data first."
            )
        if y.is_floating_point() and not torch.isfinite(y).all():
            raise QuiverError(f"{name}, client {client}: the targets hold NaN or infinity.")
        if inputs and len(x) and x.shape[1:] != inputs[0].shape[1:]:
            raise QuiverError(
                f"{name}, client {client}: inputs of shape {tuple(x.shape[1:])}, "
                f"other clients have {tuple(inputs[0].shape[1:])}."
            )
        inputs.append(x if len(x) or not inputs else inputs[0][:0])
        targets.append(y if y.is_floating_point() else y.long())
    offsets = np.concatenate([[0], np.cumsum([len(y) for y in targets])]).astype(np.int64)
    return Split(torch.cat(inputs), torch.cat(targets), offsets)


def _classes(train: Split, test: Split, classes: int | None) -> int | None:
    if train.y.is_floating_point() or train.y.ndim != 1:
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
