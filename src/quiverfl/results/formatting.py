"""Formats of numbers and tables, the same wherever results are shown."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from quiverfl.errors import CannotWrite, QuiverError
from quiverfl.support import durable

DASH = "–"
MINUS = "−"


PERCENTAGES = ("accuracy", "f1", "auroc")


def is_percentage(metric: str) -> bool:
    """Accuracies and their kin are shown in percent, losses and other metrics as they are."""
    return metric in PERCENTAGES


def metric_unit(metric: str) -> str:
    return f"{metric} in %" if is_percentage(metric) else metric


def format_score(value: float, metric: str) -> str:
    if not math.isfinite(value):
        return DASH if math.isnan(value) else str(value).replace("inf", "∞")
    return f"{100 * value:.2f}" if is_percentage(metric) else f"{value:.4f}"


def format_with_spread(value: float, spread: float, metric: str) -> str:
    """`87.31 ± 0.42`, or the value alone where there is no spread."""
    if math.isnan(spread):
        return format_score(value, metric)
    return f"{format_score(value, metric)} ± {format_score(spread, metric)}"


def format_signed(value: float, metric: str) -> str:
    if math.isnan(value):
        return DASH
    text = format_score(abs(value), metric)
    if not text.strip("0."):
        return text
    return f"{'+' if value > 0 else MINUS}{text}"


def format_bytes(count: float) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    if math.isnan(count):
        return DASH
    for name in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or name == "TB":
            break
        count /= 1000
    return f"{count:.0f} {name}" if name == "B" or count >= 99.95 else f"{count:.1f} {name}"


def format_count(count: float) -> str:
    return DASH if math.isnan(count) else f"{count:,.0f}"


def format_duration(seconds: float) -> str:
    if math.isnan(seconds):
        return DASH
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 99.95 else f"{hours:.1f} h"


def format_energy(joules: float) -> str:
    if math.isnan(joules):
        return DASH
    unit = 0 if joules < 999.5 else 1 if joules < 999_500 else 2
    return f"{joules / 1000**unit:.3g} {('J', 'kJ', 'MJ')[unit]}"


# Files of results: written as a whole, with one sentence when that cannot be done.


def write_result_file(path: Path, content: bytes) -> None:
    """Replace a file whole or not at all. Folders are made as needed."""
    durable.check_writable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace_file(path, content)
    except OSError as problem:
        raise CannotWrite(f"{path} cannot be written: {problem.strerror}.") from problem


def make_file_name(text: str) -> str:
    """A text as part of a file's name: letters, digits, dots and dashes."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)


# A table, and its formats: for the terminal, Markdown, LaTeX and CSV.


WIDEST_NAME = 34
"""Width at which a terminal wraps the name of an experiment, in letters."""
NARROWEST = 11
"""A heading over several columns is not broken into narrower lines than this."""


@dataclass(frozen=True)
class Column:
    title: str
    above: str = ""
    """A heading over this and its neighbours, such as the stage."""
    number: bool = True


