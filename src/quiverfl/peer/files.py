"""Writing files so that a power cut leaves either the old one or the new one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from quiverfl.errors import QuiverError

PART = ".part"


class StoreError(QuiverError):
    """The disk did not take or give back what was asked of it."""


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Temporary file, fsync, rename, fsync of the folder; on failure nothing is left behind."""
    part = path.with_name(path.name + PART)
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            _write_all(handle, content)
            os.fsync(handle)
        finally:
            os.close(handle)
        part.replace(path)
        sync_folder(path.parent)
    except OSError as problem:
        part.unlink(missing_ok=True)
        raise cannot_write(path.parent, problem) from problem


def _write_all(handle: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_checked(path: Path, digest: str) -> bytes:
    """The file's content, if it is still what was committed."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise StoreError(
            f"cannot read {path}: {problem.strerror}. It belongs to the last commit; if the file "
            "is lost, evict this peer on the others and let it join anew."
        ) from problem
    if hashlib.sha256(content).hexdigest() != digest:
        raise StoreError(
            f"{path} is not what was committed: its checksum differs. The disk or somebody changed "
            "it; evict this peer on the others and let it join anew."
        )
    return content


def cannot_write(folder: Path, problem: Exception) -> StoreError:
    reason = problem.strerror if isinstance(problem, OSError) else str(problem)
    return StoreError(
        f"cannot write to {folder}: {reason}. Nothing was lost: the last commit stands and nothing "
        "after it was sent or acknowledged. Make room or make it writable, then start again."
    )


def remove_all_but(folder: Path, keep: Callable[[str], bool]) -> None:
    """Clear the state and share files that no commit names, or names no more."""
    for path in folder.iterdir():
        if path.name.startswith(("state-", "share-")) and not keep(path.name):
            path.unlink(missing_ok=True)
