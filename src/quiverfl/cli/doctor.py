"""`quiver doctor`: verify a device, and print a table to send back."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def doctor(
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Verify a device: its numbers against the CPU, its speed against a bare loop, its memory.

    Ends with 1 if anything failed or differs. A slow device is no failure.
    """
    from quiverfl.device_check import examined

    status = Console(stderr=True, highlight=False)
    findings = []
    with status.status("examining …") as shown:
        for finding in examined(device):
            findings.append(finding)
            shown.update(f"{finding.part}: {finding.what} {finding.verdict}")
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        table = Table("part", "what", "measured", "expected", "verdict", box=None, pad_edge=False)
        for finding in findings:
            table.add_row(*dataclasses.astuple(finding))
        Console(highlight=False).print(table)
    if any(finding.verdict in ("failed", "differs") for finding in findings):
        raise typer.Exit(1)
