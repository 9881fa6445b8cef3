"""The building blocks of the report: tables, legends, panels, settings as HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quiverfl.results.figures import picture
from quiverfl.results.groups import Group
from quiverfl.results.html import Markup, data, join, tag
from quiverfl.results.palette import GLYPHS, themed
from quiverfl.results.protocol import STAGE_WORDS
from quiverfl.results.report_charts import Chart
from quiverfl.results.svg import inline_svg
from quiverfl.results.table_formats import Table

TEXT_NOT_EMOJI = "\ufe0e"
LONG_LABEL = 24
"""Names of experiments longer than this may be broken over two lines in tables."""


def section(name: str, title: str, *content: str) -> Markup:
    return tag("section", tag("h2", title), *content, id=name)


def lead(text: str) -> Markup:
    return tag("p", text, class_="lead")


def missing(text: str) -> Markup:
    """A note about what the files do not say."""
    return tag("p", text, class_="missing")


def key(group: Group) -> Markup:
    """The colour and marker an experiment has in all figures."""
    glyph = GLYPHS[group.style.marker] + TEXT_NOT_EMOJI
    color = themed(group.style.color)
    return tag("span", glyph, class_="key", style=f"color:{color}", aria_hidden="true")


def legend(groups: Sequence[Group]) -> Markup:
    items = [tag("li", key(group), group.label, data_label=group.label) for group in groups]
    return tag("ul", *items, class_="legend") if len(groups) > 1 else Markup()


def data_table(table: Table, groups: Sequence[Group]) -> Markup:
    """A table of results whose first column names experiments."""
    keys = {group.label: key(group) for group in groups}
    head = tag("thead", _spans(table), _titles(table))
    rows = []
    for row in table.rows:
        label = row[0].text
        long = "long" if len(label) > LONG_LABEL else None
        name = tag("th", keys.get(label, Markup()), label, scope="row", class_=long)
        cells = [
            tag("td", cell.text, class_=_classes(table, position, cell.best))
            for position, cell in enumerate(row[1:], start=1)
        ]
        rows.append(tag("tr", name, *cells))
    scrolled = tag("div", tag("table", head, tag("tbody", *rows)), class_="wide", tabindex=0)
    return join(scrolled, tag("p", table.caption, class_="caption"))


def _spans(table: Table) -> Markup:
    if not any(column.above for column in table.columns):
        return Markup()
    cells = []
    for text, width in table.spans():
        words = STAGE_WORDS.get(text.removeprefix("stage "), "")
        explained = tag("span", words) if words else Markup()
        start = "starts" if text else None
        scope = "colgroup" if text else None
        cells.append(tag("th", text, explained, colspan=width, scope=scope, class_=start))
    return tag("tr", *cells, class_="above")


def _titles(table: Table) -> Markup:
    return tag(
        "tr",
        *(
            tag("th", column.title, scope="col", class_=_classes(table, position, False) or None)
            for position, column in enumerate(table.columns)
        ),
    )


def _classes(table: Table, position: int, best: bool) -> str:
    column = table.columns[position]
    starts = column.above and column.above != table.columns[position - 1].above
    names = {"number": column.number, "starts": starts, "best": best}
    return " ".join(name for name, wanted in names.items() if wanted)


def panels(
    figures: Sequence[tuple[str, Figure]],
    name: str,
    kind: str = "panels",
    charts: Sequence[Chart | None] = (),
) -> Markup:
    """Figures beside each other, below each other on a narrow page.

    Where a figure has a chart the page's script draws that in its place.
    """
    return tag(
        "div",
        *(
            tag(
                "figure",
                tag("figcaption", *_two_parts(caption)),
                inline_svg(figure, caption, f"{name}{position}"),
                Markup() if chart is None else data(chart),
            )
            for position, ((caption, figure), chart) in enumerate(
                zip(figures, charts or repeat(None), strict=False)
            )
        ),
        class_=kind,
    )


def _two_parts(caption: str) -> list[str]:
    """What is before a colon is the name, what is after it explains it."""
    name, colon, rest = caption.partition(": ")
    return [name, tag("span", f" · {rest}")] if colon else [name]


def at_both_stages(
    draw: Callable[..., None], stages: Sequence[str], height: float, of: str = ""
) -> list[tuple[str, Figure]]:
    """One figure per stage, all on the same scale: draw(axes, stage=…). `of` is what is drawn."""
    figures = [picture(partial(draw, stage=stage), height=height) for stage in stages]
    drawn = [figure.axes[0] for figure in figures]
    for limits, change in (
        ([axes.get_xlim() for axes in drawn], Axes.set_xlim),
        ([axes.get_ylim() for axes in drawn], Axes.set_ylim),
    ):
        for axes in drawn:
            change(axes, _hull(limits))
    name = f"{of}, stage" if of else "stage"
    return [(f"{name} {s}: {STAGE_WORDS[s]}", f) for s, f in zip(stages, figures, strict=True)]


def _hull(limits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The range that covers all, in the direction they have."""
    lows, highs = [min(pair) for pair in limits], [max(pair) for pair in limits]
    hull = min(lows), max(highs)
    return hull if limits[0][0] <= limits[0][1] else (hull[1], hull[0])


def settings_table(settings: Mapping[str, Any]) -> Markup:
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", written(value)))
        for name, value in settings.items()
    ]
    return tag("table", tag("tbody", *rows), class_="settings")


def differences_table(settings: Mapping[str, Sequence[Any]], groups: Sequence[Group]) -> Markup:
    """Settings in rows, experiments in columns."""
    head = tag("tr", tag("th"), *(tag("th", key(g), g.label, scope="col") for g in groups))
    rows = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", written(value)) for value in values))
        for name, values in settings.items()
    ]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="settings")
    return tag("div", table, class_="wide", tabindex=0)


def written(value: Any) -> str:
    """A setting as it would be typed."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
