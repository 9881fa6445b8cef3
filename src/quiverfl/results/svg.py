"""A matplotlib figure as SVG that can stand inside an HTML page, next to others."""

from __future__ import annotations

import io
import re

import matplotlib
from matplotlib.figure import Figure

from quiverfl.results.figures import STYLE
from quiverfl.results.html import Markup, tag
from quiverfl.results.palette import themed


def inline_svg(figure: Figure, title: str, name: str) -> Markup:
    """The figure with a title for those who cannot see it.

    `name` must be unique in the page: it keeps the ids of several figures apart.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    box = re.search(r'viewBox="([^"]+)"', text)
    body = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # Metadata and style sheets are for SVG files; in a page the style would leak out.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'\bxlink:href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"\burl\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r"\b(fill|stroke): (#[0-9a-f]{6})\b", _follow_the_page, body)
    return tag(
        "svg",
        tag("title", title),
        Markup(body.strip()),
        viewBox=box.group(1) if box else None,
        role="img",
    )


def _follow_the_page(found: re.Match[str]) -> str:
    return f"{found.group(1)}: {themed(found.group(2))}"
