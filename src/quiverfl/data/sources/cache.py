"""A data set once read is kept as plain arrays and memory-mapped from then on.

One folder per (data set, files, options), named by a fingerprint of the place, names, sizes and
times of the files it was read from: changed files are read again, and nothing is ever half-written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quiverfl.data.dataset import Dataset
from quiverfl.data.examples import iterate_pieces
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.support.durable import temporary_folder, write_atomically

FOLDER = ".quiver-cache"
VERSION = 5
"""Version of what readers make of the same files; an older cache is not reused."""
VERSIONS = {"table": 7, "huggingface": 7}
"""Versions of readers that changed since."""
MAPPED = ("train_x", "test_x")
LABELS = ("train_y", "test_y", "train_owner", "test_owner")
TARGETS = ("train_target", "test_target")
DAMAGED = (OSError, EOFError, ValueError, KeyError, TypeError)


def load_cached(
    name: str,
    files: Path,
    options: Mapping[str, Any],
    cache: Path,
    read: Callable[[], Dataset],
) -> Dataset:
    """The data set from the cache; read and kept there first if it is not."""
    folder = cache / f"{name}-{hash_files(files, options, VERSIONS.get(name, VERSION))}"
    if folder.exists():
        try:
            return load_arrays(folder)
        except DAMAGED:
            # A file of the cache was damaged from outside: what it was made from is still there.
            _remove(folder)
    dataset = read()
    try:
        with write_atomically(folder) as draft:
            save_arrays(dataset, draft)
    except OSError as error:
        warnings.warn(
            f"{name} could not be cached in {cache} ({error}); it is read again every time. "
            "Set data.options.cache to a folder that can be written.",
            QuiverWarning,
            stacklevel=2,
        )
        return dataset
    try:
        return load_arrays(folder)
    except DAMAGED:  # another process found the damage too, and is at work on it
        return dataset


def _remove(folder: Path) -> None:
    """Remove the folder atomically, even while other processes read or remove it."""
    with contextlib.suppress(FileNotFoundError), temporary_folder(folder.parent) as aside:
        folder.rename(aside / folder.name)


def hash_files(files: Path, options: Mapping[str, Any], version: int = VERSION) -> str:
    """Hash the path, names, sizes and times of a file or of all below a folder, and the options."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((version, str(files.resolve()), sorted(options.items()))).encode())
    for entry in _list_entries(files):
        digest.update(repr(entry).encode())
    return digest.hexdigest()


def _list_entries(files: Path) -> Iterator[tuple[str, int, int]]:
    if files.is_file():
        status = files.stat()
        yield files.name, status.st_size, status.st_mtime_ns
        return
    with os.scandir(files) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            if not entry.name.startswith("."):
                for name, size, changed in _list_entries(Path(entry.path)):
                    yield f"{entry.name}/{name}", size, changed
        else:
            status = entry.stat()
            yield entry.name, status.st_size, status.st_mtime_ns


def save_arrays(dataset: Dataset, folder: Path) -> None:
    """The arrays as .npy files and the rest as JSON."""
    folder.mkdir(parents=True)
    for key in LABELS:
        if getattr(dataset, key) is not None:
            np.save(folder / f"{key}.npy", getattr(dataset, key), allow_pickle=False)
    forms = {}
    for key in (*MAPPED, *TARGETS):
        tree = getattr(dataset, key)
        if tree is not None:
            forms[key] = _save_tree(tree, folder, key)
    facts = {
        "name": dataset.name,
        "classes": dataset.classes,
        "class_names": dataset.class_names,
        "mean": dataset.mean,
        "std": dataset.std,
        "owner_names": dataset.owner_names,
        "known_digest": dataset.digest,
        "notes": dataset.notes,
        "doubts": dataset.doubts,
        "columns": dataset.columns,
        "categories": dict(dataset.categories),
        "forms": forms,
    }
    (folder / "dataset.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _save_tree(tree: Any, folder: Path, name: str) -> Any:
    """Save every array in its own file. Returns the structure of the tree, with their names."""
    if isinstance(tree, dict):
        parts = [_save_tree(tree[k], folder, f"{name}-{i}") for i, k in enumerate(tree)]
        return {"keys": list(tree), "parts": parts}
    if isinstance(tree, tuple | list):
        return {"parts": [_save_tree(part, folder, f"{name}-{i}") for i, part in enumerate(tree)]}
    with (folder / f"{name}.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file,
            {
                "descr": np.lib.format.dtype_to_descr(tree.dtype),
                "fortran_order": False,
                "shape": tuple(tree.shape),
            },
        )
        for piece in iterate_pieces(tree):
            file.write(np.ascontiguousarray(piece).data)
    return name


def _load_tree(form: Any, read: Callable[[str], Any]) -> Any:
    if isinstance(form, str):
        return read(form)
    parts = [_load_tree(part, read) for part in form["parts"]]
    return dict(zip(form["keys"], parts, strict=True)) if "keys" in form else tuple(parts)


def load_arrays(folder: Path) -> Dataset:
    """Load what `save_arrays` wrote; the inputs stay on disk and are mapped into memory."""
    facts = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    forms = facts.pop("forms")

    def read(name: str, mode: Literal["r"] | None = None) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode=mode, allow_pickle=False)

    arrays = {key: _load_tree(forms[key], lambda name: read(name, "r")) for key in MAPPED}
    arrays |= {key: _load_tree(forms[key], read) for key in TARGETS if key in forms}
    arrays |= {key: read(key) for key in LABELS if (folder / f"{key}.npy").exists()}
    for key in ("class_names", "owner_names", "notes", "doubts"):
        facts[key] = tuple(facts[key])
    for key in ("mean", "std", "columns"):
        facts[key] = _to_tuples(facts.get(key, ()))
    try:
        return Dataset(**facts, **arrays)
    except QuiverError as error:
        raise ValueError(str(error)) from error


def _to_tuples(per_channel: Any) -> Any:
    if isinstance(per_channel, dict):
        return {name: tuple(values) for name, values in per_channel.items()}
    return tuple(per_channel)
