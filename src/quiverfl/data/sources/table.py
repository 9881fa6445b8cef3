"""Your own table: Parquet or CSV, one example per row, with a column that may say whose it is.

Inputs are numbers in columns, lists in one column, or images as the Hugging Face hub stores them
(a struct with the encoded `bytes`).
"""

from __future__ import annotations

import csv
import inspect
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from quiverfl.data.dataset import Dataset
from quiverfl.data.sources.arrays import Kinds, format_names, from_arrays, split_train_test
from quiverfl.data.sources.images import convert_mode
from quiverfl.errors import QuiverError, suggest
from quiverfl.objectives import NO_TOKEN
from quiverfl.trees import tree_map
from quiverfl.types import AnyArray

if TYPE_CHECKING:
    import pandas as pd


# The columns of a table as arrays: numbers, lists, images; lists of unequal lengths padded.


@dataclass(frozen=True)
class Padding:
    """How lists of unequal lengths get one length: that of the longest unless given."""

    value: float
    length: int | None = None
    mask: str = "attention_mask"


NAMES_OF_INDICES = re.compile(
    r"unnamed: \d+|index|idx|id|row|row_?id|uu?id|.*[_ .-]id", re.IGNORECASE
)
CAMEL_ID = re.compile(r".*[a-z]I[dD]")
COUNTED_ROWS = 10
"""With fewer rows, whole numbers may count them by chance."""


def format_row(where: str, row: int) -> str:
    """A row as a person finds it: the line of a .csv file, counted from 1; else its number."""
    if not (where.endswith(".csv") and Path(where).is_file()):
        return f"row {row}"
    number, line = -1, 1  # the names of the columns come before row 0
    with Path(where).open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        for record in reader:
            if number == row and not _is_blank(record):
                return f"line {line}"
            number += not _is_blank(record)
            line = reader.line_num + 1
    return f"row {row}"


def _is_blank(record: list[str]) -> bool:
    """Whether pandas leaves the line out."""
    return not record or (len(record) == 1 and not record[0].strip())


def is_index(table: pd.DataFrame, column: str) -> bool:
    """Whether a column's name or values say that it only tells the rows apart."""
    if NAMES_OF_INDICES.fullmatch(column) or CAMEL_ID.fullmatch(column):
        return True
    values = table[column].to_numpy()
    if not np.issubdtype(values.dtype, np.integer) or len(values) < COUNTED_ROWS:
        return False
    first = int(values.min())
    return first in (0, 1) and np.array_equal(np.sort(values), np.arange(len(values)) + first)


def read_column(where: str, table: pd.DataFrame, column: str) -> AnyArray:
    values = table[column]
    if values.isna().any():
        row = format_row(where, int(values.isna().to_numpy().argmax()))
        raise QuiverError(
            f"{where}, column {column!r}, {row}: there is no value. Fill it in, or leave the row "
            "out."
        )
    array = values.to_numpy()
    return array.astype(np.str_) if array.dtype == object else array


def read_inputs(
    where: str, table: pd.DataFrame, columns: list[str], ids: bool, padding: Padding | None
) -> Any:
    """Several columns of numbers are one array, several columns of lists a dictionary of them.

    Padded lists come with a mask that says which places are not padding.
    """
    listed = [column for column in columns if holds_lists(table, column)]
    if listed and len(listed) == len(columns) and (len(columns) > 1 or padding is not None):
        return _read_several(where, table, columns, padding)
    if listed and len(columns) > 1:
        other = next(column for column in columns if column not in listed)
        raise QuiverError(
            f"{where}: column {listed[0]!r} holds lists and column {other!r} does not: name the "
            "columns of the inputs with data.options.features, those of different kinds as a "
            "dictionary, or leave some out with data.options.exclude."
        )
    if len(columns) > 1:
        return np.stack([_read_numbers(where, table, column, ids) for column in columns], axis=1)
    if isinstance(table[columns[0]].iloc[0], dict | bytes):
        return _read_images(where, table, columns[0])
    if listed:
        return read_lists(where, table, columns[0])
    return _read_numbers(where, table, columns[0], ids)[:, None]


