"""Your own arrays in an .npz file, or a folder of .npy files.

Either the whole (`x`, `y`, perhaps `owner`), which is split, or both parts: `train_x`, `train_y`,
`test_x`, `test_y`, perhaps `train_owner`, `test_owner`. `x_train` and so on are understood as well.

Inputs of an integer type are ids, such as those of words; bytes are images or numbers. Large inputs
are never in memory as a whole, unless the file is compressed.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from quiverfl.data.dataset import Dataset
from quiverfl.data.examples import LARGE, DiskRows, find_memory_map, select_rows
from quiverfl.data.sources.arrays import Kinds, from_arrays, split_train_test
from quiverfl.errors import QuiverError
from quiverfl.trees import tree_leaves, tree_map
from quiverfl.types import AnyArray

Arrays = dict[str, AnyArray]
Names = str | Sequence[str] | Mapping[str, str]
"""One array; several, by their names; or several by other names."""
UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    zipfile.BadZipFile,
    AttributeError,
    KeyError,
    struct.error,
)


def read_npz(
    path: Path,
    test_share: float = 0.2,
    classes: int | None = None,
    inputs: Kinds = None,
    targets: Kinds = None,
    features: Names = "x",
    label: Names = "y",
    owner: str = "owner",
) -> Dataset:
    """Images as uint8 [n, channels, height, width] (or channels last), ids or numbers.

    `inputs` says "ids" or "numbers" where the type of the array does not. `targets` says that y
    holds "numbers" or "ids" of any shape to be learned, and not labels. `features` and `label` name
    the arrays; several make a dictionary of inputs, or of targets.
    """
    arrays = _load(path)
    said: dict[str, Any] = {"inputs": inputs, "targets": targets, "are_ids": _holds_ids}
    if any(f"train_{name}" in arrays for name in _describe_arrays(features)):
        parts = [
            tuple(_take(path, arrays, names, f"{part}_") for names in (features, label))
            for part in ("train", "test")
        ]
        owners = None
        if f"train_{owner}" in arrays:
            whose, theirs = (_take_array(path, arrays, f"{p}_{owner}") for p in ("train", "test"))
            owners = (np.asarray(whose), np.asarray(theirs))
        first, second = ((_keep_on_disk(x), tree_map(np.asarray, y)) for x, y in parts)
        return from_arrays(path.stem, str(path), first, second, owners, classes, **said)
    x, y = (_take(path, arrays, names) for names in (features, label))
    owned = np.asarray(arrays[owner]) if owner in arrays else None
    count = _check_lengths(path, {"x": x, "y": y, owner: owned})
    one = not isinstance(y, dict) and y.ndim == 1 and targets in (None, "labels")
    groups = np.asarray(y) if one else np.zeros(count, np.int64)
    rows = split_train_test(groups if owned is None else owned, test_share)
    owners = None if owned is None else (owned[rows[0]], owned[rows[1]])
    x = _keep_on_disk(x)
    first, second = (
        (
            tree_map(lambda a, r=r: select_rows(a, r), x),
            tree_map(lambda a, r=r: np.asarray(a[r]), y),
        )
        for r in rows
    )
    return from_arrays(path.stem, str(path), first, second, owners, classes, **said)


def _holds_ids(path: str, x: AnyArray) -> bool:
    return bool(np.issubdtype(x.dtype, np.integer)) and x.dtype != np.uint8


def _keep_on_disk(x: Any) -> Any:
    """Large arrays of files stay there; others are read."""

    def one(array: AnyArray) -> Any:
        if find_memory_map(array) is not None and array.nbytes > LARGE and len(array):
            return DiskRows(array)
        return np.array(array) if find_memory_map(array) is not None else array

    return tree_map(one, x)


def _check_lengths(path: Path, trees: Mapping[str, Any]) -> int:
    named = [
        (f"{kind}.{name}" if name else kind, len(array))
        for kind, tree in trees.items()
        for name, array in tree_leaves(tree)
        if array is not None
    ]
    first, count = named[0]
    for key, length in named:
        if length != count:
            raise QuiverError(f"{path}: {first!r} holds {count} examples and {key!r} {length}.")
    return count


def _load(path: Path) -> Arrays:
    try:
        if path.is_dir():
            files = sorted(path.glob("*.npy"))
            arrays = {f.stem: np.load(f, mmap_mode="r", allow_pickle=False) for f in files}
        else:
            arrays = _members(path)
    except FileNotFoundError:
        raise QuiverError(f"{path} is missing.") from None
    except UNREADABLE as error:
        what = "folder of .npy files" if path.is_dir() else ".npz of plain arrays"
        raise QuiverError(
            f"{path} is not a readable {what} ({type(error).__name__}): it is "
            "truncated, damaged or holds Python objects."
        ) from error
    return {_is_usual_key(key): array for key, array in arrays.items()}


def _members(path: Path) -> Arrays:
    """The arrays of an .npz; large ones that are not compressed are mapped."""
    with np.load(path, allow_pickle=False) as archive, path.open("rb") as file:
        arrays = {}
        for key in archive.files:
            info = archive.zip.NameToInfo.get(f"{key}.npy")
            plain = info is not None and info.compress_type == zipfile.ZIP_STORED
            large = plain and info.file_size > LARGE
            mapped = _map_member(path, file, info.header_offset) if large else None
            arrays[key] = archive[key] if mapped is None else mapped
    return arrays


def _map_member(path: Path, file: IO[bytes], header: int) -> AnyArray | None:
    """An array that lies in a file as it is; None where it is laid out otherwise."""
    file.seek(header)
    name, extra = struct.unpack("<26x2H", file.read(30))
    file.seek(name + extra, 1)
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        return None
    shape, by_columns, dtype = read(file)
    if by_columns or dtype.hasobject:
        return None
    return np.memmap(path, dtype, "r", file.tell(), shape)


def _is_usual_key(key: str) -> str:
    what, _, part = key.rpartition("_")
    return f"{part}_{what}" if part in ("train", "test") else key


def _describe_arrays(names: Names) -> list[str]:
    """The names of the arrays."""
    if isinstance(names, Mapping):
        return list(names.values())
    return [names] if isinstance(names, str) else list(names)


def _take(path: Path, arrays: Arrays, names: Names, part: str = "") -> Any:
    if isinstance(names, str):
        return _take_array(path, arrays, f"{part}{names}")
    pairs = names.items() if isinstance(names, Mapping) else ((name, name) for name in names)
    return {called: _take_array(path, arrays, f"{part}{name}") for called, name in pairs}


def _take_array(path: Path, arrays: Arrays, key: str) -> AnyArray:
    if key not in arrays:
        raise QuiverError(
            f"{path} has no array {key!r}; it has {', '.join(sorted(arrays)) or 'none'}. Name "
            "them x and y, or train_x, train_y, test_x and test_y; or name yours with "
            "data.options.features and data.options.label."
        )
    return arrays[key]
