"""Your own table: Parquet or CSV, one example per row, with a column that may say whose it is.

Inputs are numbers in columns, lists in one column, or images as the Hugging Face hub stores them
(a struct with the encoded `bytes`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quiverfl.data.dataset import Dataset, report_notes
from quiverfl.data.sources.arrays import Kinds, format_names, from_arrays, split_train_test
from quiverfl.data.sources.table_columns import (
    Categories,
    InputReader,
    Padding,
    check_missing,
    choose_categories,
    drop_incomplete,
    holds_lists,
    pad_column,
    read_column,
    read_lists,
)
from quiverfl.data.sources.table_files import (
    OF_FILES,
    OWNER,
    PART,
    Origin,
    TextOptions,
    load_client_files,
    load_table,
    table_name,
)
from quiverfl.errors import QuiverError, suggest
from quiverfl.objectives import NO_TOKEN
from quiverfl.trees import tree_map
from quiverfl.types import AnyArray

if TYPE_CHECKING:
    import pandas as pd


Columns = str | Sequence[str]
Names = Columns | Mapping[str, Columns]
"""Columns; or several inputs or targets by name, each of some columns."""


@dataclass(frozen=True)
class Options:
    """The roles of columns.

    `features`: the column or columns of the inputs (None: all that are left) but for `exclude`.
    In both, `px*` means all columns whose names begin with px. A dictionary of names and columns
    makes a dictionary of inputs; so do several columns of lists, by their own names. `label` may be
    a dictionary, too, of targets.

    Whole numbers are numbers like any others (ages, counts) unless `inputs` is "ids". `targets`
    says that the column or columns `label` hold "numbers" or "ids" to be learned, and not labels.

    `owner` names the column that says whose row it is. `split` names a column with `train` or
    `test` in every row; without it a fraction of every owner's rows (of every class's, where there
    are no owners) is taken for testing.

    `pad` is put behind lists that are shorter than the longest, or than `length`; `mask` is what
    the input is called that says where there is none.

    `missing` says what is done about rows with a missing cell: "refuse", "drop", or for inputs the
    "mean" of the training rows or a number. `categories` codes columns of text as "one-hot" or
    "numbers", all of them or by name. `separator`, `decimal` and `encoding` are those of a text
    file, and guessed unless given.
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
    missing: str | float = "refuse"
    categories: Categories = None
    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        for name in ("label", "features", "owner", "split", "exclude"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _name_columns(value, f"data.options.{name}"))

    @property
    def padding(self) -> Padding | None:
        if self.pad is None:
            if self.length is not None:
                raise QuiverError("data.options.length is the length after padding: set pad, too.")
            if self.mask != Options.mask:
                raise QuiverError("data.options.mask says where padding is: set pad, too.")
            return None
        if self.length is not None and self.length < 1:
            raise QuiverError(f"data.options.length = {self.length}: it must be at least 1.")
        return Padding(self.pad, self.length, self.mask)


