"""Your own table: Parquet or CSV, one example per row, with a column that may say whose it is.

Inputs are numbers in columns, lists in one column, or images as the Hugging Face hub stores them
(a struct with the encoded `bytes`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from quiverfl.data.dataset import Dataset
from quiverfl.data.sources.arrays import are_ids, from_arrays
from quiverfl.data.sources.images import in_mode
from quiverfl.data.sources.train_test import train_and_test
from quiverfl.errors import QuiverError, nearest

if TYPE_CHECKING:
    import pandas as pd

Values = npt.NDArray[Any]


def read_table(
    path: Path,
    label: str | Sequence[str] = "label",
    features: str | Sequence[str] | None = None,
    owner: str | None = None,
    split: str | None = None,
    test_share: float = 0.2,
    classes: int | None = None,
    inputs: str | None = None,
    exclude: str | Sequence[str] = (),
    targets: str | None = None,
) -> Dataset:
    """`features`: the column or columns of the inputs (None: all that are left) but for `exclude`.

    In both, `px*` means all columns whose names begin with px.

    Whole numbers are numbers like any others (ages, counts) unless `inputs` is "ids". `targets`
    says that the column or columns `label` hold "numbers" or "ids" to be learned, and not labels.

    `owner` names the column that says whose row it is. `split` names a column with `train` or
    `test` in every row; without it a share of every owner's rows (of every class's, where there
    are no owners) is taken for testing.
    """
    table = _load(path)
    wanted = [label] if isinstance(label, str) else list(label)
    for column in (*wanted, owner, split):
        if column is not None:
            _check_column(path, table, column)
    ids = are_ids(inputs, unless_said=False)
    columns = _feature_columns(path, table, features, exclude, {*wanted, owner, split})
    x = _inputs(path, table, columns, ids)
    y = _learned(path, table, wanted, isinstance(label, str))
    owners = None if owner is None else _column(path, table, owner)
    if split is None:
        groups = y if y.ndim == 1 and targets in (None, "labels") else np.zeros(len(y), np.int64)
        train, test = train_and_test(groups if owners is None else owners, test_share)
    else:
        train, test = _by_column(path, table, split)
    pairs = (x[train], y[train]), (x[test], y[test])
    whose = None if owners is None else (owners[train], owners[test])
    return from_arrays(path.stem, str(path), *pairs, whose, classes, ids, targets)


def _learned(path: Path, table: pd.DataFrame, columns: list[str], one: bool) -> Values:
    """One column's values or lists [n, …], or several columns' values [n, columns]."""
    if not one:
        return np.stack([_column(path, table, column) for column in columns], axis=1)
    if isinstance(table[columns[0]].iloc[0], list | np.ndarray):
        return _lists(path, table, columns[0])
    return _column(path, table, columns[0])


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


def _check_column(path: Path, table: pd.DataFrame, column: str) -> None:
    if column not in table.columns:
        raise QuiverError(f"{path} has no column {column!r}; {nearest(column, table.columns)}")


def _feature_columns(
    path: Path,
    table: pd.DataFrame,
    features: str | Sequence[str] | None,
    exclude: str | Sequence[str],
    taken: set[str | None],
) -> list[str]:
    free = [column for column in table.columns if column not in taken]
    chosen = free if features is None else _named(path, table, features, free, "features")
    left_out = _named(path, table, exclude, free, "exclude")
    columns = [column for column in chosen if column not in left_out]
    if not columns:
        raise QuiverError(f"{path} has no column left for the inputs: set data.options.features.")
    return columns


def _named(
    path: Path, table: pd.DataFrame, names: str | Sequence[str], free: list[str], option: str
) -> list[str]:
    """The columns that names and patterns mean, each once; a pattern means free columns only."""
    found: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        if name in table.columns or not any(letter in name for letter in "*?["):
            _check_column(path, table, name)
            found.append(name)
            continue
        matching = [column for column in free if fnmatchcase(column, name)]
        if not matching:
            raise QuiverError(
                f"{path}: no column matches {name!r} of data.options.{option}; it has "
                f"{', '.join(table.columns)}."
            )
        found += matching
    return list(dict.fromkeys(found))


def _column(path: Path, table: pd.DataFrame, column: str) -> Values:
    values = table[column]
    if values.isna().any():
        row = int(values.isna().to_numpy().argmax())
        raise QuiverError(f"{path}, column {column!r}, row {row}: there is no value.")
    array = values.to_numpy()
    return array.astype(np.str_) if array.dtype == object else array


def _inputs(path: Path, table: pd.DataFrame, columns: list[str], ids: bool) -> Values:
    if len(columns) > 1:
        return np.stack([_numbers(path, table, column, ids) for column in columns], axis=1)
    first = table[columns[0]].iloc[0]
    if isinstance(first, dict | bytes):
        return _images(path, table, columns[0])
    if isinstance(first, list | np.ndarray):
        return _lists(path, table, columns[0])
    return _numbers(path, table, columns[0], ids)[:, None]


def _numbers(path: Path, table: pd.DataFrame, column: str, ids: bool) -> Values:
    values = _column(path, table, column)
    if not (np.issubdtype(values.dtype, np.number) or values.dtype == np.bool_):
        raise QuiverError(
            f"{path}, column {column!r} holds {values.dtype}, not numbers: name the columns of the "
            "inputs with data.options.features, or leave this one out with data.options.exclude."
        )
    if ids and not np.issubdtype(values.dtype, np.integer):
        raise QuiverError(
            f"{path}, column {column!r} holds {values.dtype}, not whole numbers: name the columns "
            "of the ids with data.options.features, or leave out data.options.inputs = 'ids'."
        )
    return values


def _lists(path: Path, table: pd.DataFrame, column: str) -> Values:
    rows = [_nested(value) for value in table[column]]
    for number, row in enumerate(rows):
        if row is None or row.shape != (rows[0].shape if rows[0] is not None else None):
            raise QuiverError(
                f"{path}, column {column!r}, row {number}: its list does not have the shape of "
                "the first row's."
            )
    return np.stack([row for row in rows if row is not None])


def _nested(value: Any) -> Values | None:
    """Lists of lists, as Parquet gives them: arrays of arrays."""
    try:
        if isinstance(value, np.ndarray) and value.dtype == object:
            return np.stack([np.asarray(_nested(inner)) for inner in value])
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.ndim else None


def _images(path: Path, table: pd.DataFrame, column: str) -> Values:
    images: list[Values] = []
    for number, value in enumerate(table[column]):
        content = value.get("bytes") if isinstance(value, dict) else value
        try:
            with Image.open(io.BytesIO(content or b"")) as opened:
                images.append(np.asarray(in_mode(opened, "RGB")))
        except Exception as error:
            # As with image files: whatever the decoder says, the row is what matters.
            raise QuiverError(
                f"{path}, column {column!r}, row {number}: not a readable image ({error})."
            ) from error
        if images[-1].shape != images[0].shape:
            raise QuiverError(
                f"{path}, column {column!r}, row {number}: an image of {images[-1].shape[:2]}, the "
                f"first is {images[0].shape[:2]}; they must have the same size."
            )
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))


def _by_column(path: Path, table: pd.DataFrame, split: str) -> tuple[Values, Values]:
    values = _column(path, table, split)
    for row in np.flatnonzero(~np.isin(values, ["train", "test"])):
        found = str(values[row])
        raise QuiverError(
            f"{path}, column {split!r}, row {row}: {found!r} is neither 'train' nor 'test'."
        )
    return np.flatnonzero(values == "train"), np.flatnonzero(values == "test")