def holds_lists(table: pd.DataFrame, column: str) -> bool:
    return isinstance(table[column].iloc[0], list | np.ndarray)


def _read_several(
    where: str, table: pd.DataFrame, columns: list[str], padding: Padding | None
) -> dict[str, AnyArray]:
    if padding is None:
        return {column: read_lists(where, table, column) for column in columns}
    sizes = {column: [len(row) for row in table[column]] for column in columns}
    first = sizes[columns[0]]
    for column, own in sizes.items():
        for row in np.flatnonzero(np.array(own) != first):
            raise QuiverError(
                f"{where}, row {row}: {own[row]} values in column {column!r} and {first[row]} in "
                f"{columns[0]!r}; sequences that are padded together must be of one length."
            )
    length = padding.length or max(first)
    inputs = {
        column: pad_column(
            where, table, column, 0 if column == padding.mask else padding.value, length
        )
        for column in columns
    }
    if padding.mask not in inputs:
        places = np.arange(length) < np.array(first)[:, None]
        inputs[padding.mask] = places.astype(np.int64)
    return inputs


def pad_column(
    where: str, table: pd.DataFrame, column: str, value: float, length: int | None
) -> AnyArray:
    """Lists of numbers, each as long as the longest or cut to `length`; [n, length]."""
    rows = [np.asarray(row) for row in table[column]]
    for number, row in enumerate(rows):
        if row.ndim != 1 or not (row.size == 0 or np.issubdtype(row.dtype, np.number)):
            raise QuiverError(
                f"{where}, column {column!r}, row {number}: only plain lists of numbers can be "
                "padded."
            )
    kind = np.result_type(*(row.dtype for row in rows if row.size))
    longest = length or max(len(row) for row in rows)
    padded = np.full((len(rows), longest), value, dtype=kind)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row[:longest]
    return padded


def _read_numbers(where: str, table: pd.DataFrame, column: str, ids: bool) -> AnyArray:
    values = read_column(where, table, column)
    if not (np.issubdtype(values.dtype, np.number) or values.dtype == np.bool_):
        kind = "text" if values.dtype.kind in "USO" else str(values.dtype)
        raise QuiverError(
            f"{where}, column {column!r} holds {kind}, not numbers: name the columns of "
            "the inputs with data.options.features, or leave this one out with "
            "data.options.exclude; if it says whose row it is, set data.options.owner = "
            f"{column!r}."
        )
    _check_finite(where, column, values)
    if ids and not np.issubdtype(values.dtype, np.integer):
        raise QuiverError(
            f"{where}, column {column!r} holds {values.dtype}, not whole numbers: name the columns "
            "of the ids with data.options.features, or leave out data.options.inputs = 'ids'."
        )
    return values


def _check_finite(where: str, column: str, values: AnyArray) -> None:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    for row in np.flatnonzero(~np.isfinite(single)):
        limit = "" if np.isinf(values[row]) else ", and float32 ends at 3.4e38"
        raise QuiverError(
            f"{where}, column {column!r}, {format_row(where, int(row))}: {values[row]} is too large"
            f"{limit}. Correct it, leave the row out, or the column with data.options.exclude."
        )


def read_lists(where: str, table: pd.DataFrame, column: str) -> AnyArray:
    rows = [_is_nested(value) for value in table[column]]
    for number, row in enumerate(rows):
        if row is None or row.shape != (rows[0].shape if rows[0] is not None else None):
            raise QuiverError(
                f"{where}, column {column!r}, row {number}: its list does not have the shape of "
                "the first row's."
            )
    return np.stack([row for row in rows if row is not None])


def _is_nested(value: Any) -> AnyArray | None:
    """Lists of lists, as Parquet gives them: arrays of arrays."""
    try:
        if isinstance(value, np.ndarray) and value.dtype == object:
            return np.stack([np.asarray(_is_nested(inner)) for inner in value])
        array = np.asarray(value)
    except ValueError:
        return None
    return array if array.ndim else None