@dataclass(frozen=True)
class TableCell:
    text: str
    best: bool = False
    value: float | None = None
    """The number behind the text, which a file of numbers has instead."""
    spread: float = math.nan
    """Its standard deviation over seeds."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    caption: str

    def __str__(self) -> str:
        return format_markdown(self)

    def _repr_markdown_(self) -> str:
        return format_markdown(self)

    def spans(self) -> list[tuple[str, int]]:
        """The upper headings and how many columns each spans."""
        return [(k, len(list(v))) for k, v in groupby(column.above for column in self.columns)]

    def parts(self) -> list[Table]:
        """One table for each upper heading, the names again in each; itself where there is none.

        Columns behind a heading's, such as the number of seeds, stay with them.
        """
        parts, begin = list[range](), 1  # the names alone are no part
        for end in range(2, len(self.columns) + 1):
            above = self.columns[begin].above
            if end == len(self.columns) or self.columns[end].above not in (above, ""):
                parts.append(range(begin, end))
                begin = end
        return [self.take_columns(part) for part in parts] or [self]

    def take_columns(self, indices: Iterable[int]) -> Table:
        """The names, and some of the columns behind them."""
        chosen = [0, *indices]
        columns = tuple(self.columns[index] for index in chosen)
        rows = tuple(tuple(row[index] for index in chosen) for row in self.rows)
        return replace(self, columns=columns, rows=rows)


FilledColumn: TypeAlias = tuple[Column, Mapping[str, TableCell]]
"""A column with its cells, by the key of their row."""


def make_table(
    title: str,
    rows: Mapping[str, str],
    columns: Sequence[FilledColumn],
    caption: str,
    head: str = "method",
) -> Table:
    """Make a table of rows × columns: a row for every key of `rows`, which has the row's name.

    A cell that a column does not have is a dash. `head` is the title of the names.
    """
    blank = TableCell(DASH)
    return Table(
        title,
        (Column(head, number=False), *(column for column, _ in columns)),
        tuple(
            (TableCell(name), *(cells.get(key, blank) for _, cells in columns))
            for key, name in rows.items()
        ),
        caption,
    )


def format_rich(table: Table, caption: bool = True) -> RichTable:
    """The table for a terminal."""
    below = Text(table.caption, style="dim") if caption else None
    rich_table = RichTable(
        title=Text(table.title, style="bold"),
        caption=below,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    above = [_wrap_heading(table, index) for index in range(len(table.columns))]
    height = max(len(lines) for lines in above)
    previous = ""
    for index, column in enumerate(table.columns):
        starts = column.above != previous
        lines = above[index] if starts else []
        lines = [*[""] * (height - len(lines)), *lines, column.title]
        title = Text("\n".join(lines), justify="right" if column.number else "left")
        rich_table.add_column(
            Padding(title, (0, 0, 0, 2)) if starts else title,
            justify="right" if column.number else "left",
            no_wrap=index > 0,  # a name may be broken, a number is never cut
            overflow="fold",
            max_width=WIDEST_NAME if index == 0 else None,
        )
        previous = column.above
    for row in table.rows:
        rich_table.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in row))
    return rich_table


def _wrap_heading(table: Table, index: int) -> list[str]:
    """Wrap a heading to the width of its column, so that names keep their room."""
    column = table.columns[index]
    texts = [column.title, *(row[index].text for row in table.rows)]
    return textwrap.wrap(column.above, max(NARROWEST, *map(len, texts)), break_long_words=False)


def format_csv(table: Table) -> str:
    """One line of titles, then the texts; means as numbers, and their deviations beside them."""
    columns: list[list[object]] = []
    for title, cells in zip(_full_titles(table), zip(*table.rows, strict=True), strict=True):
        numeric = any(cell.value is not None for cell in cells)
        columns.append([title, *(cell.value if numeric else cell.text for cell in cells)])
        if any(not math.isnan(cell.spread) for cell in cells):
            spreads = (None if math.isnan(cell.spread) else cell.spread for cell in cells)
            columns.append([f"{title}, std over seeds", *spreads])
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(zip(*columns, strict=True))
    return stream.getvalue()


def _full_titles(table: Table) -> list[str]:
    return [f"{c.above}: {c.title}" if c.above else c.title for c in table.columns]


def format_markdown(table: Table) -> str:
    lines = [
        f"**{_escape_markdown(table.title)}**",
        "",
        _markdown_row(_full_titles(table)),
        _markdown_row(["---:" if column.number else ":---" for column in table.columns], raw=True),
        *(
            _markdown_row([cell.text for cell in row], [cell.best for cell in row])
            for row in table.rows
        ),
        "",
        _escape_markdown(table.caption),
    ]
    return "\n".join(lines) + "\n"


def format_latex(table: Table) -> str:
    """A booktabs table; the column groups are spanned and ruled."""
    shape = "".join("r" if column.number else "l" for column in table.columns)
    lines = [
        r"\begin{table}  % \usepackage{booktabs}",
        r"\centering",
        rf"\caption{{{escape_latex(table.title)}. {escape_latex(table.caption)}}}",
        rf"\begin{{tabular}}{{{shape}}}",
        r"\toprule",
        *_latex_spans(table),
        _latex_row([escape_latex(column.title) for column in table.columns]),
        r"\midrule",
        *(_latex_row([_latex_cell(cell) for cell in row]) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(texts: list[str], bold: list[bool] | None = None, raw: bool = False) -> str:
    cells = texts if raw else [_escape_markdown(text) for text in texts]
    bold = bold or [False] * len(cells)
    marked = (f"**{text}**" if strong else text for text, strong in zip(cells, bold, strict=True))
    return f"| {' | '.join(marked)} |"


def _escape_markdown(text: str) -> str:
    for letter in ("\\", "|", "*", "_", "`", "<", "["):
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def _latex_spans(table: Table) -> list[str]:
    if not any(column.above for column in table.columns):
        return []
    cells, rules, start = [], [], 1
    for text, width in table.spans():
        cells.append(
            rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(text)}}}" if text else "&" * (width - 1)
        )
        if text:
            rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    return [_latex_row(cells), "".join(rules)]


def _latex_cell(cell: TableCell) -> str:
    text = escape_latex(cell.text)
    return rf"\textbf{{{text}}}" if cell.best else text


def _latex_row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


_LATEX_LETTERS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": r"$-$",
    "×": r"$\times$",
    "μ": r"$\mu$",
    "σ": r"$\sigma$",
    "∞": r"$\infty$",
    "ε": r"$\varepsilon$",
    "α": r"$\alpha$",
    "…": r"\dots{}",
    "✓": r"$\surd$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "“": "``",
    "”": "''",
    "–": "--",
}


def escape_latex(text: str) -> str:
    return "".join(_LATEX_LETTERS.get(letter, letter) for letter in text)


FORMATS: dict[str, Callable[[Table], str]] = {
    ".md": format_markdown,
    ".tex": format_latex,
    ".csv": format_csv,
}
"""Files of tables, by the ending of their names."""


def write_tables(tables: Sequence[Table], path: Path) -> None:
    """Write tables below each other, as Markdown, LaTeX or CSV by the ending of the name."""
    if path.suffix not in FORMATS:
        raise QuiverError(f"{path}: the name of a file of tables ends in {', '.join(FORMATS)}.")
    write_result_file(path, "\n".join(map(FORMATS[path.suffix], tables)).encode())
