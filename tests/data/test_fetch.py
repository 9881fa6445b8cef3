"""Fetching: from an address (here a file's), verified, unpacked safely, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quiverfl.data.sources import SOURCES, load_dataset, official_folder
from quiverfl.data.sources.fetch import Download, fetch
from quiverfl.errors import QuiverError

Files = dict[str, bytes]
Pack = Callable[[Files, Path], Path]
GOOD: Files = {"set/a.bin": b"a" * 1000, "set/inner/b.bin": b"b"}


def tar_of(files: Files, path: Path) -> Path:
    with tarfile.open(path, "w:gz") as tape:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tape.addfile(member, io.BytesIO(content))
    return path


def zip_of(files: Files, path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return path


def download_of(path: Path, place: str = "set", archive: bool = True) -> Download:
    digest = hashlib.md5(path.read_bytes()).hexdigest()
    return Download(path.as_uri(), digest, place, archive)


def silent(file: str, done: int, size: int | None) -> None:
    pass


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def contents(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_an_archive_is_fetched_and_unpacked(pack: Pack, published: Path, root: Path) -> None:
    path = pack(GOOD, published / ("set.zip" if pack is zip_of else "set.tar.gz"))
    seen: list[tuple[str, int, int | None]] = []
    assert fetch([download_of(path)], root, lambda *what: seen.append(what))
    assert contents(root) == set(GOOD)
    assert (root / "set" / "a.bin").read_bytes() == GOOD["set/a.bin"]
    size = path.stat().st_size
    assert seen[0] == (path.name, 0, size)
    assert seen[-1] == (path.name, size, size)
    assert not fetch([download_of(path)], root, silent)


def test_plain_files_come_one_by_one(published: Path, root: Path) -> None:
    downloads = []
    for name in ("one.gz", "two.gz"):
        (published / name).write_bytes(name.encode())
        downloads.append(download_of(published / name, f"set/{name}", archive=False))
    (published / "two.gz").unlink()
    with pytest.raises(QuiverError, match=r"two.gz could not be fetched.*set/one.gz.*set/two.gz"):
        fetch(downloads, root, silent)
    assert contents(root) == {"set/one.gz"}
    (published / "two.gz").write_bytes(b"two.gz")
    assert fetch(downloads, root, silent)
    assert contents(root) == {"set/one.gz", "set/two.gz"}


def test_a_wrong_checksum_keeps_nothing(published: Path, root: Path) -> None:
    path = tar_of(GOOD, published / "set.tar.gz")
    download = Download(path.as_uri(), "0" * 32, "set")
    with pytest.raises(QuiverError, match=r"set.tar.gz has the wrong checksum"):
        fetch([download], root, silent)
    assert contents(root) == set()
    plain = Download(path.as_uri(), "0" * 32, "set/file", archive=False)
    with pytest.raises(QuiverError, match=r"set/file has the wrong checksum"):
        fetch([plain], root, silent)
    assert contents(root) == set()


def test_without_a_network_it_says_which_file_goes_where(published: Path, root: Path) -> None:
    download = Download((published / "set.tar.gz").as_uri(), "0" * 32, "set")
    with pytest.raises(QuiverError, match="could not be fetched") as caught:
        fetch([download], root, silent)
    assert f"copy it to {root / 'set.tar.gz'} and run the command again" in str(caught.value)
    assert contents(root) == set()


def test_an_archive_carried_by_hand_is_used(published: Path, root: Path) -> None:
    path = tar_of(GOOD, published / "set.tar.gz")
    download = download_of(path)
    root.mkdir()
    path.rename(root / "set.tar.gz")
    assert fetch([download], root, silent)
    assert contents(root) == {*GOOD, "set.tar.gz"}
    assert (root / "set.tar.gz").exists()


@pytest.mark.parametrize(
    "files",
    [
        {"set/a": b"x", "../outside": b"x"},
        {"set/../../outside": b"x"},
        {"/outside": b"x"},
        {"elsewhere/a": b"x"},
        {},
    ],
)
@pytest.mark.parametrize("pack", [tar_of, zip_of])
def test_archives_cannot_write_elsewhere(
    pack: Pack, files: Files, published: Path, root: Path
) -> None:
    path = pack(files, published / ("set.zip" if pack is zip_of else "set.tar.gz"))
    with pytest.raises(QuiverError, match=r"outside of set: not unpacked|holds no files"):
        fetch([download_of(path)], root, silent)
    assert contents(root.parent) == {f"published/{path.name}"}


def test_archives_cannot_hold_links(published: Path, root: Path) -> None:
    path = published / "set.tar.gz"
    with tarfile.open(path, "w:gz") as tape:
        link = tarfile.TarInfo("set/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tape.addfile(link)
    with pytest.raises(QuiverError, match="not a plain file"):
        fetch([download_of(path)], root, silent)
    assert contents(root) == set()


def test_something_that_is_no_archive(published: Path, root: Path) -> None:
    for name in ("set.tar.gz", "set.zip"):
        (published / name).write_bytes(b"nothing of the kind")
        with pytest.raises(QuiverError, match=f"{name} is not a readable archive"):
            fetch([download_of(published / name)], root, silent)
    assert contents(root) == set()


def test_an_empty_folder_does_not_count_as_there(root: Path, published: Path) -> None:
    (root / "mnist").mkdir(parents=True)
    assert official_folder("mnist", root) is None
    with pytest.raises(QuiverError, match="mnist is not there"):
        load_dataset("mnist", root)
    (root / "set").mkdir()
    assert fetch([download_of(tar_of(GOOD, published / "set.tar.gz"))], root, silent)
    assert contents(root) == set(GOOD)


def test_every_official_source_can_be_fetched_to_where_it_is_looked_for() -> None:
    for source in SOURCES.values():
        assert (source.origin == "official") == bool(source.downloads)
        for download in source.downloads:
            assert len(bytes.fromhex(download.md5)) == 16
            assert download.place.split("/")[0] in source.folders