def _read_images(where: str, table: pd.DataFrame, column: str) -> AnyArray:
    images: list[AnyArray] = []
    for number, value in enumerate(table[column]):
        content = value.get("bytes") if isinstance(value, dict) else value
        try:
            with Image.open(io.BytesIO(content or b"")) as opened:
                images.append(np.asarray(convert_mode(opened, "RGB")))
        except Exception as error:
            # As with image files: whatever the decoder says, the row is what matters.
            raise QuiverError(
                f"{where}, column {column!r}, row {number}: not a readable image ({error})."
            ) from error
        if images[-1].shape != images[0].shape:
            raise QuiverError(
                f"{where}, column {column!r}, row {number}: an image of {images[-1].shape[:2]}, "
                f"the first is {images[0].shape[:2]}; they must have the same size."
            )
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))


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
    wanted = _list_columns(label)
    for column in (*wanted, owner, split):
        if column is not None:
            _check_column(where, table, column)
    x, lists = _choose_inputs(where, table, options, {*wanted, owner, split})
    y = _read_target(where, table, label, options.padding)
    owners = None if owner is None else read_column(where, table, owner)
    if split is None:
        one = not isinstance(y, dict) and y.ndim == 1 and targets in (None, "labels")
        groups = y if one else np.zeros(len(table), np.int64)
        train, test = split_train_test(groups if owners is None else owners, options.test_share)
    else:
        train, test = _split_by_column(where, table, split)
    first, second = (
        tuple(tree_map(lambda leaf, r=rows: leaf[r], part) for part in (x, y))
        for rows in (train, test)
    )
    whose = None if owners is None else (owners[train], owners[test])

    def are_ids(path: str, leaf: AnyArray) -> bool:
        """Lists of whole numbers beside others, or padded, are ids: a mask is one of them."""
        whole = bool(np.issubdtype(leaf.dtype, np.integer)) and leaf.dtype != np.uint8
        return whole and path in lists and (bool(path) or lists_are_ids)

    kinds = options.inputs, targets
    said = _note_inputs(where, table, options, {*wanted, owner, split})
    return from_arrays(name, where, first, second, whose, options.classes, *kinds, are_ids, *said)


def _note_inputs(
    where: str, table: pd.DataFrame, options: Options, taken: set[str | None]
) -> tuple[list[str], list[str]]:
    """Notes on inputs that nobody named, and doubts about those that look like an index."""
    features = options.features
    if isinstance(features, Mapping) or options.inputs == "ids":
        return [], []
    columns = _feature_columns(where, table, features, options.exclude, taken)
    by_name = [] if features is None else _list_columns(features)
    notes = []
    if features is None:
        many = f"{len(columns):,} columns" if len(columns) > 1 else "one column"
        notes.append(
            f"{where}: the inputs are {many}, {format_names(columns)}; data.options.features or "
            "exclude choose others."
        )
    indices = [c for c in columns if c not in by_name and is_index(table, c)]
    if not indices:
        return notes, []
    which = f"column {indices[0]!r}" if len(indices) == 1 else f"columns {indices}"
    looks = "looks" if len(indices) == 1 else "look"
    return notes, [
        f"{where}: {which} {looks} like a number of the row or an id, from which a model learns "
        "rows by heart, and counts among the inputs: leave it out with data.options.exclude = "
        f"{json.dumps(indices, ensure_ascii=False)}, or name it in data.options.features."
    ]


def _list_columns(names: Names) -> list[str]:
    if isinstance(names, Mapping):
        return [column for inner in names.values() for column in _list_columns(inner)]
    return [names] if isinstance(names, str) else list(names)


def _choose_inputs(
    where: str, table: pd.DataFrame, options: Options, taken: set[str | None]
) -> tuple[Any, set[str]]:
    """The inputs, and which of them were lists."""
    features, padding = options.features, options.padding
    named = features if isinstance(features, Mapping) else {"": features}
    inputs: dict[str, Any] = {}
    lists: set[str] = set()
    for name, own in named.items():
        columns = _feature_columns(where, table, own, options.exclude, taken)
        said = options.inputs.get(name) if isinstance(options.inputs, Mapping) else options.inputs
        part = read_inputs(where, table, columns, said == "ids", padding)
        if not isinstance(part, dict):
            part = {name: part}
        elif name and len(columns) == 1:  # padded, with its mask
            part = {name if key == columns[0] else key: part[key] for key in part}
        inputs |= part
        lists |= set(part) if holds_lists(table, columns[0]) else set()
    return inputs[""] if list(inputs) == [""] else inputs, lists


