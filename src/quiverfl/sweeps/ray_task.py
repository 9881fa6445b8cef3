"""A Ray worker's part of a sweep: run a cell, and copy its run folder between machines.

An archive of a run that continues has its newest checkpoint and every line written before it, so
that any machine can resume it.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import quiverfl
from quiverfl.engine.checkpoint import checkpoints
from quiverfl.support import durable, locks
from quiverfl.sweeps.executor import REFUSED, CellProcess, Order

FIRST = ("config.json", "environment.json", "partition.npz")
LAST = ("history.jsonl", "rounds.jsonl", "history.parquet", "rounds.parquet", "summary.json")
"""The summary says that a run is over, so it is written after everything else."""


def pack_run(folder: Path) -> bytes | None:
    """Archive a run folder; None if it has no checkpoint yet, or if files changed meanwhile."""
    newest = checkpoints(folder / "checkpoints")[-1:]
    if not newest and not (folder / "summary.json").is_file():
        return None
    weights = [path.with_suffix(".safetensors") for path in newest]
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            names = [
                *FIRST,
                *(path.relative_to(folder).as_posix() for path in (*weights, *newest)),
                *LAST,
            ]
            for name in names:
                if (folder / name).is_file():
                    _add(archive, name, (folder / name).read_bytes())
    except OSError:  # a checkpoint was replaced by a newer one just now
        return None
    return buffer.getvalue()


def unpack_run(archive: bytes, folder: Path) -> None:
    """Write each file whole or not at all, in the order in which they were packed."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files.getmembers():
            content = files.extractfile(member)
            if member.name not in (*FIRST, *LAST) and not member.name.startswith("checkpoints/"):
                raise ValueError(f"{member.name} is not a file of a run folder")
            assert content is not None
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            durable.replace_file(target, content.read())


def unpack_into_run(archive: bytes, folder: Path) -> None:
    """Unpack an archive into the folder of the run, which nobody else writes to meanwhile."""
    with locks.lock_folder(folder, wait=True):
        unpack_run(archive, folder)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


SECONDS_BETWEEN_REPORTS = 0.25
"""Throttles the reports of a cell that computes hundreds of rounds in a second."""
SECONDS_BETWEEN_COPIES = 60.0


@dataclass(frozen=True)
class RayOrder:
    """What a Ray worker needs to run a cell."""

    order: Order
    threads: int
    cwd: str
    """The directory in which the sweep was started; your own code lies there."""
    marker: str | None
    """A file that the node must see if folders are shared; None if results are copied back."""
    quiver: str
    archive: bytes | None
    """The run so far, if folders are not shared."""


def run_order(sent: RayOrder) -> Iterator[dict[str, Any]]:
    """Run the cell in a process of this node, and yield its reports.

    Between them come archives of the run if folders are not shared. The last report has `ended`.
    """
    yield {"begun": True}
    if sent.quiver != quiverfl.__version__:
        yield _refuse(f"this node has Quiver {quiverfl.__version__}, the sweep {sent.quiver}")
        return
    if sent.marker is not None:
        if not Path(sent.marker).is_file():
            folder = Path(sent.marker).parent
            yield _refuse(
                f"{folder} is not shared with this node: choose an --out that every node sees "
                "under the same path, or pass --copy-results"
            )
            return
        yield from _follow_cell(sent, sent.order)
        return
    away = Path(tempfile.mkdtemp(prefix="quiver-cell-"))
    try:
        yield from _copy_back(sent, away)
    finally:
        shutil.rmtree(away, ignore_errors=True)


def _copy_back(sent: RayOrder, away: Path) -> Iterator[dict[str, Any]]:
    """Run the cell in a folder of this node, and send its content back now and then."""
    run, log = away / "run", away / "log"
    if sent.archive is not None:
        unpack_run(sent.archive, run)
    copied, newest = time.monotonic(), None
    for report in _follow_cell(sent, {**sent.order, "folder": str(run), "log": str(log)}):
        ended = "ended" in report
        checkpoint = max((path.name for path in (run / "checkpoints").glob("*.json")), default=None)
        due = time.monotonic() - copied > SECONDS_BETWEEN_COPIES and checkpoint != newest
        if ended or due:
            archive = pack_run(run)
            if archive is not None:
                yield {"archive": archive}
                copied, newest = time.monotonic(), checkpoint
        if ended and log.exists():
            yield {"log": log.read_text(errors="replace")}
        yield report


def _follow_cell(sent: RayOrder, order: Order) -> Iterator[dict[str, Any]]:
    folder = Path(sent.cwd)
    process = CellProcess(sent.threads, folder if folder.is_dir() else None)
    rounds = order["until"] or order["config"]["run"]["rounds"]
    reported = 0.0
    try:
        for report in process.follow(order):
            last = report.get("round") == rounds
            if "ended" in report or last or time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                reported = time.monotonic()
                yield report
    finally:
        process.kill()
        process.end()


def _refuse(why: str) -> dict[str, Any]:
    return {"ended": REFUSED, "message": f"{why}."}
