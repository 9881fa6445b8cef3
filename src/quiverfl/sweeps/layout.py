"""Where a sweep keeps things, and in which state its cells are.

cells/NAME     the run folder of a cell
logs/NAME.log  what its process said on standard error
failures/NAME.json  why it failed, until it succeeds
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

from quiverfl.errors import QuiverError
from quiverfl.results.output_files import replace_file
from quiverfl.results.run_files import read_json
from quiverfl.run_folder import RunFolder
from quiverfl.sweeps.plan import Cell

State: TypeAlias = Literal["new", "begun", "finished", "diverged"]


@dataclass(frozen=True)
class Places:
    """The folder of one or several sweeps; what they have in common is run once."""

    root: Path

    def run(self, cell: Cell) -> Path:
        folder = self.root / "cells" / cell.name
        if not self._named_before or folder.exists():
            return folder
        return self._named_before.get(cell.config.identity(), folder)

    @cached_property
    def _named_before(self) -> dict[str, Path]:
        """Folders of version 0.1, whose names have another hash, by their identity of today."""
        found: dict[str, Path] = {}
        for path in sorted((self.root / "cells").glob("*/config.json")):
            with contextlib.suppress(QuiverError):  # damaged, or of code that is not here
                if "schema" not in read_json(path):
                    found[RunFolder(path.parent).config().identity()] = path.parent
        return found

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
            return str(read_json(path).get("error", ""))
        return str(RunFolder(self.run(cell)).summary().get("error", ""))

    def note_failure(self, cell: Cell, error: str, code: int) -> None:
        record = {"cell": cell.name, "label": cell.label, "error": error, "code": code}
        replace_file(self.failure(cell), (json.dumps(record, indent=2) + "\n").encode())

    def forget_failure(self, cell: Cell) -> None:
        self.failure(cell).unlink(missing_ok=True)
