"""A table as people want it: in the terminal, in Markdown, in LaTeX. CSV comes from the frames."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

WIDEST_NAME = 34
"""Where a terminal breaks the name of an experiment, in letters."""
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


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    caption: str

    def spans(self) -> list[tuple[str, int]]:
        """The upper headings and how many columns each spans."""
        return [(k, len(list(v))) for k, v in groupby(column.above for column in self.columns)]

    def parts(self) -> list[Table]:
        """One table for each upper heading, the names again in each; itself where there is none."""
        found, begin = [], 0
        for above, width in self.spans():
            if above:
                chosen = [0, *range(begin, begin + width)]
                columns = tuple(self.columns[place] for place in chosen)
                rows = tuple(tuple(row[place] for place in chosen) for row in self.rows)
                found.append(replace(self, columns=columns, rows=rows))
            begin += width
        return found or [self]


def rich(table: Table, caption: bool = True) -> RichTable:
    below = Text(table.caption, style="dim") if caption else None
    drawn = RichTable(
        title=Text(table.title, style="bold"),
        caption=below,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    above = [_broken(table, place) for place in range(len(table.columns))]
    height = max(len(lines) for lines in above)
    previous = ""
    for place, column in enumerate(table.columns):
        starts = column.above != previous
        lines = above[place] if starts else []
        lines = [*[""] * (height - len(lines)), *lines, column.title]
        title = Text("\n".join(lines), justify="right" if column.number else "left")
        drawn.add_column(
            Padding(title, (0, 0, 0, 2)) if starts else title,
            justify="right" if column.number else "left",
            no_wrap=place > 0,  # a name may be broken, a number is never cut
            overflow="fold",
            max_width=WIDEST_NAME if place == 0 else None,
        )
        previous = column.above
    for row in table.rows:
        drawn.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in row))
    return drawn


def _broken(table: Table, place: int) -> list[str]:
    """A heading in lines no wider than its column: it would take the room of the names."""
    column = table.columns[place]
    texts = [column.title, *(row[place].text for row in table.rows)]
    return textwrap.wrap(column.above, max(NARROWEST, *map(len, texts)), break_long_words=False)


def markdown(table: Table) -> str:
    titles = [f"{c.above}: {c.title}" if c.above else c.title for c in table.columns]
    lines = [
        f"**{_markdown_text(table.title)}**",
        "",
        _markdown_row(titles),
        _markdown_row(["---:" if column.number else ":---" for column in table.columns], raw=True),
        *(
            _markdown_row([cell.text for cell in row], [cell.best for cell in row])
            for row in table.rows
        ),
        "",
        _markdown_text(table.caption),
    ]
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """A booktabs table; the column groups are spanned and ruled."""
    shape = "".join("r" if column.number else "l" for column in table.columns)
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{latex_text(table.title)}. {latex_text(table.caption)}}}",
        rf"\begin{{tabular}}{{{shape}}}",
        r"\toprule",
        *_latex_spans(table),
        _latex_row([latex_text(column.title) for column in table.columns]),
        r"\midrule",
        *(_latex_row([_latex_cell(cell) for cell in row]) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _markdown_row(texts: list[str], bold: list[bool] | None = None, raw: bool = False) -> str:
    cells = texts if raw else [_markdown_text(text) for text in texts]
    bold = bold or [False] * len(cells)
    marked = (f"**{text}**" if strong else text for text, strong in zip(cells, bold, strict=True))
    return f"| {' | '.join(marked)} |"


def _markdown_text(text: str) -> str:
    for letter in ("\\", "|", "*", "_", "`", "<", "["):
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def _latex_spans(table: Table) -> list[str]:
    if not any(column.above for column in table.columns):
        return []
    cells, rules, start = [], [], 1
    for text, width in table.spans():
        cells.append(
            rf"\multicolumn{{{width}}}{{c}}{{{latex_text(text)}}}" if text else "&" * (width - 1)
        )
        if text:
            rules.append(rf"\cmidrule(lr){{{start}-{start + width - 1}}}")
        start += width
    return [_latex_row(cells), "".join(rules)]


def _latex_cell(cell: TableCell) -> str:
    text = latex_text(cell.text)
    return rf"\textbf{{{text}}}" if cell.best else text


def _latex_row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


_LATEX = {
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
    "✓": r"$\surd$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "“": "``",
    "”": "''",
    "–": "--",
}


def latex_text(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
