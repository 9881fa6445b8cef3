"""One process at a time, by a lock that the operating system releases when its holder dies.

The lock is on an open file, not in its existence: a file that a killed process left behind locks
nothing. It records its holder, whom a refusal names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.support import durable

NAME = ".lock"
SECONDS_BETWEEN_TRIES = 0.1
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors of file systems without locks, such as some that clusters mount."""
QUERY_LIMITED_INFORMATION, ACCESS_DENIED, STILL_ACTIVE = 0x1000, 5, 259
"""Constants of Windows: OpenProcess's argument, its answer and GetExitCodeProcess's."""

if sys.platform == "win32":
    import ctypes
    import msvcrt

    FAR = 1 << 30
    """Windows lets nobody read what is locked: this byte is locked, the text before it is not."""

    def _lock(handle: int) -> bool:
        os.lseek(handle, FAR, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError as problem:
            if problem.errno in (errno.EACCES, errno.EDEADLK):
                return False
            raise
        return True

    def is_alive(process: int) -> bool:
        """Whether a process of this machine runs; os.kill would send it Ctrl-C, or end it."""
        kernel = ctypes.WinDLL("kernel32", use_last_error=True)
        handle = kernel.OpenProcess(QUERY_LIMITED_INFORMATION, False, process)
        if not handle:
            return bool(ctypes.get_last_error() == ACCESS_DENIED)  # somebody else's
        code = ctypes.c_ulong()
        kernel.GetExitCodeProcess(handle, ctypes.byref(code))
        kernel.CloseHandle(handle)
        return code.value == STILL_ACTIVE
else:
    import fcntl

    def _lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def is_alive(process: int) -> bool:
        """Whether a process of this machine runs, perhaps somebody else's."""
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class AlreadyLocked(QuiverError):
    """Another process holds the lock: `holder` says which, as far as it is known."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder}.")
        self.holder = holder


class Lock:
    """Held from its making until `release`, or until the process ends in whatever way."""

    def __init__(self, path: Path, wait: bool = False) -> None:
        self._path = path
        while (handle := _open(path)) is None:
            if not wait:
                raise AlreadyLocked(path, _read_holder(path))
            time.sleep(SECONDS_BETWEEN_TRIES)
        self._handle = handle
        with contextlib.suppress(OSError):  # a full disk: still held, by an unnamed process
            _write_holder(handle)

    def release(self) -> None:
        # Removed while it is held, so that nobody waits for a file without a name; Windows only
        # removes files that nobody has open.
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._handle)
        if sys.platform == "win32":
            with contextlib.suppress(OSError):
                self._path.unlink()


@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Only this process writes to a folder. It is made, and removed again if it stays empty.

    Beside another process this waits, or refuses with a sentence that names it.
    """
    made = _make_folder(folder)
    lock = _lock_folder(folder, wait)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
        with contextlib.suppress(OSError):  # no longer empty
            for path in made:
                path.rmdir()


def _make_folder(folder: Path) -> list[Path]:
    """The folders that had to be made, the innermost first."""
    durable.check_writable(folder)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    if folder.exists() and not folder.is_dir():
        raise QuiverError(f"{folder} is a file: choose another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise QuiverError(f"{folder}: cannot be made: {problem.strerror}.") from problem
    return missing


def _lock_folder(folder: Path, wait: bool) -> Lock | None:
    try:
        return Lock(folder / NAME, wait)
    except AlreadyLocked as busy:
        raise QuiverError(
            f"{folder} is in use: {busy.holder} is writing there. Wait until it ends, or choose "
            "another folder."
        ) from busy
    except OSError as problem:
        if problem.errno not in NO_LOCKS:
            raise QuiverError(f"{folder} cannot be written: {problem.strerror}.") from problem
        warnings.warn(
            f"{folder} is on a file system without locks ({problem.strerror}): take care that no "
            "second process writes there.",
            QuiverWarning,
            stacklevel=4,
        )
        return None


def _open(path: Path) -> int | None:
    """A handle that holds the lock, or None while somebody else does."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _lock(handle):
                os.close(handle)
                return None
            if _is_current(handle, path):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed it just now: the next one to be made counts


def _is_current(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(handle: int) -> None:
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, text.encode())


def _read_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        return f"process {holder['pid']} on host {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
