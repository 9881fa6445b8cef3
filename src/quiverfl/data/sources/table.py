"""Your own table: Parquet or CSV, one example per row, with a column that may say whose it is.

Inputs are numbers in columns, lists in one column, or images as the Hugging Face hub stores them
(a struct with the encoded `bytes`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quiverfl.data.dataset import Dataset
from quiverfl.data.sources.arrays import Kinds, from_arrays
from quiverfl.data.sources.table_columns import (
    Padding,
    column_of,
    inputs_of,
    is_listed,
    lists_of,
    padded,
)
from quiverfl.data.sources.train_test import train_and_test
from quiverfl.errors import QuiverError, nearest
from quiverfl.objectives import NO_TOKEN
from quiverfl.trees import mapped

if TYPE_CHECKING:
    import pandas as pd

Values = npt.NDArray[Any]


Columns = str | Sequence[str]
Names = Columns | Mapping[str, Columns]
"""Columns; or several inputs or targets by name, each of some columns."""


@dataclass(frozen=True)
class Options:
    """Which columns are what.

    `features`: the column or columns of the inputs (None: all that are left) but for `exclude`.
    In both, `px*` means all columns whose names begin with px. A dictionary of names and columns
    makes a dictionary of inputs; so do several columns of lists, by their own names. `label` may be
    a dictionary, too, of targets.

    Whole numbers are numbers like any others (ages, counts) unless `inputs` is "ids". `targets`
    says that the column or columns `label` hold "numbers" or "ids" to be learned, and not labels.

    `owner` names the column that says whose row it is. `split` names a column with `train` or
    `test` in every row; without it a share of every owner's rows (of every class's, where there
    are no owners) is taken for testing.

    `pad` is put behind lists that are shorter than the longest, or than `length`; `mask` is what
    the input is called that says where there is none.
    """

    label: Names = "label"
    features: Names | None = None
    owner: str | None = None
    split: str | None = None
    test_share: float = 0.2
    classes: int | None = None
    inputs: Kinds = None
    exclude: Columns = ()
    targets: Kinds = None
    pad: float | None = None
    length: int | None = None
    mask: str = "attention_mask"

    @property
    def padding(self) -> Padding | None:
        if self.pad is None:
            if self.length is not None:
                raise QuiverError("data.options.length is the length after padding: set pad, too.")
            return None
        if self.length is not None and self.length < 1:
            raise QuiverError(f"data.options.length = {self.length}: it must be at least 1.")
        return Padding(self.pad, self.length, self.mask)


def with_options(read: Callable[[Path, Options], Dataset]) -> Callable[..., Dataset]:
    """A source that takes a path and the fields of Options, by their names."""

    def source(path: Path, **options: Any) -> Dataset:
        return read(path, Options(**options))

    place = inspect.Parameter("path", inspect.Parameter.POSITIONAL_ONLY)
    fields = inspect.signature(Options).parameters.values()
    source.__signature__ = inspect.Signature([place, *fields])  # type: ignore[attr-defined]
    return source


@with_options
def read_table(path: Path, options: Options) -> Dataset:
    return from_frame(path.stem, str(path), _load(path), options)


def from_frame(
    name: str, where: str, table: pd.DataFrame, options: Options, lists_are_ids: bool = False
) -> Dataset:
    """A table in memory; `where` is what messages call it."""
    label, owner, split, targets = options.label, options.owner, options.split, options.targets
    wanted = _columns_in(label)
    for column in (*wanted, owner, split):
        if column is not None:
            _check_column(where, table, column)
    x, lists = _inputs(where, table, options, {*wanted, owner, split})
    y = _learned(where, table, label, options.padding)
    owners = None if owner is None else column_of(where, table, owner)
    if split is None:
        one = not isinstance(y, dict) and y.ndim == 1 and targets in (None, "labels")
        groups = y if one else np.zeros(len(table), np.int64)
        train, test = train_and_test(groups if owners is None else owners, options.test_share)
    else:
        train, test = _by_column(where, table, split)
    first, second = (
        tuple(mapped(lambda leaf, r=rows: leaf[r], part) for part in (x, y))
        for rows in (train, test)
    )
    whose = None if owners is None else (owners[train], owners[test])

    def are_ids(path: str, leaf: Values) -> bool:
        """Lists of whole numbers beside others, or padded, are ids: a mask is one of them."""
        whole = bool(np.issubdtype(leaf.dtype, np.integer)) and leaf.dtype != np.uint8
        return whole and path in lists and (bool(path) or lists_are_ids)

    kinds = options.inputs, targets
    return from_arrays(name, where, first, second, whose, options.classes, *kinds, are_ids)


def _columns_in(names: Names) -> list[str]:
    if isinstance(names, Mapping):
        return [column for inner in names.values() for column in _columns_in(inner)]
    return [names] if isinstance(names, str) else list(names)


def _inputs(
    where: str, table: pd.DataFrame, options: Options, taken: set[str | None]
) -> tuple[Any, set[str]]:
    """The inputs, and which of them were lists."""
    features, padding = options.features, options.padding
    named = features if isinstance(features, Mapping) else {"": features}
    found: dict[str, Any] = {}
    lists: set[str] = set()
    for name, own in named.items():
        columns = _feature_columns(where, table, own, options.exclude, taken)
        said = options.inputs.get(name) if isinstance(options.inputs, Mapping) else options.inputs
        part = inputs_of(where, table, columns, said == "ids", padding)
        if not isinstance(part, dict):
            part = {name: part}
        elif name and len(columns) == 1:  # padded, with its mask
            part = {name if key == columns[0] else key: part[key] for key in part}
        found |= part
        lists |= set(part) if is_listed(table, columns[0]) else set()
    return found[""] if list(found) == [""] else found, lists


def _learned(where: str, table: pd.DataFrame, label: Names, padding: Padding | None) -> Any:
    """One column's values or lists [n, …], or several columns' values [n, columns]."""
    if isinstance(label, Mapping):
        return {name: _learned(where, table, own, padding) for name, own in label.items()}
    if not isinstance(label, str):
        return np.stack([column_of(where, table, column) for column in label], axis=1)
    if is_listed(table, label):
        if padding is not None:
            return padded(where, table, label, NO_TOKEN, padding.length)
        return lists_of(where, table, label)
    return column_of(where, table, label)


def _load(path: Path) -> pd.DataFrame:
    # Here because it takes a while to import and only tables need it.
    import pandas as pd

    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
        elif path.suffix == ".csv":
            table = pd.read_csv(path)
        else:
            raise QuiverError(f"{path}: tables are .parquet or .csv files.")
    except QuiverError:
        raise
    except Exception as error:
        # pandas and pyarrow each raise kinds of their own for damaged files.
        raise QuiverError(f"{path} is not a readable table ({error}).") from error
    if table.empty:
        raise QuiverError(f"{path} has no rows.")
    table.columns = table.columns.map(str)
    return table


def _check_column(where: str, table: pd.DataFrame, column: str) -> None:
    if column not in table.columns:
        raise QuiverError(f"{where} has no column {column!r}; {nearest(column, table.columns)}")


def _feature_columns(
    where: str,
    table: pd.DataFrame,
    features: str | Sequence[str] | None,
    exclude: str | Sequence[str],
    taken: set[str | None],
) -> list[str]:
    free = [column for column in table.columns if column not in taken]
    chosen = free if features is None else _named(where, table, features, free, "features")
    left_out = _named(where, table, exclude, free, "exclude")
    columns = [column for column in chosen if column not in left_out]
    if not columns:
        raise QuiverError(f"{where} has no column left for the inputs: set data.options.features.")
    return columns


def _named(
    where: str, table: pd.DataFrame, names: str | Sequence[str], free: list[str], option: str
) -> list[str]:
    """The columns that names and patterns mean, each once; a pattern means free columns only."""
    found: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        if name in table.columns or not any(letter in name for letter in "*?["):
            _check_column(where, table, name)
            found.append(name)
            continue
        matching = [column for column in free if fnmatchcase(column, name)]
        if not matching:
            raise QuiverError(
                f"{where}: no column matches {name!r} of data.options.{option}; it has "
                f"{', '.join(table.columns)}."
            )
        found += matching
    return list(dict.fromkeys(found))


def _by_column(where: str, table: pd.DataFrame, split: str) -> tuple[Values, Values]:
    values = column_of(where, table, split)
    for row in np.flatnonzero(~np.isin(values, ["train", "test"])):
        found = str(values[row])
        raise QuiverError(
            f"{where}, column {split!r}, row {row}: {found!r} is neither 'train' nor 'test'."
        )
    return np.flatnonzero(values == "train"), np.flatnonzero(values == "test")
