"""Data sets of torch: anything with a length whose items are (inputs, target) or dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.data.dataset import Dataset
from quiverfl.data.sources.arrays import Kinds, from_arrays
from quiverfl.data.sources.train_test import train_and_test
from quiverfl.errors import QuiverError
from quiverfl.trees import leaves, mapped

Values = npt.NDArray[Any]
Owner = str | Sequence[Any] | Callable[[Any], Any]
"""A key of items that are dictionaries, one name per item, or a function of an item."""


def from_torch(
    train: Any,
    test: Any = None,
    *,
    owner: Owner | None = None,
    test_owner: Sequence[Any] | None = None,
    label: str = "label",
    name: str = "",
    test_share: float = 0.2,
    classes: int | None = None,
    inputs: Kinds = None,
    targets: Kinds = None,
) -> Dataset:
    """A torch.utils.data.Dataset, and perhaps one for testing; without, a share is set aside.

    Items are pairs (inputs, target), or dictionaries with the target under `label`. `owner` says
    whose an item is: a key of the dictionaries, a function of an item, or a list with an entry per
    item (then `test_owner` is that of `test`). Every item is read once, here: what draws at random
    belongs into `partition(augment=…)`.
    """
    called = name or type(train).__name__
    if test_owner is not None and (test is None or owner is None):
        raise QuiverError("test_owner says whose the items of test are: give both, and owner.")
    x, y, whose = _read(f"{called}, train", train, owner, label)
    said: dict[str, Any] = {"inputs": inputs, "targets": targets, "are_ids": _whole}
    if test is not None:
        lists = not callable(owner) and not isinstance(owner, str | None)
        other = _read(f"{called}, test", test, test_owner if lists else owner, label)
        owners = None if whose is None or other[2] is None else (whose, other[2])
        if whose is not None and owners is None:
            raise QuiverError("owner is a list of the items of train: give test_owner, too.")
        return from_arrays(called, called, (x, y), other[:2], owners, classes, **said)
    one = not isinstance(y, dict) and y.ndim == 1 and targets in (None, "labels")
    groups = whose if whose is not None else y if one else np.zeros(len(train), np.int64)
    rows = train_and_test(groups, test_share)
    first, second = (
        tuple(mapped(lambda leaf, r=r: leaf[r], part) for part in (x, y)) for r in rows
    )
    owners = None if whose is None else (whose[rows[0]], whose[rows[1]])
    return from_arrays(called, called, first, second, owners, classes, **said)


def _whole(path: str, x: Values) -> bool:
    """Whole numbers are ids, but for bytes: as in an .npz."""
    return bool(np.issubdtype(x.dtype, np.integer)) and x.dtype != np.uint8


def _read(where: str, items: Any, owner: Any, label: str) -> tuple[Any, Any, Values | None]:
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise QuiverError(
            f"{where}: a {type(items).__name__} has no length or no items by number; of a stream "
            "make a list first: list(itertools.islice(stream, 1000))."
        )
    if not len(items):
        raise QuiverError(f"{where}: there are no items.")
    found = [_item(f"{where}, item {i}", items[i], owner, label) for i in range(len(items))]
    x, y = (_stacked(where, [row[part] for row in found]) for part in (0, 1))
    if owner is None:
        return x, y, None
    names = [row[2] for row in found] if callable(owner) or isinstance(owner, str) else list(owner)
    if len(names) != len(found):
        raise QuiverError(f"{where}: {len(names)} owners for {len(found)} items: give one each.")
    return x, y, np.array([str(_plain(one)) for one in names])


def _item(where: str, item: Any, owner: Any, label: str) -> tuple[Any, Any, Any]:
    whose = owner(item) if callable(owner) else None
    if isinstance(item, Mapping):
        parts = dict(item)
        for key in (label, *([owner] if isinstance(owner, str) else [])):
            if key not in parts:
                raise QuiverError(f"{where}: no {key!r}; it has {', '.join(map(str, parts))}.")
        whose = parts.pop(owner) if isinstance(owner, str) else whose
        y = parts.pop(label)
        if not parts:
            raise QuiverError(f"{where}: there is nothing beside {label!r}.")
        x = parts if len(parts) > 1 else next(iter(parts.values()))
        return x, y, whose
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise QuiverError(
            f"{where}: a {type(item).__name__}: items are pairs (inputs, target) or dictionaries; "
            "wrap the data set in one whose items are."
        )
    if isinstance(owner, str):
        raise QuiverError(
            f"{where}: owner = {owner!r} is a key, and the items are no dictionaries: give a "
            "function of an item, or a list of owners."
        )
    return item[0], item[1], whose


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _stacked(where: str, rows: list[Any]) -> Any:
    """The leaves of all items, each as one array."""
    trees = [mapped(np.asarray, row) for row in rows]
    first = dict(leaves(trees[0]))
    for number, tree in enumerate(trees):
        own = dict(leaves(tree))
        for path, leaf in first.items():
            if path not in own or own[path].shape != leaf.shape:
                found = "nothing" if path not in own else f"shape {list(own[path].shape)}"
                called = f" {path!r}" if path else ""
                raise QuiverError(
                    f"{where}, item {number}:{called} has {found}, the first item's shape is "
                    f"{list(leaf.shape)}: pad or resize them to one."
                )
    return mapped(lambda *parts: np.stack(parts), *trees)
