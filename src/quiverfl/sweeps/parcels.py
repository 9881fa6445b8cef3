"""A run folder as bytes, for machines that share no storage: sent with an order, brought back.

What is packed while the run continues is its newest checkpoint with every line that was written
before it, so that it can be resumed anywhere.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from quiverfl import durable, locks
from quiverfl.engine.checkpoint import checkpoints

FIRST = ("config.json", "environment.json", "partition.npz")
LAST = ("history.jsonl", "rounds.jsonl", "history.parquet", "rounds.parquet", "summary.json")
"""The summary says that a run is over, so it comes when everything else is there."""


def pack(folder: Path) -> bytes | None:
    """None where there is nothing to resume from, or where files changed meanwhile: try later."""
    newest = checkpoints(folder / "checkpoints")[-1:]
    if not newest and not (folder / "summary.json").is_file():
        return None
    weights = [path.with_suffix(".safetensors") for path in newest]
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=buffer, mode="w") as parcel:
            names = [*FIRST, *(_inside(folder, path) for path in (*weights, *newest)), *LAST]
            for name in names:
                if (folder / name).is_file():
                    _add(parcel, name, (folder / name).read_bytes())
    except OSError:  # a checkpoint was replaced by a newer one just now
        return None
    return buffer.getvalue()


def unpack(parcel: bytes, folder: Path) -> None:
    """Each file whole or not at all, in the order in which they were packed."""
    with tarfile.open(fileobj=io.BytesIO(parcel)) as files:
        for member in files.getmembers():
            content = files.extractfile(member)
            if member.name not in (*FIRST, *LAST) and not member.name.startswith("checkpoints/"):
                raise ValueError(f"{member.name} is not a file of a run folder")
            assert content is not None
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(target, content.read())


def put_back(parcel: bytes, folder: Path) -> None:
    """Into the folder of the run, which nobody else writes to meanwhile."""
    with locks.alone(folder, wait=True):
        unpack(parcel, folder)


def _inside(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _add(parcel: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    parcel.addfile(info, io.BytesIO(content))
