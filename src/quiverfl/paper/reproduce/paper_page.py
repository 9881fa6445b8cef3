"""Everything about a table or a figure on one page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from quiverfl.paper.reproduce.catalogue import Item
from quiverfl.paper.reproduce.collect import Results
from quiverfl.results.groups import Group
from quiverfl.results.html import Markup, join, tag
from quiverfl.results.html_report import document
from quiverfl.results.report_parts import data_table, lead, panels, section
from quiverfl.results.table_formats import Table


def page(
    name: str,
    item: Item,
    tables: Sequence[Table],
    figures: Mapping[str, Figure],
    results: Results | None = None,
    reports: Mapping[str, str] | None = None,
) -> str:
    """`reports` are pages with more about single cases: title → address."""
    groups: list[Group] = results.one_each() if results is not None else []
    parts = [
        section(f"table-{place}", table.title, data_table(table, groups))
        for place, table in enumerate(tables)
    ]
    drawn = panels(list(figures.items()), "figure-", "one")
    parts.append(section("figures", "Figures", drawn))
    if reports:
        links = [tag("li", tag("a", title, href=address)) for title, address in reports.items()]
        words = "Costs, clients, graphs, settings and the range of μ of every method."
        parts.append(section("more", "Each case in full", lead(words), tag("ul", *links)))
    return document(
        f"{name}: {item.title}",
        tag("header", tag("p", f"Quiver, {name}", class_="eyebrow"), tag("h1", item.title)),
        _notes(results),
        tag("main", *parts),
        tag("footer", join("Rounds are counted from 1.")),
    )


def _notes(results: Results | None) -> Markup:
    if results is None or not results.missing:
        return Markup()
    return tag("ul", *(tag("li", text) for text in results.missing), class_="notes")
