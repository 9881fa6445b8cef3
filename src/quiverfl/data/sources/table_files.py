"""Files of tables: Parquet, and text as it comes: separators, decimal commas, encodings, .gz.

What a text file's options do not say is read off the file, with a note on what was guessed.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import lzma
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from quiverfl.errors import QuiverError

if TYPE_CHECKING:
    import pandas as pd


OPENERS: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
"""Compressed text files, by the ending of their names."""
TEXT_FILES = {".csv": ",", ".tsv": "\t"}
"""Tables as text, and what separates their columns unless the first line says otherwise."""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
BYTE_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass(frozen=True)
class TextOptions:
    """The user's options for a text file; None is guessed."""

    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None


OF_FILES = tuple(TextOptions.__dataclass_fields__)


def open_bytes(path: Path) -> IO[bytes]:
    opened: IO[bytes] = OPENERS.get(path.suffix, open)(path, "rb")
    return opened


@dataclass(frozen=True)
class TextStyle:
    """Format of a text file: column separator, decimal mark, encoding."""

    separator: str
    decimal: str
    encoding: str


@dataclass(frozen=True)
class Origin:
    """Origin of a table, as messages name it."""

    name: str
    style: TextStyle | None = None
    """For a text file: its rows are named by their lines."""
    parts: tuple[tuple[int, Origin], ...] = ()
    """For a folder: its files, and the row of the whole table with which each begins."""

    def __str__(self) -> str:
        return self.name

    def row(self, table: pd.DataFrame, position: int) -> str:
        """A row as a person finds it: the line of a text file, counted from 1; else its number."""
        return self._find_row(int(table.index[position]))

    def _find_row(self, wanted: int) -> str:
        if self.parts:
            begin, part = [part for part in self.parts if part[0] <= wanted][-1]
            return f"{Path(part.name).name}, {part._find_row(wanted - begin)}"
        if self.style is None:
            return f"row {wanted}"
        number, line = -1, 1  # the names of the columns come before row 0
        with open_bytes(Path(self.name)) as content:
            file = io.TextIOWrapper(content, encoding=self.style.encoding, newline="")
            reader = csv.reader(file, delimiter=self.style.separator)
            for record in reader:
                if number == wanted and not _is_blank(record):
                    return f"line {line}"
                number += not _is_blank(record)
                line = reader.line_num + 1
        return f"row {wanted}"


def _is_blank(record: list[str]) -> bool:
    """Whether pandas leaves the line out."""
    return not record or (len(record) == 1 and not record[0].strip())


DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+(,\d+)?([eE][+-]?\d+)?\s*")


def has_decimal_commas(cells: Sequence[str]) -> bool:
    """Whether all cells are numbers if a comma marks their decimals, and one has a comma."""
    return any("," in cell for cell in cells) and all(map(DECIMAL_COMMA.fullmatch, cells))


def table_name(path: Path) -> str:
    """The file's name without its endings."""
    return path.with_suffix("").stem if path.suffix in OPENERS else path.stem


def load_table(path: Path, options: TextOptions) -> tuple[Origin, pd.DataFrame, list[str]]:
    """The table, what messages call it, and notes on how it was read."""
    # Here because it takes a while to import and only tables need it.
    import pandas as pd

    kind = path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix
    if path.suffix != ".parquet" and kind not in TEXT_FILES:
        raise QuiverError(
            f"{path}: tables are .parquet, .csv or .tsv files; the last two also compressed: "
            f"{', '.join(f'.csv{ending}' for ending in OPENERS)}."
        )
    given = [key for key in OF_FILES if getattr(options, key) is not None]
    if path.suffix == ".parquet" and given:
        raise QuiverError(
            f"data.options.{given[0]}: {path} is a Parquet file, and only text files have one: "
            "leave it out."
        )
    style: TextStyle | None = None
    notes: list[str] = []
    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
        else:
            table, style, notes = _read_text(path, TEXT_FILES[kind], options)
    except QuiverError:
        raise
    except UnicodeError as error:
        raise QuiverError(
            f"{path} is not {options.encoding}: give another data.options.encoding, or leave it "
            "out to have it guessed."
        ) from error
    except Exception as error:
        # pandas and pyarrow each raise kinds of their own for damaged files.
        raise QuiverError(
            f"{path} is not a readable table ({' '.join(str(error).split())})."
        ) from error
    if table.empty:
        raise QuiverError(f"{path} has no rows.")
    table.columns = table.columns.map(str)
    return Origin(str(path), style), table.reset_index(drop=True), notes


