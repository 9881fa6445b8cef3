"""Folders that commands write into: new ones, empty ones, or their own of an earlier call.

Whatever else is in a folder belongs to somebody: it is named and left as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from quiverfl.errors import QuiverError
from quiverfl.support import durable, locks

RUN, PEER, CELLS = "config.json", "peer.toml", "cells"
MOST_NAMES = 3


def refuse_foreign(
    folder: Path, is_own: Callable[[Path], bool], remedy: str = "choose another --out"
) -> None:
    """Refuse a folder that holds something and is not the command's own."""
    durable.check_writable(folder)
    if folder.exists() and not folder.is_dir():
        raise QuiverError(f"{folder} is a file: {remedy}.")
    if list_contents(folder) and not is_own(folder):
        raise QuiverError(
            f"{folder} holds {describe_contents(folder)}, and nothing is written beside that: "
            f"{remedy}, or move away what is there."
        )


PICTURES = {".pdf": b"%PDF", ".svg": b"<?xml", ".png": b"\x89PNG"}
"""How the files of pictures begin, by the ending of their names."""


def refuse_other_file(path: Path, option: str, *beginnings: bytes) -> None:
    """Refuse to replace a file that does not begin as the command's own do."""
    durable.check_writable(path)
    if not path.exists():
        return
    if path.is_dir():
        raise QuiverError(f"{option} {path}: it is a folder; name a file.")
    with path.open("rb") as file:
        start = file.read(max(map(len, beginnings)))
    if start and not start.startswith(beginnings):
        raise QuiverError(
            f"{option} {path}: the file is there already and is not one that this command wrote: "
            "choose another name, or move it away."
        )


def list_contents(folder: Path) -> list[str]:
    """The names in a folder. Locks, and folders with nothing in them, are nobody's."""
    if not folder.is_dir():
        return []
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name != locks.NAME and not (path.is_dir() and not list_contents(path))
    )


def describe_contents(folder: Path) -> str:
    """Describe the contents of a folder for a sentence."""
    if holds_run(folder):
        return "a run"
    if (folder / PEER).is_file():
        return "a peer"
    names = list_contents(folder)
    if CELLS in names and holds_run_below(folder / CELLS):
        return "the cells of a sweep"
    if holds_run_below(folder):
        return "other runs"
    more = len(names) - MOST_NAMES
    listed = ", ".join(names[:MOST_NAMES])
    return f"{listed} and {more} more" if more > 0 else listed


def holds_run(folder: Path) -> bool:
    """Whether it is a run folder of Quiver: other programs write a config.json, too."""
    try:
        written = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(written, dict) and "quiver" in written


def holds_run_below(folder: Path) -> bool:
    return folder.is_dir() and any(holds_run(path) for path in folder.iterdir() if path.is_dir())
