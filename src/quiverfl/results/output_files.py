"""Files that are either the old one or the new one, never half of either."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from quiverfl.errors import QuiverError


def replace_file(path: Path, content: bytes) -> None:
    """Write beside the target, flush to disk, rename."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise QuiverError(f"{path} cannot be written: {problem.strerror}.") from problem


def file_name(text: str) -> str:
    """A text as part of a file's name: letters, digits, dots and dashes."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)
