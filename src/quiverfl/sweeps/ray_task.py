"""What a Ray worker does for a cell: start its process and pass on what that tells."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quiverfl
from quiverfl.sweeps.cell_process import CellProcess
from quiverfl.sweeps.parcels import pack, unpack
from quiverfl.sweeps.where import REFUSED, Order

SECONDS_BETWEEN_WORDS = 0.25
"""A cell may be through with hundreds of rounds in a second; nobody reads as fast."""
SECONDS_BETWEEN_PARCELS = 60.0


@dataclass(frozen=True)
class Errand:
    order: Order
    threads: int
    cwd: str
    """Where the sweep was started; a person's own code lies there."""
    mark: str | None
    """A file that must be seen here if folders are shared; None where runs are brought back."""
    quiver: str
    parcel: bytes | None
    """What has been run before, where folders are not shared."""


def carry_out(errand: Errand) -> Iterator[dict[str, Any]]:
    """What happens to the cell, line by line; `ended` at last, and parcels between."""
    yield {"begun": True}
    if errand.quiver != quiverfl.__version__:
        yield _refused(f"this node has Quiver {quiverfl.__version__}, the sweep {errand.quiver}")
        return
    if errand.mark is not None:
        if not Path(errand.mark).is_file():
            folder = Path(errand.mark).parent
            yield _refused(
                f"{folder} is not shared with this node: choose an --out that every node sees "
                "under the same path, or pass --bring-back"
            )
            return
        yield from _followed(errand, errand.order)
        return
    away = Path(tempfile.mkdtemp(prefix="quiver-cell-"))
    try:
        yield from _brought_back(errand, away)
    finally:
        shutil.rmtree(away, ignore_errors=True)


def _brought_back(errand: Errand, away: Path) -> Iterator[dict[str, Any]]:
    """In a folder of this node, whose content goes back now and then, and at the end."""
    run, log = away / "run", away / "log"
    if errand.parcel is not None:
        unpack(errand.parcel, run)
    last, newest = time.monotonic(), None
    for told in _followed(errand, {**errand.order, "folder": str(run), "log": str(log)}):
        ended = "ended" in told
        found = max((path.name for path in (run / "checkpoints").glob("*.json")), default=None)
        due = time.monotonic() - last > SECONDS_BETWEEN_PARCELS and found != newest
        if ended or due:
            parcel = pack(run)
            if parcel is not None:
                yield {"parcel": parcel}
                last, newest = time.monotonic(), found
        if ended and log.exists():
            yield {"log": log.read_text(errors="replace")}
        yield told


def _followed(errand: Errand, order: Order) -> Iterator[dict[str, Any]]:
    here = Path(errand.cwd)
    process = CellProcess(errand.threads, here if here.is_dir() else None)
    rounds = order["until"] or order["config"]["run"]["rounds"]
    spoken = 0.0
    try:
        for told in process.follow(order):
            last = told.get("round") == rounds
            if "ended" in told or last or time.monotonic() - spoken > SECONDS_BETWEEN_WORDS:
                spoken = time.monotonic()
                yield told
    finally:
        process.kill()
        process.end()


def _refused(why: str) -> dict[str, Any]:
    return {"ended": REFUSED, "message": f"{why}."}
