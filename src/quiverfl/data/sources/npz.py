"""Your own arrays in an .npz file.

Either the whole (`x`, `y`, perhaps `owner`), which is split, or both parts: `train_x`, `train_y`,
`test_x`, `test_y`, perhaps `train_owner`, `test_owner`. `x_train` and so on are understood as well.

Inputs of an integer type are ids, such as those of words; bytes are images or numbers.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quiverfl.data.dataset import Dataset
from quiverfl.data.sources.arrays import are_ids, from_arrays
from quiverfl.data.sources.train_test import train_and_test
from quiverfl.errors import QuiverError

Arrays = dict[str, npt.NDArray[Any]]


def read_npz(
    path: Path,
    test_share: float = 0.2,
    classes: int | None = None,
    inputs: str | None = None,
    targets: str | None = None,
) -> Dataset:
    """Images as uint8 [n, channels, height, width] (or channels last), ids or numbers.

    `inputs` says "ids" or "numbers" where the type of the array does not. `targets` says that y
    holds "numbers" or "ids" of any shape to be learned, and not labels.
    """
    arrays = _load(path)
    if "train_x" in arrays:
        parts = [_take(path, arrays, f"{part}_x", f"{part}_y") for part in ("train", "test")]
        owners = None
        if "train_owner" in arrays:
            owners = _take(path, arrays, "train_owner", "test_owner")
        ids = are_ids(inputs, _of_ids(parts[0][0]))
        return from_arrays(path.stem, str(path), parts[0], parts[1], owners, classes, ids, targets)
    x, y = _take(path, arrays, "x", "y")
    owner = arrays.get("owner")
    for key, array in (("y", y), ("owner", owner)):
        if array is not None and len(array) != len(x):
            raise QuiverError(f"{path}: 'x' holds {len(x)} examples and {key!r} {len(array)}.")
    groups = y if y.ndim == 1 and targets in (None, "labels") else np.zeros(len(y), np.int64)
    train, test = train_and_test(groups if owner is None else owner, test_share)
    owners = None if owner is None else (owner[train], owner[test])
    whole = (x[train], y[train]), (x[test], y[test])
    ids = are_ids(inputs, _of_ids(x))
    return from_arrays(path.stem, str(path), *whole, owners, classes, ids, targets)


def _of_ids(x: npt.NDArray[Any]) -> bool:
    return bool(np.issubdtype(x.dtype, np.integer)) and x.dtype != np.uint8


def _load(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise QuiverError(f"{path} is missing.") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise QuiverError(
            f"{path} is not a readable .npz of plain arrays ({type(error).__name__}): it is "
            "truncated, damaged or holds Python objects."
        ) from error
    return {_usual(key): array for key, array in arrays.items()}


def _usual(key: str) -> str:
    what, _, part = key.partition("_")
    return f"{part}_{what}" if part in ("train", "test") else key


def _take(path: Path, arrays: Arrays, *keys: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    for key in keys:
        if key not in arrays:
            raise QuiverError(
                f"{path} has no array {key!r}; it has {', '.join(sorted(arrays)) or 'none'}. Name "
                "them x and y, or train_x, train_y, test_x and test_y."
            )
    first, second = keys
    return arrays[first], arrays[second]
