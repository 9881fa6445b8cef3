"""HTML pages: elements that are escaped unless they are HTML already, the blocks of a page, a page.

Every page with results is made by `make_page`: the report, the paper's tables, its theory.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import repeat
from typing import Any

from matplotlib.figure import Figure

from quiverfl.results.curves import Chart
from quiverfl.results.figures import render_figure
from quiverfl.results.formatting import Table
from quiverfl.results.groups import Group
from quiverfl.results.palette import GLYPHS, theme_color, theme_css
from quiverfl.results.summary import STAGE_WORDS


class Markup(str):
    """Text that is HTML already."""


_VOID = {"meta", "br", "hr"}


def tag(name: str, /, *content: str, **attributes: str | int | None) -> Markup:
    """An element. Plain text in it is escaped; None attributes are left out.

    `class_` and `aria_label` are written for the attributes that Python cannot name.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join_markup(*content)}</{name}>")


def join_markup(*content: str) -> Markup:
    return Markup("".join(c if isinstance(c, Markup) else html.escape(c) for c in content))


def embed_json(content: Any) -> Markup:
    """JSON for the page's script; nothing in it can end the element it stands in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return tag("script", Markup(text), type="application/json")


# A matplotlib figure as SVG that can stand inside an HTML page, next to others.


def inline_svg(figure: Figure, title: str, name: str) -> Markup:
    """The figure with a title for screen readers.

    `name` must be unique in the page: it keeps the ids of several figures apart.
    """
    text = render_figure(figure, "svg", dpi="figure", transparent=True).decode()
    box = re.search(r'viewBox="([^"]+)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # Metadata and style sheets are for SVG files; in a page the style would leak out.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'\bxlink:href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"\burl\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r"\b(fill|stroke): (#[0-9a-f]{6})\b", _theme_match, body)
    return tag(
        "svg",
        tag("title", title),
        Markup(body.strip()),
        viewBox=box.group(1) if box else None,
        role="img",
    )


def _theme_match(match: re.Match[str]) -> str:
    return f"{match.group(1)}: {theme_color(match.group(2))}"


# The building blocks of the report: tables, legends, panels, settings as HTML.


TEXT_NOT_EMOJI = "\ufe0e"
LONG_LABEL = 24
"""Names of experiments longer than this may be broken over two lines in tables."""


def section(name: str, title: str, *content: str) -> Markup:
    return tag("section", tag("h2", title), *content, id=name)


def lead_paragraph(text: str) -> Markup:
    return tag("p", text, class_="lead")


def missing_note(text: str) -> Markup:
    """A note about what the files do not say."""
    return tag("p", text, class_="missing")


def legend_key(group: Group) -> Markup:
    """The colour and marker an experiment has in all figures."""
    glyph = GLYPHS[group.style.marker] + TEXT_NOT_EMOJI
    color = theme_color(group.style.color)
    return tag("span", glyph, class_="key", style=f"color:{color}", aria_hidden="true")


def make_legend(groups: Sequence[Group]) -> Markup:
    items = [tag("li", legend_key(group), group.label, data_label=group.label) for group in groups]
    return tag("ul", *items, class_="legend") if len(groups) > 1 else Markup()


def data_table(table: Table, groups: Sequence[Group]) -> Markup:
    """A table of results whose first column names experiments.

    A row of several experiments, one for each case, has no colour of its own.
    """
    names = [group.name for group in groups]
    keys = {g.name: legend_key(g) for g in groups if names.count(g.name) == 1}
    keys |= {group.label: legend_key(group) for group in groups}
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
    return join_markup(scrolled, tag("p", table.caption, class_="caption"))


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
                Markup() if chart is None else embed_json(chart),
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


def settings_table(settings: Mapping[str, Any]) -> Markup:
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", format_setting(value)))
        for name, value in settings.items()
    ]
    return tag("table", tag("tbody", *rows), class_="settings")


def differences_table(settings: Mapping[str, Sequence[Any]], groups: Sequence[Group]) -> Markup:
    """Settings in rows, experiments in columns."""
    head = tag("tr", tag("th"), *(tag("th", legend_key(g), g.label, scope="col") for g in groups))
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            *(tag("td", format_setting(value)) for value in values),
        )
        for name, values in settings.items()
    ]
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="settings")
    return tag("div", table, class_="wide", tabindex=0)


def format_setting(value: Any) -> str:
    """A setting as it would be typed."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# A page that needs nothing else and no network.


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{}'"
"""Even if a file's content got into the page as HTML, a browser would load nothing, and run
nothing but the script whose digest this is."""
GENERATOR = tag("meta", name="generator", content="Quiver")
"""How a page of Quiver is recognised."""


def make_page(
    title: str,
    sections: Sequence[Markup],
    *,
    heading: str | None = None,
    eyebrow: str = "Quiver",
    facts: Mapping[str, str] | None = None,
    contents: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    footer: Sequence[Markup] = (),
    live: bool = False,
) -> str:
    """Make an HTML page of sections. Its script and its style are in it.

    `eyebrow` is the line above the heading, which is the title unless given. `facts` are names and
    values below it. `contents` links to sections: their names and what to call them. `notes` are
    sentences to be read before anything else. A `live` page asks its server when to load again.
    """
    code = _read_resource("charts.js") + _read_resource("report.js")
    code += _read_resource("watch.js") if live else ""
    script = f'"use strict";\n(() => {{\n{code}}})();\n'
    listed = [tag("div", tag("dt", n), tag("dd", text)) for n, text in (facts or {}).items()]
    links = [tag("a", text, href=f"#{name}") for name, text in (contents or {}).items()]
    body = tag(
        "body",
        tag(
            "header",
            tag("p", eyebrow, class_="eyebrow"),
            tag("h1", title if heading is None else heading),
            tag("dl", *listed, class_="facts") if listed else Markup(),
        ),
        tag("nav", *links, aria_label="Contents") if links else Markup(),
        tag("ul", *(tag("li", note) for note in notes), class_="notes") if notes else Markup(),
        tag("main", *sections),
        tag("footer", *footer) if footer else Markup(),
        tag("script", Markup(script)),
    )
    head = _make_head(title, script, live)
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _make_head(title: str, script: str, live: bool) -> Markup:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = _POLICY.format(digest) + ("; connect-src 'self'" if live else "")
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        GENERATOR,
        tag("title", title),
        tag("style", Markup(theme_css() + _read_resource("report.css"))),
    )


def _read_resource(name: str) -> str:
    return resources.files("quiverfl.results.report").joinpath(name).read_text(encoding="utf-8")
