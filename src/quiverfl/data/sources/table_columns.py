"""The columns of a table as arrays: numbers, categories, lists, images; missing cells; padding."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from quiverfl.data.sources.arrays import format_names
from quiverfl.data.sources.images import convert_mode
from quiverfl.data.sources.table_files import Origin, has_decimal_commas, holds_text
from quiverfl.errors import QuiverError, suggest
from quiverfl.types import AnyArray, Integers

if TYPE_CHECKING:
    import pandas as pd


MOST_CATEGORIES = 1000
"""With more, a column is an id or free text, and a column for each value is a mistake."""
MISSING_CATEGORY = "(missing)"


# Missing cells.

MISSING_WORDS = ("refuse", "drop", "mean")


def check_missing(missing: Any) -> None:
    if isinstance(missing, str):
        if missing not in MISSING_WORDS:
            raise QuiverError(
                f"data.options.missing = {missing!r}: {suggest(missing, MISSING_WORDS)} A number "
                "is put into every missing cell."
            )
    elif isinstance(missing, bool) or not isinstance(missing, int | float):
        raise QuiverError(
            f"data.options.missing = {missing!r}: write 'refuse', 'drop', 'mean' or a number."
        )
    elif not np.isfinite(missing):
        raise QuiverError(f"data.options.missing = {missing}: it must be finite.")


def drop_incomplete(
    origin: Origin, table: pd.DataFrame, columns: Sequence[str]
) -> tuple[pd.DataFrame, list[str]]:
    """The rows that have a value in every column, and a note on the rows left out.

    Integer columns become integers again: with missing cells they are read as floats.
    """
    missing = table[list(columns)].isna()
    incomplete = missing.any(axis=1)
    if not incomplete.any():
        return table, []
    rest = table[~incomplete].copy()
    if rest.empty:
        raise QuiverError(
            f"{origin}: every row lacks a value, so data.options.missing = 'drop' leaves none: "
            "leave columns out with data.options.exclude, or fill them with 'mean'."
        )
    for column in missing.columns[missing.any()]:
        rest[column] = _whole_again(rest[column].infer_objects())
    count = int(incomplete.sum())
    return rest, [
        f"{origin}: {count:,} of {len(table):,} rows lack a value ({_count_cells(missing)}) and "
        "were left out, as data.options.missing says."
    ]


def _whole_again(values: pd.Series[Any]) -> pd.Series[Any]:
    numbers = values.to_numpy()
    if numbers.dtype.kind == "f" and np.array_equal(numbers, np.rint(numbers)):
        return values.astype(np.int64)
    return values


def _count_cells(missing: pd.DataFrame) -> str:
    counts = missing.sum()
    return ", ".join(f"{column} {count:,}" for column, count in counts[counts > 0].items())


def read_column(origin: Origin, table: pd.DataFrame, column: str) -> AnyArray:
    values = table[column]
    if values.isna().any():
        row = origin.row(table, int(values.isna().to_numpy().argmax()))
        raise QuiverError(
            f"{origin}, column {column!r}, {row}: there is no value. Fill it in, leave the row "
            "out, or say what to do with data.options.missing: 'drop' leaves such rows out, "
            "'mean' or a number fills inputs."
        )
    array = values.to_numpy()
    return array.astype(np.str_) if array.dtype == object else array


# Categories.

Categories = str | Mapping[str, str] | None
CATEGORIES = ("one-hot", "numbers")


def choose_categories(
    origin: Origin, table: pd.DataFrame, columns: Sequence[str], categories: Categories
) -> dict[str, str]:
    """Choose the input columns that are categories, and the coding of each.

    One word is for every column of text; a dictionary names columns, also of numbers.
    """
    if categories is None:
        return {}
    named = {"": categories} if isinstance(categories, str) else categories
    for name, kind in named.items():
        if kind not in CATEGORIES:
            key = f"categories.{name}" if name else "categories"
            raise QuiverError(f"data.options.{key} = {kind!r}: {suggest(str(kind), CATEGORIES)}")
    if isinstance(categories, str):
        return {column: categories for column in columns if holds_text(table, column)}
    chosen: dict[str, str] = {}
    for pattern, kind in categories.items():
        matching = [column for column in columns if fnmatchcase(column, pattern)]
        if not matching:
            raise QuiverError(
                f"{origin}: data.options.categories names {pattern!r}, which is no input; "
                f"{suggest(pattern, columns)}"
            )
        chosen |= dict.fromkeys(matching, kind)
    return chosen


# Inputs.


@dataclass(frozen=True)
class Padding:
    """Pads lists of unequal lengths to one length: that of the longest unless given."""

    value: float
    length: int | None = None
    mask: str = "attention_mask"


class InputReader:
    """Reads the columns of inputs of one table, and collects what there is to say about them."""

    def __init__(
        self,
        origin: Origin,
        table: pd.DataFrame,
        train: Integers,
        missing: str | float,
        padding: Padding | None,
    ) -> None:
        self._origin, self._table, self._train = origin, table, train
        self._missing, self._padding = missing, padding
        self._filled: list[str] = []
        self._coded: dict[str, list[str]] = {}
        self.values: dict[str, list[str]] = {}
        """Values of the columns that are numbered, in the order of their numbers."""

    def notes(self) -> list[str]:
        notes = []
        if self._filled:
            notes.append(f"{self._origin}: missing cells were filled: {', '.join(self._filled)}.")
        for column, values in self._coded.items():
            how = "numbered 0, 1, … in this order" if column in self.values else "a column each"
            notes.append(
                f"{self._origin}: column {column!r} holds {len(values)} categories, {how}: "
                f"{format_names(values)}."
            )
        return notes

    def read(
        self, columns: list[str], ids: bool, categories: Mapping[str, str]
    ) -> tuple[Any, list[str]]:
        """The inputs, and what their columns are called.

        Several columns of numbers are one array, several columns of lists a dictionary of them.
        Padded lists come with a mask that says which places are not padding.
        """
        origin, table = self._origin, self._table
        listed = [column for column in columns if holds_lists(table, column)]
        if listed and len(listed) == len(columns):
            if len(columns) > 1 or self._padding is not None:
                return _read_several(origin, table, columns, self._padding), []
            return read_lists(origin, table, columns[0]), []
        if listed:
            other = next(column for column in columns if column not in listed)
            raise QuiverError(
                f"{origin}: column {listed[0]!r} holds lists and column {other!r} does not: name "
                "the columns of the inputs with data.options.features, those of different kinds "
                "as a dictionary, or leave some out with data.options.exclude."
            )
        if len(columns) == 1 and isinstance(table[columns[0]].iloc[0], dict | bytes):
            return _read_images(origin, table, columns[0]), []
        parts, names = [], []
        for column in columns:
            if column in categories:
                part, called = self._read_categories(column, categories[column])
            else:
                part, called = self._read_numbers(column, ids)[:, None], [column]
            parts.append(part)
            names += called
        return np.concatenate(parts, axis=1), names

    def _read_categories(self, column: str, kind: str) -> tuple[AnyArray, list[str]]:
        values = self._table[column]
        absent = values.isna().to_numpy()
        if absent.any() and self._missing == "refuse":
            read_column(self._origin, self._table, column)
        known = np.unique(read_column(self._origin, self._table[~absent], column))
        if kind == "one-hot" and len(known) > MOST_CATEGORIES:
            raise QuiverError(
                f"{self._origin}: column {column!r} has {len(known):,} different values, too many "
                "for a column each: leave it out with data.options.exclude, or set "
                f"data.options.categories = {{{column!r} = 'numbers'}}."
            )
        numbers = np.full(len(values), len(known), dtype=np.int64)
        numbers[~absent] = np.searchsorted(known, values[~absent].to_numpy().astype(known.dtype))
        words = [str(value) for value in known] + [MISSING_CATEGORY] * bool(absent.any())
        self._coded[column] = words
        if kind == "numbers":
            self.values[column] = words
            return numbers[:, None], [column]
        coded = np.eye(len(words), dtype=np.float32)[numbers]
        return coded, [f"{column}={word}" for word in words]

    def _read_numbers(self, column: str, ids: bool) -> AnyArray:
        values = self._fill(column)
        if not (np.issubdtype(values.dtype, np.number) or values.dtype == np.bool_):
            raise QuiverError(self._describe_others(column, values))
        _check_finite(self._origin, self._table, column, values)
        if ids and not np.issubdtype(values.dtype, np.integer):
            raise QuiverError(
                f"{self._origin}, column {column!r} holds {values.dtype}, not whole numbers: name "
                "the columns of the ids with data.options.features, or leave out "
                "data.options.inputs = 'ids'."
            )
        return values

    def _describe_others(self, column: str, values: AnyArray) -> str:
        import pandas as pd

        kind = "text" if values.dtype.kind in "USO" else str(values.dtype)
        cells = [str(value) for value in values[:100]]
        if kind == "text" and has_decimal_commas(cells):
            return (
                f"{self._origin}, column {column!r} holds numbers with decimal commas, such as "
                f"{cells[0]}: set data.options.decimal = ','."
            )
        if kind == "text":
            numbers = pd.to_numeric(pd.Series(values), errors="coerce").notna().to_numpy()
            if numbers.mean() > 0.5:
                row = int((~numbers).argmax())
                return (
                    f"{self._origin}, column {column!r}, {self._origin.row(self._table, row)}: "
                    f"{str(values[row])!r} is no number, and most of the column is. Correct it; a "
                    "missing value is an empty cell (data.options.missing); or leave the column "
                    "out with data.options.exclude."
                )
        coded = (
            " make categories of its values with data.options.categories = 'one-hot' or 'numbers';"
            if kind == "text"
            else ""
        )
        return (
            f"{self._origin}, column {column!r} holds {kind}, not numbers: name the columns of "
            "the inputs with data.options.features, or leave this one out with "
            f"data.options.exclude;{coded} if it says whose row it is, set data.options.owner = "
            f"{column!r}."
        )

    def _fill(self, column: str) -> AnyArray:
        """The column, missing cells of numbers filled as `missing` says."""
        values = self._table[column]
        absent = values.isna().to_numpy()
        if not absent.any() or self._missing in ("refuse", "drop"):
            return read_column(self._origin, self._table, column)
        numbers = values.dropna().infer_objects()
        if numbers.dtype.kind not in "iufb":
            return read_column(self._origin, self._table[~absent], column)  # refused by its kind
        filled = np.full(len(values), np.nan)
        filled[~absent] = numbers.to_numpy(dtype=np.float64)
        value = self._missing
        if value == "mean":
            present = filled[self._train][~absent[self._train]]
            if not len(present):
                raise QuiverError(
                    f"{self._origin}, column {column!r} has no value in any training row, so "
                    "there is no mean: leave it out with data.options.exclude."
                )
            value = float(present.mean())
        filled[absent] = value
        self._filled.append(f"{column} {int(absent.sum()):,} × {value:.6g}")
        return filled


def holds_lists(table: pd.DataFrame, column: str) -> bool:
    return isinstance(table[column].iloc[0], list | np.ndarray)


def _read_several(
    origin: Origin, table: pd.DataFrame, columns: list[str], padding: Padding | None
) -> dict[str, AnyArray]:
    if padding is None:
        return {column: read_lists(origin, table, column) for column in columns}
    sizes = {column: [len(row) for row in table[column]] for column in columns}
    first = sizes[columns[0]]
    for column, own in sizes.items():
        for row in np.flatnonzero(np.array(own) != first).tolist():
            raise QuiverError(
                f"{origin}, {origin.row(table, row)}: {own[row]} values in column {column!r} and "
                f"{first[row]} in {columns[0]!r}; sequences that are padded together must be of "
                "one length."
            )
    length = padding.length or max(first)
    inputs = {
        column: pad_column(
            origin, table, column, 0 if column == padding.mask else padding.value, length
        )
        for column in columns
    }
    if padding.mask not in inputs:
        places = np.arange(length) < np.array(first)[:, None]
        inputs[padding.mask] = places.astype(np.int64)
    return inputs


def pad_column(
    origin: Origin, table: pd.DataFrame, column: str, value: float, length: int | None
) -> AnyArray:
    """Lists of numbers, each as long as the longest or cut to `length`; [n, length]."""
    rows = [np.asarray(row) for row in table[column]]
    for number, row in enumerate(rows):
        if row.ndim != 1 or not (row.size == 0 or np.issubdtype(row.dtype, np.number)):
            raise QuiverError(
                f"{origin}, column {column!r}, {origin.row(table, number)}: only plain lists "
                "of numbers can be padded."
            )
    kind = np.result_type(*(row.dtype for row in rows if row.size))
    longest = length or max(len(row) for row in rows)
    padded = np.full((len(rows), longest), value, dtype=kind)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row[:longest]
    return padded


def _check_finite(origin: Origin, table: pd.DataFrame, column: str, values: AnyArray) -> None:
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    for row in np.flatnonzero(~np.isfinite(single)):
        limit = "" if np.isinf(values[row]) else ", and float32 ends at 3.4e38"
        raise QuiverError(
            f"{origin}, column {column!r}, {origin.row(table, int(row))}: {values[row]} is too "
            f"large{limit}. Correct it, leave the row out, or the column with data.options.exclude."
        )


def read_lists(origin: Origin, table: pd.DataFrame, column: str) -> AnyArray:
    rows = [_is_nested(value) for value in table[column]]
    for number, row in enumerate(rows):
        if row is None or row.shape != (rows[0].shape if rows[0] is not None else None):
            raise QuiverError(
                f"{origin}, column {column!r}, {origin.row(table, number)}: its list does "
                "not have the shape of the first row's."
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


def _read_images(origin: Origin, table: pd.DataFrame, column: str) -> AnyArray:
    images: list[AnyArray] = []
    for number, value in enumerate(table[column]):
        content = value.get("bytes") if isinstance(value, dict) else value
        try:
            with Image.open(io.BytesIO(content or b"")) as opened:
                images.append(np.asarray(convert_mode(opened, "RGB")))
        except Exception as error:
            # As with image files: whatever the decoder says, the row is what matters.
            raise QuiverError(
                f"{origin}, column {column!r}, {origin.row(table, number)}: not a readable "
                f"image ({error})."
            ) from error
        if images[-1].shape != images[0].shape:
            raise QuiverError(
                f"{origin}, column {column!r}, {origin.row(table, number)}: an image of "
                f"{images[-1].shape[:2]}, the first is {images[0].shape[:2]}; they must have "
                "the same size."
            )
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))
