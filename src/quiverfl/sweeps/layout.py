"""Where a sweep keeps things, and in which state its cells are.

cells/NAME     the run folder of a cell
logs/NAME.log  what its process said on standard error
failures/NAME.json  why it failed, until it succeeds
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from quiverfl.errors import QuiverError
from quiverfl.results.output_files import replace_file
from quiverfl.run_folder import RunFolder
from quiverfl.sweeps.plan import Cell

State: TypeAlias = Literal["new", "begun", "finished", "diverged"]


@dataclass(frozen=True)
class Places:
    """The folder of one or several sweeps; what they have in common is run once."""

    root: Path

    def run(self, cell: Cell) -> Path:
        return self.root / "cells" / cell.name

    def log(self, cell: Cell) -> Path:
        return self.root / "logs" / f"{cell.name}.log"

    def failure(self, cell: Cell) -> Path:
        return self.root / "failures" / f"{cell.name}.json"

    def state(self, cell: Cell) -> State:
        folder = RunFolder(self.run(cell))
        if not folder.holds_run():
            return "new"
        summary = folder.summary()
        if summary.get("finished"):
            return "finished"
        return "diverged" if "diverged" in summary else "begun"

    def message(self, cell: Cell) -> str:
        """Why it failed, as far as it is known."""
        path = self.failure(cell)
        if path.exists():
            return str(_read(path).get("error", ""))
        return str(RunFolder(self.run(cell)).summary().get("error", ""))

    def note_failure(self, cell: Cell, error: str, code: int) -> None:
        record = {"cell": cell.name, "label": cell.label, "error": error, "code": code}
        replace_file(self.failure(cell), (json.dumps(record, indent=2) + "\n").encode())

    def forget_failure(self, cell: Cell) -> None:
        self.failure(cell).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise QuiverError(f"{path}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
