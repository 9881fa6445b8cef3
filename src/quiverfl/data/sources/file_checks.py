"""Reading a file and making sure that it is the one it should be."""

from __future__ import annotations

import hashlib
from pathlib import Path

from quiverfl.errors import QuiverError


def read_file(path: Path, remedy: str = "") -> bytes:
    """The bytes of a file, or an error that names it."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise QuiverError(f"{path} is missing. {remedy}".strip()) from None
    except OSError as error:
        raise QuiverError(f"{path} cannot be read: {error.strerror}.") from error


def check_md5(
    path: Path, content: bytes, expected: str, remedy: str, unpacked: bool = False
) -> None:
    """Refuses content that is not the published file, or, `unpacked`, not what it holds."""
    what = "md5 of the unpacked file" if unpacked else "md5"
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise QuiverError(
            f"{path} has the wrong checksum ({what} {found}, published {expected}): it is damaged "
            f"or was changed. {remedy}"
        )


def check_labels(path: Path, lowest: int, highest: int, classes: int) -> None:
    """Refuses a file whose labels do not fit the number of classes."""
    if lowest < 0 or highest >= classes:
        label = lowest if lowest < 0 else highest
        raise QuiverError(
            f"{path} holds the label {label}, but there are {classes} classes, 0 … {classes - 1}: "
            "it belongs to another data set or is damaged."
        )


def fetch_again(name: str, path: Path) -> str:
    """What to do about a damaged file; an archive is unpacked only where its folder is not."""
    return f"Delete the folder {path.parent} and run 'quiver data fetch {name}'"


def again(name: str, path: Path) -> str:
    """What to do about a file that is not the published one."""
    return f"{fetch_again(name, path)}, or set data.options.verify = false if the change was meant."
