"""Files and folders that are there as a whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".quiver-partial-"
ABANDONED = 24 * 3600
"""Seconds after which the leavings of a killed process are swept away."""


MANY = 1000
"""Files above which one sync of everything is quicker than one for each."""


@contextmanager
def workplace(parent: Path) -> Iterator[Path]:
    """A temporary folder below `parent` that is gone afterwards, whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole(final: Path) -> Iterator[Path]:
    """A path to write a file or folder at; it becomes `final` only if nothing goes wrong.

    It lies beside `final`, on the same file system, so the last step is one rename. If someone
    else made `final` meanwhile, theirs stays.
    """
    with workplace(final.parent) as folder:
        draft = folder / final.name
        yield draft
        _settle(draft)
        try:
            draft.rename(final)
        except OSError:
            if not final.exists():
                raise
        _sync(final.parent)


def _settle(draft: Path) -> None:
    """Everything on disk before the rename, or a power cut could leave an empty file behind it."""
    written = [draft, *draft.rglob("*")] if draft.is_dir() else [draft]
    if len(written) > MANY and hasattr(os, "sync"):
        os.sync()
        return
    for path in written:
        _sync(path)


def _sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return  # a folder, on systems that do not open them
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems cannot sync folders; the rename is atomic all the same
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    for left in folder.glob(f"{PARTIAL}*"):
        try:
            abandoned = time.time() - left.stat().st_mtime > ABANDONED
        except FileNotFoundError:
            continue
        if abandoned:
            shutil.rmtree(left, ignore_errors=True)
