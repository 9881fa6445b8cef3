"""One process at a time, and no lock outlives its holder."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.support import locks


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that writes to the folder."""
    code = (
        "import time; from pathlib import Path; from quiverfl.support import locks\n"
        f"with locks.lock_folder(Path({str(folder)!r})):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_whoever_is_refused_is_told_by_whom(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        said = rf"process {process.pid} on host {socket.gethostname()} is writing there"
        with pytest.raises(QuiverError, match=said), locks.lock_folder(tmp_path):
            pass


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_process_holds_nothing(tmp_path: Path, end: signal.Signals) -> None:
    with holder(tmp_path) as process:
        process.send_signal(end)
        process.wait()
        with locks.lock_folder(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []  # nor is there anything left to delete by hand


def test_waiting_ends_with_the_holder(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
        with locks.lock_folder(tmp_path, wait=True):
            assert json.loads((tmp_path / locks.NAME).read_text())["pid"] == os.getpid()


def test_folders_made_for_nothing_are_removed(tmp_path: Path) -> None:
    with locks.lock_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with locks.lock_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "result").touch()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["result"]


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_lock", refuse)
    with pytest.warns(QuiverWarning, match="without locks"), locks.lock_folder(tmp_path):
        pass


def test_windows_has_the_same_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the functions that Windows has, and without those that it lacks."""
    held: set[tuple[int, int]] = set()

    def locking(handle: int, mode: int, count: int) -> None:
        place = os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR)
        if place in held:
            raise PermissionError(errno.EACCES, "Permission denied")
        held.add(place)

    fake = types.ModuleType("msvcrt")
    fake.locking, fake.LK_NBLCK = locking, 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setitem(sys.modules, "fcntl", None)  # an import of it fails
    monkeypatch.setattr(sys, "platform", "win32")
    spec = importlib.util.spec_from_file_location("windows_locks", locks.__file__)
    assert spec is not None
    assert spec.loader is not None
    windows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(windows)
    said = f"process {os.getpid()} on host"
    lock = windows.lock_folder
    with lock(tmp_path), pytest.raises(QuiverError, match=said), lock(tmp_path):
        pass
    assert len(held) == 1