OWNER, PART = "file of the folder", "part of the folder"
"""Columns of a folder's table that say which file and which part a row is of."""


def load_client_files(folder: Path, options: TextOptions) -> tuple[Origin, pd.DataFrame, list[str]]:
    """All tables of a folder as one: a file for each client, perhaps in train and test.

    It has the columns OWNER and, where there are parts, PART.
    """
    import pandas as pd

    parts = ("train", "test") if (folder / "train").is_dir() else ("",)
    frames: list[pd.DataFrame] = []
    origins: list[tuple[int, Origin]] = []
    notes: list[str] = []
    begin = 0
    for part in parts:
        for file in _list_tables(folder / part):
            origin, table, said = load_table(file, options)
            if frames:
                _check_alike(origin, table, origins[0][1], frames[0])
            more = {OWNER: table_name(file), **({PART: part} if part else {})}
            frames.append(table.assign(**more))
            origins.append((begin, origin))
            begin, notes = begin + len(table), notes + said
    table = pd.concat(frames, ignore_index=True)
    if len(notes) > 1:
        notes = [notes[0], f"{folder}: {len(notes) - 1} more of its files were read so."]
    return Origin(str(folder), parts=tuple(origins)), table, notes


def _list_tables(folder: Path) -> list[Path]:
    """The tables in a folder by name; two of one client are refused, as is another file."""
    if not folder.is_dir():
        raise QuiverError(f"{folder} is missing: beside train there must be a folder test.")
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
    for file in files:
        kind = file.with_suffix("").suffix if file.suffix in OPENERS else file.suffix
        if not file.is_file() or kind not in (*TEXT_FILES, ".parquet"):
            raise QuiverError(
                f"{file} is no table: a folder of data.options.path holds one .csv, .tsv or "
                ".parquet file per client, perhaps in folders train and test, and nothing else."
            )
    names = [table_name(file) for file in files]
    for name, file in zip(names, files, strict=True):
        if names.count(name) > 1:
            raise QuiverError(f"{file}: there are two files of the client {name!r}; leave one.")
    if not files:
        raise QuiverError(f"{folder} holds no tables: it should hold one file per client.")
    return files


def _check_alike(origin: Origin, table: pd.DataFrame, first: Origin, other: pd.DataFrame) -> None:
    """Refuse a file with other columns than the first one, or text where that has numbers."""
    columns = [column for column in other.columns if column not in (OWNER, PART)]
    if list(table.columns) != columns:
        apart = sorted(set(table.columns) ^ set(columns)) or ["their order"]
        raise QuiverError(
            f"{origin} has other columns than {first} ({', '.join(apart[:5])}): files of clients "
            "must have the same columns in the same order."
        )
    for column in columns:
        if table[column].isna().all() or other[column].isna().all():
            continue
        if holds_text(table, column) != holds_text(other, column):
            raise QuiverError(
                f"{origin}: column {column!r} holds "
                f"{'text' if holds_text(table, column) else 'numbers'}, and in {first} it does not."
            )