def _name_columns(value: Any, where: str) -> Any:
    """Names of columns as text; a column of a spreadsheet may be called 2024."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _name_columns(own, where) for name, own in value.items()}
    if isinstance(value, Sequence):
        return [_name_columns(own, where) for own in value]
    raise QuiverError(f"{where} = {value!r}: name a column, or a list of them.")


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
    text = TextOptions(options.separator, options.decimal, options.encoding)
    if not path.is_dir():
        origin, table, notes = load_table(path, text)
        return from_frame(table_name(path), origin, table, options, notes=notes)
    origin, table, notes = load_client_files(path, text)
    split = PART if PART in table else None
    if split is not None and options.split is not None:
        raise QuiverError(
            f"data.options.split = {options.split!r}: {path} has folders train and test; leave "
            "split out."
        )
    if options.owner is not None:
        table = table.drop(columns=OWNER)
    options = replace(options, owner=options.owner or OWNER, split=options.split or split)
    return from_frame(path.name, origin, table, options, notes=notes)


def from_pandas(
    frame: pd.DataFrame,
    label: Names = "label",
    features: Names | None = None,
    owner: str | None = None,
    name: str = "frame",
    **options: Any,
) -> Dataset:
    """A pandas DataFrame; `label`, `features` and `owner` name its columns.

    `options` are those of a table: split, test_share, classes, inputs, exclude, targets, pad,
    length, mask, missing, categories.
    """
    chosen = choose_options("from_pandas", label, features, owner, options)
    if not (hasattr(frame, "columns") and hasattr(frame, "iloc")):
        raise QuiverError(f"from_pandas: give a pandas DataFrame, not a {type(frame).__name__}.")
    table = frame.reset_index(drop=True)
    table.columns = table.columns.map(str)
    if table.empty:
        raise QuiverError(f"{name} has no rows.")
    return report_notes(from_frame(name, Origin(name), table, chosen))


def choose_options(
    function: str, label: Names, features: Names | None, owner: str | None, options: dict[str, Any]
) -> Options:
    """The options of a table that is in memory; those of files are unknown there."""
    known = [key for key in Options.__dataclass_fields__ if key not in OF_FILES]
    for key in options:
        if key not in known:
            raise QuiverError(f"{function} has no option {key!r}; it has {', '.join(known)}.")
    return Options(label, features, owner, **options)


def from_frame(
    name: str,
    origin: Origin,
    table: pd.DataFrame,
    options: Options,
    lists_are_ids: bool = False,
    notes: Sequence[str] = (),
) -> Dataset:
    """A table in memory."""
    label, owner, split, targets = options.label, options.owner, options.split, options.targets
    check_missing(options.missing)
    wanted = [*_list_columns(label), *(c for c in (owner, split) if c is not None)]
    for column in wanted:
        if column == label == Options.label and column not in table.columns:
            raise QuiverError(
                f"{origin}: which column holds the labels? Name it with data.options.label; "
                f"{suggest(column, table.columns)}"
            )
        _check_column(origin, table, column)
    taken = set(wanted)
    _check_roles(origin, table, options)
    said = list(notes)
    inputs = _input_columns(origin, table, options, taken)
    if options.missing == "drop":
        used = dict.fromkeys([*wanted, *(c for columns in inputs.values() for c in columns)])
        table, dropped = drop_incomplete(origin, table, list(used))
        said += dropped
    y = _read_target(origin, table, label, options.padding)
    owners = None if owner is None else read_column(origin, table, owner)
    if split is None:
        one = not isinstance(y, dict) and y.ndim == 1 and targets in (None, "labels")
        groups = y if one else np.zeros(len(table), np.int64)
        train, test = split_train_test(groups if owners is None else owners, options.test_share)
    else:
        train, test = _split_by_column(origin, table, split)
    reader = InputReader(origin, table, train, options.missing, options.padding)
    x, lists, columns = _read_inputs(origin, table, inputs, options, reader)
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
    columns_used = [*_list_columns(label), *(c for columns in inputs.values() for c in columns)]
    if options.pad is not None and not any(holds_lists(table, column) for column in columns_used):
        raise QuiverError(f"data.options.pad: no column of {origin} holds lists; leave it out.")
    more, doubts = _note_inputs(origin, table, options, taken)
    if targets in (None, "labels") and isinstance(label, str):
        doubts += _doubt_labels(origin, table, label)
    said += [*more, *reader.notes()]
    dataset = from_arrays(
        name, str(origin), first, second, whose, options.classes, *kinds, are_ids, said, doubts
    )
    return replace(dataset, columns=columns, categories=reader.values)


def _check_roles(origin: Origin, table: pd.DataFrame, options: Options) -> None:
    """Refuse a label that is also an input or the owner: the answer would be given away."""
    if options.targets not in (None, "labels"):
        return
    labels = [c for c in _list_columns(options.label) if not holds_lists(table, c)]
    features = [] if options.features is None else _list_columns(options.features)
    for column in labels:
        if column in features:
            raise QuiverError(
                f"{origin}: column {column!r} is the label, and data.options.features makes it an "
                "input, too: leave it out there, or name another data.options.label."
            )
        if column == options.owner:
            raise QuiverError(
                f"{origin}: column {column!r} is the label and the owner, so that every client "
                "would have one class: name another data.options.label or data.options.owner."
            )


FEW_ROWS = 20
"""With fewer rows, nearly as many labels may be meant."""


def _doubt_labels(origin: Origin, table: pd.DataFrame, label: str) -> list[str]:
    """Doubts about labels that tell rows apart, and about text in a few rows among numbers."""
    values = table[label].astype(str)
    different, rows = values.nunique(), len(table)
    doubts = []
    if rows >= FEW_ROWS and different > rows / 2:
        doubts.append(
            f"{origin}: column {label!r} has {different:,} different labels in {rows:,} rows: if "
            "they are numbers to learn, set data.options.targets = 'numbers'; if they are ids, "
            "name another data.options.label."
        )
    odd = values[~values.str.fullmatch(NUMBER)]
    if 0 < len(odd) <= rows / 10:
        place = origin.row(table, int((values == odd.iloc[0]).argmax()))
        doubts.append(
            f"{origin}: column {label!r} holds numbers but for {len(odd):,} of {rows:,} rows, such "
            f"as {odd.iloc[0]!r} in {place}: these count as classes of their own. Correct them if "
            "they are slips."
        )
    return doubts


NUMBER = r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*"


def _note_inputs(
    origin: Origin, table: pd.DataFrame, options: Options, taken: set[str]
) -> tuple[list[str], list[str]]:
    """Notes on inputs that were not named, and warnings of inputs that look like an index."""
    features = options.features
    if isinstance(features, Mapping) or options.inputs == "ids":
        return [], []
    columns = _feature_columns(origin, table, features, options.exclude, taken)
    by_name = [] if features is None else _list_columns(features)
    notes = []
    if features is None:
        many = f"{len(columns):,} columns" if len(columns) > 1 else "one column"
        notes.append(
            f"{origin}: the inputs are {many}, {format_names(columns)}; data.options.features or "
            "exclude choose others."
        )
    indices = [c for c in columns if c not in by_name and is_index(table, c)]
    if not indices:
        return notes, []
    which = f"column {indices[0]!r}" if len(indices) == 1 else f"columns {indices}"
    verb = "looks" if len(indices) == 1 else "look"
    return notes, [
        f"{origin}: {which} {verb} like a number of the row or an id, from which a model learns "
        "rows by heart, and counts among the inputs: leave it out with data.options.exclude = "
        f"{json.dumps(indices, ensure_ascii=False)}, or name it in data.options.features."
    ]


NAMES_OF_INDICES = re.compile(
    r"unnamed: \d+|index|idx|id|row|row_?id|uu?id|.*[_ .-]id", re.IGNORECASE
)
CAMEL_ID = re.compile(r".*[a-z]I[dD]")
COUNTED_ROWS = 10
"""With fewer rows, whole numbers may count them by chance."""


def is_index(table: pd.DataFrame, column: str) -> bool:
    """Whether a column's name or values say that it only tells the rows apart."""
    if NAMES_OF_INDICES.fullmatch(column) or CAMEL_ID.fullmatch(column):
        return True
    values = table[column].to_numpy()
    if not np.issubdtype(values.dtype, np.integer) or len(values) < COUNTED_ROWS:
        return False
    first = int(values.min())
    return first in (0, 1) and np.array_equal(np.sort(values), np.arange(len(values)) + first)


