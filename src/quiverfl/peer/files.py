"""A peer's files: what the disk refuses or gives back changed stops the peer with a sentence."""

from __future__ import annotations

import errno
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from quiverfl import durable
from quiverfl.errors import QuiverError

log = logging.getLogger("quiverfl.peer")
Found = TypeVar("Found")

SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.ENOMEM}
SHORTAGE_SECONDS = 30.0
"""What passes by itself, and how long it is waited for: the machine is short of descriptors."""


class StoreError(QuiverError):
    """The disk did not take or give back what was asked of it."""


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """The new file or the old one, durably, as only its owner may read; or a `StoreError`."""
    end = time.monotonic() + SHORTAGE_SECONDS
    while True:
        try:
            return durable.replace(path, content, mode)
        except OSError as problem:
            if problem.errno not in SHORTAGE or time.monotonic() > end:
                raise cannot_write(path.parent, problem) from problem
        time.sleep(0.1)


def read_checked(path: Path, digest: str) -> bytes:
    """The file's content, if it is still what was committed."""
    content = _asked(path, path.read_bytes)
    if hashlib.sha256(content).hexdigest() != digest:
        raise StoreError(
            f"{path} is not what was committed: its checksum differs. The disk or somebody changed "
            "it; evict this peer on the others and let it join again."
        )
    return content


def file_size(path: Path) -> int:
    return _asked(path, lambda: path.stat().st_size)


def _asked(path: Path, question: Callable[[], Found]) -> Found:
    try:
        return question()
    except OSError as problem:
        raise StoreError(
            f"cannot read {path}: {problem.strerror}. It belongs to the last commit; if the file "
            "is lost, evict this peer on the others and let it join again."
        ) from problem


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
            try:
                path.unlink(missing_ok=True)
            except OSError as problem:  # it does no harm, and goes with a later commit
                log.error("cannot remove %s: %s. Check the disk.", path, problem.strerror)
