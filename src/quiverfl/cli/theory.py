"""`quiver theory`: the paper's theorem on a problem with known constants, with plots and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quiverfl.errors import QuiverError


def theory(
    out: Annotated[
        Path | None, typer.Option(help="Write a page, plots, tables and numbers into this folder.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds: fewer and shorter runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure DFedPGP's rate, what connectivity is worth, and what push-sum conserves.

    Takes about two minutes. Every number comes out of DFedPGP running on quadratics whose
    constants are known.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise QuiverError(f"--out {out}: it is a file; name a folder.")
    from quiverfl.paper.theory.measure import measure
    from quiverfl.paper.theory.theory_captions import numbers, verdicts
    from quiverfl.paper.theory.theory_settings import FULL, QUICK
    from quiverfl.paper.theory.theory_tables import all_tables
    from quiverfl.results.table_formats import rich

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)

    def told(text: str) -> None:
        if not as_json:
            errors.print(text, style="dim", markup=False)

    findings = measure(QUICK if quick else FULL, told)
    page = None
    if out is not None:
        from quiverfl.paper.theory.theory_page import write_findings

        page = write_findings(findings, out)
    if as_json:
        where = None if page is None else str(page)
        print(json.dumps({"page": where, **numbers(findings)}, indent=2))
        return
    for table in all_tables(findings):
        console.print(rich(table))
    for verdict in verdicts(findings):
        console.print(verdict, markup=False)
    if page is not None:
        console.print(f"page: {page}", soft_wrap=True, markup=False)
