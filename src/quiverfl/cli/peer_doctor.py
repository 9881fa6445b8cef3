"""`quiver peer doctor`: the findings as a table, or for machines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
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
    """A line for each, and below it what to do."""
    console, width = Console(highlight=False), max(len(finding.about) for finding in found)
    for finding in found:
        line = Text(f"{finding.level:9}", style=COLOURS[finding.level])
        line.append(f" {finding.about:{width}}  {finding.text}", style="default")
        console.print(line, soft_wrap=True)
        if finding.remedy:
            console.print(Text(" " * (width + 12) + finding.remedy), soft_wrap=True)
