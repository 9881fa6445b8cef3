"""Files of results: written as a whole, with one sentence when that cannot be done."""

from __future__ import annotations

from pathlib import Path

from quiverfl import durable
from quiverfl.errors import CannotWrite


def replace_file(path: Path, content: bytes) -> None:
    """The old file or the new one, never half of either; folders are made as needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.replace(path, content)
    except OSError as problem:
        raise CannotWrite(f"{path} cannot be written: {problem.strerror}.") from problem


def file_name(text: str) -> str:
    """A text as part of a file's name: letters, digits, dots and dashes."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in text)
