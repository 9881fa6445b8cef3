"""The findings in a folder: one page that needs nothing else, its pictures, tables and numbers."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

from quiverfl.paper.theory.measure import Findings
from quiverfl.paper.theory.theory_captions import numbers, verdicts
from quiverfl.paper.theory.theory_figures import (
    connectivity_figure,
    conservation_figure,
    rate_figure,
)
from quiverfl.paper.theory.theory_tables import (
    all_tables,
    connectivity_table,
    constants_table,
    limit_table,
    mixing_table,
    rate_table,
    slope_table,
)
from quiverfl.results.figures import write_figure
from quiverfl.results.html import Markup, tag
from quiverfl.results.html_report import document
from quiverfl.results.output_files import replace_file
from quiverfl.results.report_parts import data_table, lead, section
from quiverfl.results.svg import inline_svg
from quiverfl.results.table_formats import Table, markdown

PAGE, TABLES, NUMBERS = "index.html", "tables.md", "theory.json"


def write_findings(findings: Findings, folder: Path) -> Path:
    """Write everything into the folder; the path of the page."""
    figures = {
        "rate": rate_figure(findings),
        "connectivity": connectivity_figure(findings),
        "conservation": conservation_figure(findings),
    }
    for name, figure in figures.items():
        for kind in ("png", "svg"):
            write_figure(figure, folder / f"{name}.{kind}")
    tables = "\n".join(markdown(table) for table in all_tables(findings))
    replace_file(folder / TABLES, tables.encode())
    replace_file(folder / NUMBERS, (json.dumps(numbers(findings), indent=2) + "\n").encode())
    replace_file(folder / PAGE, _page(findings, figures).encode())
    return folder / PAGE


def _page(findings: Findings, figures: dict[str, Figure]) -> str:
    rate, connectivity, conservation = verdicts(findings)
    parts = (
        _section(
            "rate",
            "The rate",
            rate,
            figures["rate"],
            (slope_table(findings.rate), rate_table(findings.rate)),
        ),
        _section(
            "connectivity",
            "Connectivity",
            connectivity,
            figures["connectivity"],
            (connectivity_table(findings.connectivity),),
        ),
        _section(
            "conservation",
            "Conservation of the mean",
            conservation,
            figures["conservation"],
            (mixing_table(findings.conservation), limit_table(findings.conservation)),
        ),
        section("constants", "The problem", data_table(constants_table(findings), ())),
    )
    header = tag(
        "header",
        tag("p", "Quiver", class_="eyebrow"),
        tag("h1", "DFedPGP’s theorem on a problem with known constants"),
    )
    return document("DFedPGP’s theorem, measured", header, tag("main", *parts))


def _section(
    name: str, title: str, verdict: str, figure: Figure, tables: tuple[Table, ...]
) -> Markup:
    shown = [tag("div", tag("h3", table.title), data_table(table, ())) for table in tables]
    picture = tag("figure", inline_svg(figure, title, name), style="margin-top:1.25rem")
    return section(name, title, lead(verdict), picture, *shown)
