"""The columns of a table as arrays: numbers, lists, images; lists of unequal lengths padded."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from quiverfl.data.sources.images import in_mode
from quiverfl.errors import QuiverError

if TYPE_CHECKING:
    import pandas as pd

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Padding:
    """How lists of unequal lengths become of one: the length of the longest unless given."""

    value: float
    length: int | None = None
    mask: str = "attention_mask"


def column_of(where: str, table: pd.DataFrame, column: str) -> Values:
    values = table[column]
    if values.isna().any():
        row = int(values.isna().to_numpy().argmax())
        raise QuiverError(f"{where}, column {column!r}, row {row}: there is no value.")
    array = values.to_numpy()
    return array.astype(np.str_) if array.dtype == object else array


def inputs_of(
    where: str, table: pd.DataFrame, columns: list[str], ids: bool, padding: Padding | None
) -> Any:
    """Several columns of numbers are one array, several columns of lists a dictionary of them.

    Padded lists come with a mask that says which places are not padding.
    """
    listed = [column for column in columns if is_listed(table, column)]
    if listed and len(listed) == len(columns) and (len(columns) > 1 or padding is not None):
        return _several(where, table, columns, padding)
    if listed and len(columns) > 1:
        other = next(column for column in columns if column not in listed)
        raise QuiverError(
            f"{where}: column {listed[0]!r} holds lists and column {other!r} does not: name the "
            "columns of the inputs with data.options.features, those of different kinds as a "
            "dictionary, or leave some out with data.options.exclude."
        )
    if len(columns) > 1:
        return np.stack([_numbers(where, table, column, ids) for column in columns], axis=1)
    if isinstance(table[columns[0]].iloc[0], dict | bytes):
        return _images(where, table, columns[0])
    if listed:
        return lists_of(where, table, columns[0])
    return _numbers(where, table, columns[0], ids)[:, None]


def is_listed(table: pd.DataFrame, column: str) -> bool:
    return isinstance(table[column].iloc[0], list | np.ndarray)


def _several(
    where: str, table: pd.DataFrame, columns: list[str], padding: Padding | None
) -> dict[str, Values]:
    if padding is None:
        return {column: lists_of(where, table, column) for column in columns}
    sizes = {column: [len(row) for row in table[column]] for column in columns}
    first = sizes[columns[0]]
    for column, own in sizes.items():
        for row in np.flatnonzero(np.array(own) != first):
            raise QuiverError(
                f"{where}, row {row}: {own[row]} values in column {column!r} and {first[row]} in "
                f"{columns[0]!r}; sequences that are padded together must be of one length."
            )
    length = padding.length or max(first)
    found = {
        column: padded(where, table, column, 0 if column == padding.mask else padding.value, length)
        for column in columns
    }
    if padding.mask not in found:
        places = np.arange(length) < np.array(first)[:, None]
        found[padding.mask] = places.astype(np.int64)
    return found


def padded(
    where: str, table: pd.DataFrame, column: str, value: float, length: int | None
) -> Values:
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
    found = np.full((len(rows), longest), value, dtype=kind)
    for number, row in enumerate(rows):
        found[number, : len(row)] = row[:longest]
    return found


def _numbers(where: str, table: pd.DataFrame, column: str, ids: bool) -> Values:
    values = column_of(where, table, column)
    if not (np.issubdtype(values.dtype, np.number) or values.dtype == np.bool_):
        found = "text" if values.dtype.kind in "USO" else str(values.dtype)
        raise QuiverError(
            f"{where}, column {column!r} holds {found}, not numbers: name the columns of "
            "the inputs with data.options.features, or leave this one out with "
            "data.options.exclude."
        )
    if ids and not np.issubdtype(values.dtype, np.integer):
        raise QuiverError(
            f"{where}, column {column!r} holds {values.dtype}, not whole numbers: name the columns "
            "of the ids with data.options.features, or leave out data.options.inputs = 'ids'."
        )
    return values


def lists_of(where: str, table: pd.DataFrame, column: str) -> Values:
    rows = [_nested(value) for value in table[column]]
    for number, row in enumerate(rows):
        if row is None or row.shape != (rows[0].shape if rows[0] is not None else None):
            raise QuiverError(
                f"{where}, column {column!r}, row {number}: its list does not have the shape of "
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


def _images(where: str, table: pd.DataFrame, column: str) -> Values:
    images: list[Values] = []
    for number, value in enumerate(table[column]):
        content = value.get("bytes") if isinstance(value, dict) else value
        try:
            with Image.open(io.BytesIO(content or b"")) as opened:
                images.append(np.asarray(in_mode(opened, "RGB")))
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