def _list_columns(names: Names) -> list[str]:
    if isinstance(names, Mapping):
        return [column for inner in names.values() for column in _list_columns(inner)]
    return [names] if isinstance(names, str) else list(names)


def _input_columns(
    origin: Origin, table: pd.DataFrame, options: Options, taken: set[str]
) -> dict[str, list[str]]:
    """The columns of each input; the only one has no name."""
    features = options.features
    named = features if isinstance(features, Mapping) else {"": features}
    return {
        name: _feature_columns(origin, table, own, options.exclude, taken)
        for name, own in named.items()
    }


def _read_inputs(
    origin: Origin,
    table: pd.DataFrame,
    named: Mapping[str, list[str]],
    options: Options,
    reader: InputReader,
) -> tuple[Any, set[str], Any]:
    """The inputs, the ones among them that were lists, and the column names of the rest."""
    every = [column for columns in named.values() for column in columns]
    categories = choose_categories(origin, table, every, options.categories)
    inputs: dict[str, Any] = {}
    names: dict[str, tuple[str, ...]] = {}
    lists: set[str] = set()
    for name, columns in named.items():
        said = options.inputs.get(name) if isinstance(options.inputs, Mapping) else options.inputs
        part, called = reader.read(columns, said == "ids", categories)
        if called:
            names[name] = tuple(called)
        if not isinstance(part, dict):
            part = {name: part}
        elif name and len(columns) == 1:  # padded, with its mask
            part = {name if key == columns[0] else key: part[key] for key in part}
        inputs |= part
        lists |= set(part) if holds_lists(table, columns[0]) else set()
    if list(inputs) == [""]:
        return inputs[""], lists, names.get("", ())
    return inputs, lists, names


