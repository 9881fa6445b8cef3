"""A file is the old one or the new one, whatever happens while it is written."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from quiverfl.support import durable


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    durable.replace_file(path, b"old")

    def fail() -> None:
        with durable.open_replacement(path) as draft:
            draft.write_bytes(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_share_a_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with durable.open_replacement(path) as one, durable.open_replacement(path) as other:
        assert one != other
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert path.read_bytes() == b"one"  # whoever is last
    assert list(tmp_path.iterdir()) == [path]


def test_a_secret_is_never_readable_by_others(tmp_path: Path) -> None:
    durable.replace_file(tmp_path / "key", b"secret", 0o600)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_the_file_and_its_name_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    fsync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (flushed.append(os.fstat(handle)), fsync(handle))
    )
    durable.replace_file(tmp_path / "file", b"new")
    assert [stat.S_ISDIR(status.st_mode) for status in flushed] == [False, True]


def test_a_platform_that_opens_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows: the rename stands without a flush of the folder."""
    opened = os.open

    def windows(path: str, flags: int, *rest: int) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", windows)
    durable.replace_file(tmp_path / "file", b"new")
    with durable.write_atomically(tmp_path / "folder") as draft:
        draft.mkdir()
        (draft / "inside").write_bytes(b"x")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "folder" / "inside").read_bytes() == b"x"


def test_what_a_kill_left_half_written_is_removed_on_request(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from quiverfl.support import durable\n"
        f"with durable.open_replacement(Path({str(tmp_path / 'file')!r})) as draft:\n"
        "    draft.write_bytes(b'half'); print('half', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    durable.remove_partial(tmp_path, older_than=3600)
    assert left.exists()  # somebody may still be at work on it
    durable.remove_partial(tmp_path)
    assert not list(tmp_path.iterdir())
