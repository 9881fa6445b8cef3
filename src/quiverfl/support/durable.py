"""Durable writes: a file or folder appears whole or not, whatever happens meanwhile.

What is written lies beside its target under a name of its own, is flushed to the disk and renamed;
then the folder is flushed too, so that the name survives a power cut. Errors of writing are plain
`OSError`s: callers know what to say about them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quiverfl.errors import QuiverError

PARTIAL = ".quiver-partial-"
ABANDONED = 24 * 3600
"""Seconds after which whatever a killed process left behind is removed by the next one."""

MANY = 1000
"""Files above which one sync of everything is quicker than one for each."""

NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors of file systems that cannot flush a folder; their renames are atomic nevertheless."""


def to_path(place: object, what: str) -> Path:
    """A path as the user wrote it; `what` says in a refusal which argument it was."""
    if not isinstance(place, str | os.PathLike):
        raise QuiverError(f"{what} is {place!r}: give a path, as text or a Path.")
    return Path(place)


def check_writable(path: Path) -> None:
    """Refuse a path at which nothing can be; the sentence names it as the user did."""
    try:
        path.lstat()
    except OSError as problem:
        if problem.errno == errno.ENAMETOOLONG:
            longest = max(path.parts, key=len, default="")
            raise QuiverError(
                f"{longest[:40]}…: a name of {len(longest)} characters is too long for a file or "
                "folder: choose a shorter one."
            ) from problem
        # Otherwise it is not there yet, or whoever uses it will say what is wrong.
    for link in (path, *path.parents):
        if os.path.islink(link) and not os.path.exists(link):
            raise QuiverError(
                f"{link} is a link to {os.readlink(link)}, which does not exist: make that "
                "folder, or choose another place."
            )


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file: afterwards it is the new one, or on any failure still the old one."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, mode)

    with open_replacement(path) as draft, open(draft, "xb", opener=opener) as file:
        file.write(content)


@contextmanager
def open_replacement(path: Path) -> Iterator[Path]:
    """A path to write a file at; it replaces `path` unless something goes wrong."""
    draft = path.with_name(PARTIAL + secrets.token_hex(8))
    try:
        yield draft
        _sync_file(draft)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A temporary folder below `parent` that is removed afterwards, whatever happens."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_partial(parent, older_than=ABANDONED)
    folder = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def write_atomically(final: Path) -> Iterator[Path]:
    """A path to write a file or folder at; it becomes `final` only if nothing goes wrong.

    It lies beside `final`, on the same file system, so the last step is one rename. If someone
    else made `final` meanwhile, theirs stays.
    """
    with temporary_folder(final.parent) as folder:
        draft = folder / final.name
        yield draft
        _sync_tree(draft)
        try:
            draft.rename(final)
        except OSError:
            if not final.exists():
                raise
        sync_folder(final.parent)


def remove_partial(folder: Path, older_than: float = 0.0) -> None:
    """Remove what killed processes left half-written in a folder.

    Without an age this is for folders that only the caller writes to.
    """
    for left in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):  # another process may be removing it, too
            if time.time() - left.stat().st_mtime < older_than:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the platform can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # Windows opens no folders
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:  # Windows flushes only what is open for writing
        os.fsync(file.fileno())


def _sync_tree(draft: Path) -> None:
    """Everything on disk before the rename, or a power cut could leave an empty file behind it."""
    written = [draft, *draft.rglob("*")] if draft.is_dir() else [draft]
    if len(written) > MANY and hasattr(os, "sync"):
        os.sync()
        return
    for path in written:
        if path.is_dir():
            sync_folder(path)
        else:
            _sync_file(path)