def _read_target(origin: Origin, table: pd.DataFrame, label: Names, padding: Padding | None) -> Any:
    """One column's values or lists [n, …], or several columns' values [n, columns]."""
    if isinstance(label, Mapping):
        return {name: _read_target(origin, table, own, padding) for name, own in label.items()}
    if not isinstance(label, str):
        return np.stack([read_column(origin, table, column) for column in label], axis=1)
    if holds_lists(table, label):
        if padding is not None:
            return pad_column(origin, table, label, NO_TOKEN, padding.length)
        return read_lists(origin, table, label)
    return read_column(origin, table, label)


def _check_column(origin: Origin, table: pd.DataFrame, column: str) -> None:
    if column not in table.columns:
        raise QuiverError(f"{origin} has no column {column!r}; {suggest(column, table.columns)}")


def _feature_columns(
    origin: Origin,
    table: pd.DataFrame,
    features: str | Sequence[str] | None,
    exclude: str | Sequence[str],
    taken: set[str],
) -> list[str]:
    free = [column for column in table.columns if column not in taken]
    chosen = free if features is None else _check_names(origin, table, features, free, "features")
    left_out = _check_names(origin, table, exclude, free, "exclude")
    columns = [column for column in chosen if column not in left_out]
    if not columns:
        raise QuiverError(f"{origin} has no column left for the inputs: set data.options.features.")
    return columns


def _check_names(
    origin: Origin, table: pd.DataFrame, names: str | Sequence[str], free: list[str], option: str
) -> list[str]:
    """The columns that names and patterns mean, each once; a pattern means free columns only."""
    chosen: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        if name in table.columns or not any(letter in name for letter in "*?["):
            _check_column(origin, table, name)
            chosen.append(name)
            continue
        matching = [column for column in free if fnmatchcase(column, name)]
        if not matching:
            raise QuiverError(
                f"{origin}: no column matches {name!r} of data.options.{option}; it has "
                f"{', '.join(table.columns)}."
            )
        chosen += matching
    return list(dict.fromkeys(chosen))


def _split_by_column(origin: Origin, table: pd.DataFrame, split: str) -> tuple[AnyArray, AnyArray]:
    values = read_column(origin, table, split)
    for row in np.flatnonzero(~np.isin(values, ["train", "test"])):
        cell = str(values[row])
        raise QuiverError(
            f"{origin}, column {split!r}, {origin.row(table, int(row))}: {cell!r} is neither "
            "'train' nor 'test'."
        )
    return np.flatnonzero(values == "train"), np.flatnonzero(values == "test")
