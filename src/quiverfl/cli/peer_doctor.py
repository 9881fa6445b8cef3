"""`quiver peer doctor`: the findings as a table, or for machines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiverfl.peer.doctor import Finding, examine

COLOURS = {"good": "green", "doubtful": "yellow", "bad": "red"}


def consult(folder: Path, timeout: float, as_json: bool) -> bool:
    """Print what was found; whether nothing is bad."""
    found = asyncio.run(examine(folder, timeout))
    if as_json:
        print(json.dumps([asdict(finding) for finding in found]))
    else:
        _print(found)
    return all(finding.level != "bad" for finding in found)


def _print(found: list[Finding]) -> None:
    table = Table("what", "", "found", "remedy", show_lines=False)
    for finding in found:
        level = Text(finding.level, style=COLOURS[finding.level])
        table.add_row(finding.about, level, Text(finding.text), Text(finding.remedy))
    Console().print(table)
