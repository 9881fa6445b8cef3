"""Your own images: a folder per class, either below train/ and test/ or in one tree to split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quiverfl.data.dataset import Dataset, Inputs, Integers, channel_statistics
from quiverfl.data.sources.images import MODES, decode, image_files
from quiverfl.data.sources.train_test import train_and_test
from quiverfl.errors import QuiverError, nearest


def read_folder(
    path: Path,
    size: int | Sequence[int] | None = None,
    color: str = "rgb",
    test_share: float = 0.2,
    classes: int | None = None,
) -> Dataset:
    """`size` brings all images to one size: a side, or (height, width). `color`: rgb or grey."""
    if color not in MODES:
        raise QuiverError(f"data.options.color = {color!r}: {nearest(color, MODES)}")
    shape = _size(size)
    if (path / "train").is_dir():
        names = _class_names(path / "train", classes)
        train_x, train_y = _read(path / "train", names, color, shape)
        test_x, test_y = _read_test(path, names, color, shape)
    else:
        names = _class_names(path, classes)
        x, y = _read(path, names, color, shape)
        train, test = train_and_test(y, test_share)
        train_x, train_y, test_x, test_y = x[train], y[train], x[test], y[test]
    mean, std = channel_statistics(train_x)
    return Dataset(path.name, train_x, train_y, test_x, test_y, len(names), names, mean, std)


def _size(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1:
        raise QuiverError(f"data.options.size = {size}: give one side, or height and width.")
    return sides[0], sides[1]


def _class_names(folder: Path, classes: int | None) -> tuple[str, ...]:
    if not folder.is_dir():
        raise QuiverError(f"{folder} is not a folder: it should hold one folder per class.")
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise QuiverError(f"{folder} is empty: it should hold one folder of images per class.")
    if classes is not None and len(names) != classes:
        raise QuiverError(
            f"{folder} holds {len(names)} classes, not data.options.classes = {classes}: "
            f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}."
        )
    return tuple(names)


def _read(
    folder: Path, names: Sequence[str], color: str, size: tuple[int, int] | None
) -> tuple[Inputs, Integers]:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        if not (folder / name).is_dir():
            continue
        files = image_files(folder / name)
        paths += files
        labels += [label] * len(files)
    return decode(paths, color, size), np.array(labels, dtype=np.int64)


def _read_test(
    path: Path, names: Sequence[str], color: str, size: tuple[int, int] | None
) -> tuple[Inputs, Integers]:
    folder = next((path / part for part in ("test", "val") if (path / part).is_dir()), None)
    if folder is None:
        raise QuiverError(
            f"{path} has a train folder but neither test nor val: add one, or put the folders of "
            "the classes directly there to have them split."
        )
    for name in _class_names(folder, None):
        if name not in names:
            raise QuiverError(
                f"{folder / name} is a class that {path / 'train'} does not have: there are "
                f"{len(names)} classes."
            )
    return _read(folder, names, color, size)
