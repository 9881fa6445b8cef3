"""Data sets of torch: anything with a length whose items are (inputs, target) or dictionaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quiverfl.data.dataset import Dataset, report_notes
from quiverfl.data.sources.arrays import Kinds, from_arrays, split_train_test
from quiverfl.data.sources.table import (
    Names,
    Options,
    choose_options,
    from_frame,
    with_options,
)
from quiverfl.data.sources.table_files import OF_FILES, Origin
from quiverfl.errors import QuiverError
from quiverfl.support.environment import require_package
from quiverfl.trees import tree_leaves, tree_map
from quiverfl.types import AnyArray

if TYPE_CHECKING:
    import pandas as pd


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
    said: dict[str, Any] = {"inputs": inputs, "targets": targets, "are_ids": _read_tensor}
    if test is not None:
        lists = not callable(owner) and not isinstance(owner, str | None)
        other = _read(f"{called}, test", test, test_owner if lists else owner, label)
        owners = None if whose is None or other[2] is None else (whose, other[2])
        if whose is not None and owners is None:
            raise QuiverError("owner is a list of the items of train: give test_owner, too.")
        dataset = from_arrays(called, called, (x, y), other[:2], owners, classes, **said)
        return report_notes(dataset)
    one = not isinstance(y, dict) and y.ndim == 1 and targets in (None, "labels")
    groups = whose if whose is not None else y if one else np.zeros(len(train), np.int64)
    rows = split_train_test(groups, test_share)
    first, second = (
        tuple(tree_map(lambda leaf, r=r: leaf[r], part) for part in (x, y)) for r in rows
    )
    owners = None if whose is None else (whose[rows[0]], whose[rows[1]])
    return report_notes(from_arrays(called, called, first, second, owners, classes, **said))


def _read_tensor(path: str, x: AnyArray) -> bool:
    """Whether a tensor holds ids: whole numbers except bytes, as in an .npz."""
    return bool(np.issubdtype(x.dtype, np.integer)) and x.dtype != np.uint8


def _read(where: str, items: Any, owner: Any, label: str) -> tuple[Any, Any, AnyArray | None]:
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise QuiverError(
            f"{where}: a {type(items).__name__} has no length or no items by number; of a stream "
            "make a list first: list(itertools.islice(stream, 1000))."
        )
    if not len(items):
        raise QuiverError(f"{where}: there are no items.")
    rows = [_split_item(f"{where}, item {i}", items[i], owner, label) for i in range(len(items))]
    x, y = (_stack_rows(where, [row[part] for row in rows]) for part in (0, 1))
    if owner is None:
        return x, y, None
    names = [row[2] for row in rows] if callable(owner) or isinstance(owner, str) else list(owner)
    if len(names) != len(rows):
        raise QuiverError(f"{where}: {len(names)} owners for {len(rows)} items: give one each.")
    return x, y, np.array([str(_to_numpy(one)) for one in names])


def _split_item(where: str, item: Any, owner: Any, label: str) -> tuple[Any, Any, Any]:
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


def _to_numpy(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _stack_rows(where: str, rows: list[Any]) -> Any:
    """The leaves of all items, each as one array."""
    trees = [tree_map(np.asarray, row) for row in rows]
    first = dict(tree_leaves(trees[0]))
    for number, tree in enumerate(trees):
        own = dict(tree_leaves(tree))
        for path, leaf in first.items():
            if path not in own or own[path].shape != leaf.shape:
                actual = "nothing" if path not in own else f"shape {list(own[path].shape)}"
                called = f" {path!r}" if path else ""
                raise QuiverError(
                    f"{where}, item {number}:{called} has {actual}, the first item's shape is "
                    f"{list(leaf.shape)}: pad or resize them to one."
                )
    return tree_map(lambda *parts: np.stack(parts), *trees)


# Data sets of Hugging Face's `datasets`: what lies on disk, or one that is loaded already.
#
# Their columns are those of a table, and `owner` is the column that makes the clients.


PART = "part of the dictionary"
"""The column that says which part a row is of, where they come in parts."""


@with_options
def read_huggingface(path: Path, options: Options) -> Dataset:
    """A folder that `save_to_disk` wrote; the options are those of a table."""
    require_package("datasets", "data 'huggingface'")
    for key in OF_FILES:
        if getattr(options, key) is not None:
            raise QuiverError(f"data.options.{key} is for text files, and {path} is none.")
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # of a dozen kinds, its own and arrow's
        raise QuiverError(
            f"{path} is not a readable folder of datasets' save_to_disk ({error}); files of other "
            "kinds: name = 'table', or module:function with qv.from_huggingface."
        ) from error
    return _convert_dataset(loaded, path.name, str(path), options)


def from_huggingface(
    dataset: Any,
    label: Names = "label",
    features: Names | None = None,
    owner: str | None = None,
    name: str = "",
    **options: Any,
) -> Dataset:
    """A `datasets.Dataset`, or a DatasetDict with `train` and `test` (or `validation`).

    `label`, `features` and `owner` name columns; several of lists are a dictionary of inputs.
    `options` are those of a table: split, test_share, classes, inputs, exclude, targets, pad,
    length, mask, missing, categories. Lists of whole numbers are ids.
    """
    require_package("datasets", "qv.from_huggingface")
    chosen = choose_options("from_huggingface", label, features, owner, options)
    called = name or "huggingface"
    return report_notes(_convert_dataset(dataset, called, called, chosen))


def _convert_dataset(loaded: Any, name: str, where: str, options: Options) -> Dataset:
    parts = _find_parts(loaded, where)
    table = _to_frame(parts, where, options)
    if len(parts) > 1:
        options = replace(options, split=PART)
    columns = next(iter(parts.values())).features
    names = _class_names(columns, options.label)
    if names and options.classes is None:
        options = replace(options, classes=len(names))
    owner = options.owner
    if owner is not None and owner in table and _class_names(columns, owner):
        table[owner] = table[owner].map(dict(enumerate(_class_names(columns, owner))))
    dataset = from_frame(name, Origin(where), table, options, lists_are_ids=True)
    if names and dataset.train_target is None:
        return replace(dataset, class_names=names)
    return dataset


def _find_parts(loaded: Any, where: str) -> dict[str, Any]:
    """Rows for training and for testing, or all together."""
    import datasets

    if isinstance(loaded, datasets.Dataset):
        return {"train": loaded}
    if not isinstance(loaded, datasets.DatasetDict):
        raise QuiverError(
            f"{where}: a {type(loaded).__name__}: give a datasets.Dataset or DatasetDict; of a "
            "stream take what is needed first: datasets.Dataset.from_list(list(stream.take(1000)))."
        )
    if "train" not in loaded:
        raise QuiverError(f"{where}: no part 'train'; it has {', '.join(loaded)}.")
    test = next((part for part in ("test", "validation") if part in loaded), None)
    return {"train": loaded["train"], **({} if test is None else {"test": loaded[test]})}


def _to_frame(parts: Mapping[str, Any], where: str, options: Options) -> pd.DataFrame:
    import pandas as pd

    frames = [part.with_format(None).to_pandas() for part in parts.values()]
    if len(frames) > 1 and options.split is not None:
        raise QuiverError(
            f"{where}: it comes in parts ({', '.join(parts)}), and split = {options.split!r} names "
            "a column for that: leave it out."
        )
    if len(frames) > 1:
        frames = [frame.assign(**{PART: name}) for name, frame in zip(parts, frames, strict=True)]
    table: pd.DataFrame = pd.concat(frames, ignore_index=True)
    if table.empty:
        raise QuiverError(f"{where} has no rows.")
    return table


def _class_names(columns: Any, column: Any) -> tuple[str, ...]:
    """Class names of a label column; none of other columns."""
    kind = columns.get(column) if isinstance(column, str) else None
    return tuple(getattr(kind, "names", None) or ())