def _read_target(where: str, table: pd.DataFrame, label: Names, padding: Padding | None) -> Any:
    """One column's values or lists [n, …], or several columns' values [n, columns]."""
    if isinstance(label, Mapping):
        return {name: _read_target(where, table, own, padding) for name, own in label.items()}
    if not isinstance(label, str):
        return np.stack([read_column(where, table, column) for column in label], axis=1)
    if holds_lists(table, label):
        if padding is not None:
            return pad_column(where, table, label, NO_TOKEN, padding.length)
        return read_lists(where, table, label)
    return read_column(where, table, label)


def _load(path: Path) -> pd.DataFrame:
    # Here because it takes a while to import and only tables need it.
    import pandas as pd

    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
        elif path.suffix == ".csv":
            _check_separator(path)
            table = pd.read_csv(path)
        else:
            raise QuiverError(f"{path}: tables are .parquet or .csv files.")
    except QuiverError:
        raise
    except UnicodeDecodeError as error:
        raise _encoding_error(path) from error
    except Exception as error:
        # pandas and pyarrow each raise kinds of their own for damaged files.
        raise QuiverError(f"{path} is not a readable table ({error}).") from error
    if table.empty:
        raise QuiverError(f"{path} has no rows.")
    table.columns = table.columns.map(str)
    return table


SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}


def _check_separator(path: Path) -> None:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = next((line for line in file if line.strip()), "")
    for separator, name in SEPARATORS.items():
        if separator in header and "," not in header:
            raise QuiverError(
                f"{path}: its columns are separated by {name}, not by commas: save it with commas,"
                f" such as pandas.read_csv({path.name!r}, sep={separator!r})"
                ".to_csv('commas.csv', index=False)."
            )


def _encoding_error(path: Path) -> QuiverError:
    content = path.read_bytes()
    again = f"pandas.read_csv({path.name!r}, encoding={{}}).to_csv('utf8.csv', index=False)"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return QuiverError(
            f"{path} is UTF-16: save it as UTF-8, such as {again.format(repr('utf-16'))}."
        )
    place = ""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = f", line {line}: byte 0x{content[error.start]:02x}"
    return QuiverError(
        f"{path}{place} is not UTF-8: save the file as UTF-8, such as "
        f"{again.format(repr('latin-1'))} if it is Latin-1."
    )


def _check_column(where: str, table: pd.DataFrame, column: str) -> None:
    if column not in table.columns:
        raise QuiverError(f"{where} has no column {column!r}; {suggest(column, table.columns)}")


def _feature_columns(
    where: str,
    table: pd.DataFrame,
    features: str | Sequence[str] | None,
    exclude: str | Sequence[str],
    taken: set[str | None],
) -> list[str]:
    free = [column for column in table.columns if column not in taken]
    chosen = free if features is None else _check_names(where, table, features, free, "features")
    left_out = _check_names(where, table, exclude, free, "exclude")
    columns = [column for column in chosen if column not in left_out]
    if not columns:
        raise QuiverError(f"{where} has no column left for the inputs: set data.options.features.")
    return columns


def _check_names(
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


def _split_by_column(where: str, table: pd.DataFrame, split: str) -> tuple[AnyArray, AnyArray]:
    values = read_column(where, table, split)
    for row in np.flatnonzero(~np.isin(values, ["train", "test"])):
        cell = str(values[row])
        raise QuiverError(
            f"{where}, column {split!r}, {format_row(where, int(row))}: {cell!r} is neither "
            "'train' nor 'test'."
        )
    return np.flatnonzero(values == "train"), np.flatnonzero(values == "test")