def _read_text(
    path: Path, usual: str, options: TextOptions
) -> tuple[pd.DataFrame, TextStyle, list[str]]:
    """A text file as its options say, and where they are silent, as it looks."""
    import pandas as pd

    encoding = _check_encoding(options.encoding) or _find_encoding(path)
    separator = _check_separator(options.separator) or _find_separator(path, encoding, usual)
    decimal = _check_decimal(options.decimal, separator)

    def read(decimal: str) -> pd.DataFrame:
        return pd.read_csv(path, sep=separator, decimal=decimal, encoding=encoding)

    table = read(decimal or ".")
    if decimal is None and separator != "," and _looks_decimal(table):
        decimal = ","
        table = read(decimal)
    style = TextStyle(separator, decimal or ".", encoding)
    repeated = _find_repeated_names(path, style)
    guesses = {
        f"columns separated by {SEPARATORS.get(separator, separator)}": options.separator is None
        and separator != usual,
        "decimal commas": options.decimal is None and style.decimal == ",",
        f"encoding {encoding}": options.encoding is None and encoding != "utf-8",
    }
    guessed = ", ".join(words for words, was in guesses.items() if was)
    note = (
        f"{path}: it was read as it looks: {guessed}; data.options.separator, decimal and encoding "
        "say otherwise."
    )
    twice = (
        f"{path}: the header has {', '.join(map(repr, repeated))} more than once; later ones are "
        f"called {repeated[0]}.1 and so on."
        if repeated
        else ""
    )
    return table, style, [*filter(None, [note if guessed else "", twice])]


def _find_repeated_names(path: Path, style: TextStyle) -> list[str]:
    with open_bytes(path) as content:
        file = io.TextIOWrapper(content, encoding=style.encoding, newline="")
        names = next(csv.reader(file, delimiter=style.separator), [])
    return [name for name in dict.fromkeys(names) if name and names.count(name) > 1]


def _check_encoding(encoding: str | None) -> str | None:
    if encoding is None:
        return None
    try:
        return codecs.lookup(encoding).name
    except LookupError as error:
        raise QuiverError(
            f"data.options.encoding = {encoding!r}: unknown; usual ones are 'utf-8', 'cp1252' "
            "(Windows), 'latin-1' and 'utf-16'."
        ) from error


def _find_encoding(path: Path) -> str:
    """UTF-8, or what the file's first bytes say; else Windows-1252, which nearly all others are."""
    with open_bytes(path) as file:
        start = file.read(4)
        for mark, encoding in BYTE_MARKS.items():
            if start.startswith(mark):
                return encoding
        file.seek(0)
        for encoding in ("utf-8", "cp1252"):
            if _decodes(file, encoding):
                return encoding
            file.seek(0)
    return "latin-1"


def _decodes(file: Any, encoding: str) -> bool:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while piece := file.read(1 << 20):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _check_separator(separator: str | None) -> str | None:
    if separator == "tab":
        return "\t"
    if separator is not None and len(separator) != 1:
        raise QuiverError(f"data.options.separator = {separator!r}: write one character, or 'tab'.")
    return separator


def _find_separator(path: Path, encoding: str, usual: str) -> str:
    """The usual one, unless the first line has only others."""
    with open_bytes(path) as content:
        file = io.TextIOWrapper(content, encoding=encoding)
        header = next((line for line in file if line.strip()), "").rstrip("\r\n")
    if usual in header:
        return usual
    return next((separator for separator in SEPARATORS if separator in header), usual)


def _check_decimal(decimal: str | None, separator: str) -> str | None:
    if decimal not in (None, ".", ","):
        raise QuiverError(f"data.options.decimal = {decimal!r}: write '.' or ','.")
    if decimal == separator:
        raise QuiverError(
            f"data.options.decimal = {decimal!r} also separates the columns: set "
            "data.options.separator."
        )
    return decimal


def holds_text(table: pd.DataFrame, column: str) -> bool:
    values = table[column].dropna()
    return len(values) > 0 and isinstance(values.iloc[0], str)


def _looks_decimal(table: pd.DataFrame) -> bool:
    """Whether a column of text holds decimal commas, and no column has a decimal point."""
    texts = [column for column in table.columns if holds_text(table, column)]
    commas = any(has_decimal_commas(list(map(str, table[c].dropna()))) for c in texts)
    floats = (table[c].dropna().to_numpy() for c in table.columns if table[c].dtype.kind == "f")
    return commas and all(np.array_equal(values, np.rint(values)) for values in floats)
