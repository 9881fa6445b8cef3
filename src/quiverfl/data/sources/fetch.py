"""Downloads of published archives: verified, safely unpacked, whole or absent."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from quiverfl.errors import QuiverError
from quiverfl.support.durable import temporary_folder, write_atomically

CHUNK = 1 << 18
TIMEOUT = 30

ProgressReport = Callable[[str, int, int | None], None]
"""(file, bytes so far, bytes in all where known), for a progress bar."""


@dataclass(frozen=True)
class Download:
    """One published file. An archive is unpacked to the folder `place` that it holds; any other
    file is stored as `place`. Both are below the data root."""

    url: str
    md5: str
    place: str
    archive: bool = True

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[1]


def fetch(downloads: Sequence[Download], root: Path, report: ProgressReport) -> bool:
    """Has all files or folders in their places; False if they already were."""
    missing = [download for download in downloads if not holds_files(root / download.place)]
    for download in missing:
        try:
            _fetch(download, root, report)
        except (urllib.error.URLError, OSError) as error:
            _remove_if_empty((root / download.place).parent, root)
            reason = getattr(error, "reason", None) or error
            raise QuiverError(
                f"{download.url} could not be fetched ({reason}). "
                f"{download_instructions(downloads, root)}"
            ) from error
    return bool(missing)


def _remove_if_empty(folder: Path, root: Path) -> None:
    if folder != root:
        with contextlib.suppress(OSError):
            folder.rmdir()


def holds_files(place: Path) -> bool:
    """A file, or a folder that holds something; what Quiver is still writing does not count."""
    if place.is_dir():
        return any(not path.name.startswith(".") for path in place.iterdir())
    return place.exists()


def download_instructions(downloads: Sequence[Download], root: Path) -> str:
    """Instructions for a machine without network: the files, and the folder for each."""
    if not downloads[0].archive:
        places = ", ".join(str(root / download.place) for download in downloads)
        address = downloads[0].url.rsplit("/", 1)[0]
        return (
            f"Without a network: download these files from {address} elsewhere and copy them here: "
            f"{places}."
        )
    download = downloads[0]
    return (
        f"Without a network: download {download.file} elsewhere, copy it to "
        f"{root / download.file} and run the command again (or unpack it yourself so that "
        f"{root / download.place} is there)."
    )


def _fetch(download: Download, root: Path, report: ProgressReport) -> None:
    """A copy of an archive that already lies in the root is used instead of the network."""
    final = root / download.place
    if not download.archive:
        with write_atomically(final) as draft:
            _download(download, draft, report)
            _verify(draft, download, final)
        return
    carried = root / download.file
    with temporary_folder(root) as folder:
        archive = carried
        if not carried.is_file():
            archive = folder / download.file
            _download(download, archive, report)
        _verify(archive, download, carried)
        with write_atomically(final) as draft:
            _unpack(archive, download, draft)


def _download(download: Download, to: Path, report: ProgressReport) -> None:
    with urllib.request.urlopen(download.url, timeout=TIMEOUT) as reply, to.open("wb") as file:
        announced = reply.headers.get("Content-Length")
        size = int(announced) if announced else None
        done = 0
        report(download.file, done, size)
        while chunk := reply.read(CHUNK):
            file.write(chunk)
            done += len(chunk)
            report(download.file, done, size)
    if size is not None and done != size:
        raise ConnectionError(f"the connection ended after {done:,} of {size:,} bytes")


def _verify(path: Path, download: Download, shown_path: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != download.md5:
        raise QuiverError(
            f"{shown_path} has the wrong checksum (md5 {digest.hexdigest()}, published "
            f"{download.md5}): it is damaged, or the published file has changed. Nothing was "
            "unpacked; delete a copy of your own and run the command again."
        )


def _unpack(archive: Path, download: Download, draft: Path) -> None:
    """Plain files below the one folder the archive should hold; anything else is refused."""
    try:
        for name, content in _list_members(archive):
            parts = PurePosixPath(name).parts
            if parts[:1] != (download.place,) or ".." in parts:
                raise QuiverError(
                    f"{archive.name} holds {name!r}, outside of {download.place}: not unpacked."
                )
            target = draft.joinpath(*parts[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                shutil.copyfileobj(content, file)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise QuiverError(f"{archive.name} is not a readable archive ({error}).") from error
    if not draft.is_dir():
        raise QuiverError(f"{archive.name} holds no files.")


def _list_members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if not info.is_dir():
                    with packed.open(info) as content:
                        yield info.filename, content
        return
    with tarfile.open(archive, "r:*") as tape:
        for member in tape:
            content_of = tape.extractfile(member) if member.isfile() else None
            if content_of is not None:
                yield member.name, content_of
            elif not member.isdir():
                raise QuiverError(
                    f"{archive.name} holds {member.name!r}, which is not a plain file."
                )


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
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != expected:
        raise QuiverError(
            f"{path} has the wrong checksum ({what} {digest}, published {expected}): it is damaged "
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
    """Say what to do about a damaged file; an archive is unpacked only if its folder is missing."""
    return f"Delete the folder {path.parent} and run 'quiver data fetch {name}'"


def fetch_remedy(name: str, path: Path) -> str:
    """Say what to do about a file that is not the published one."""
    return f"{fetch_again(name, path)}, or set data.options.verify = false if the change was meant."
