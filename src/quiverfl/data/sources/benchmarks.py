"""Data with its clients as benchmarks store it: LEAF's JSON, and FedScale's list of samples.

LEAF       train/*.json, test/*.json: {"users": […], "user_data": {user: {"x": […], "y": […]}}}
FedScale   client_data_mapping/train.csv, test.csv: client_id, sample_path, …, label_id
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quiverfl.data.dataset import Dataset
from quiverfl.data.sources.arrays import Kinds, from_arrays, split_train_test
from quiverfl.data.sources.images import check_image_options, decode_images
from quiverfl.errors import QuiverError
from quiverfl.types import AnyArray


@dataclass(frozen=True, eq=False)
class _Part:
    """Examples of one part, and the owner of each."""

    x: AnyArray
    y: AnyArray
    owner: AnyArray

    def take(self, rows: AnyArray) -> _Part:
        return _Part(self.x[rows], self.y[rows], self.owner[rows])


def _build(
    path: Path,
    train: _Part,
    test: _Part | None,
    test_share: float | None,
    notes: Sequence[str] = (),
    **options: Any,
) -> Dataset:
    """Keep the parts, or split every owner's rows by test_share; without a test part by 0.2."""
    notes, doubts = list(notes), []
    if test is not None and test_share is not None:
        notes.append(f"{path}: its test part is not used, as data.options.test_share is given.")
    elif test is not None and not set(test.owner) & set(train.owner):
        doubts.append(
            f"{path}: no client of its test part has training data, so that under the partition "
            "natural nobody has test data: data.options.test_share = 0.2 takes a fraction of every "
            "client's training examples in its place."
        )
    if test is None or test_share is not None:
        rows = split_train_test(train.owner, 0.2 if test_share is None else test_share)
        train, test = train.take(rows[0]), train.take(rows[1])
    pairs = (train.x, train.y), (test.x, test.y)
    owners = train.owner, test.owner
    return from_arrays(path.name, str(path), *pairs, owners, notes=notes, doubts=doubts, **options)


# LEAF.


def read_leaf(
    path: Path,
    shape: Sequence[int] | None = None,
    test_share: float | None = None,
    classes: int | None = None,
    inputs: Kinds = None,
    targets: Kinds = None,
) -> Dataset:
    """`shape` is that of one input, such as [1, 28, 28] for FEMNIST's 784 numbers. Texts of one
    length are characters, which become ids in sorted order. Without a folder `test` a `test_share`
    of every client's examples is taken."""
    split = (path / "train").is_dir()
    first = _read_json_files(path / "train" if split else path)
    second = _read_json_files(path / "test") if split and (path / "test").is_dir() else None
    users = [part for part in (first, second) if part is not None]
    values = [row for part in users for x, _ in part.values() for row in x]
    text = bool(values) and isinstance(values[0], str)
    if text and all(isinstance(row, str) and row.lower().endswith(IMAGES) for row in values):
        raise QuiverError(
            f"{path}: x are names of images, such as {values[0]!r}, as LEAF's CelebA has them: "
            'bring the images as a folder by owner and class (data.name = "folder"), or read them '
            'with code of your own, data.name = "module:function".'
        )
    letters = "".join(sorted({letter for row in values for letter in row})) if text else None
    train, test = (
        None if p is None else _stack_users(path, p, letters, shape) for p in (first, second)
    )
    assert train is not None
    notes = []
    if letters is not None:
        inputs = "ids"
        notes.append(
            f"{path}: inputs are {train.x.shape[1]} characters of {len(letters)} kinds, numbered "
            f"in sorted order: a model looks them up in an embedding of {len(letters)}."
        )
    said = {"classes": classes, "inputs": inputs, "targets": targets}
    return _build(path, train, test, test_share, notes, **said)


IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_Users = dict[str, tuple[list[Any], list[Any]]]


def _read_json_files(folder: Path) -> _Users:
    """Inputs and targets by user, of all files; a user may be in several."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise QuiverError(
            f"{folder} holds no .json files: data.options.path is LEAF's folder data, which has "
            "them in train and test, or a folder of them."
        )
    users: _Users = {}
    for file in files:
        for user, x, y in _read_json(file):
            known = users.setdefault(user, ([], []))
            known[0].extend(x)
            known[1].extend(y)
    return {user: users[user] for user in sorted(users) if users[user][1]}


def _read_json(file: Path) -> list[tuple[str, list[Any], list[Any]]]:
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise QuiverError(f"{file} is not readable JSON ({error}): it is damaged.") from error
    names = content.get("users") if isinstance(content, dict) else None
    data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(names, list) or not isinstance(data, dict):
        raise QuiverError(f"{file} is not LEAF's: it has no list 'users' and table 'user_data'.")
    counts = content.get("num_samples")
    if isinstance(counts, list) and len(counts) != len(names):
        raise QuiverError(f"{file}: {len(names)} users but {len(counts)} num_samples.")
    users = []
    for number, user in enumerate(map(str, names)):
        own = data.get(user)
        x, y = (own.get(key) if isinstance(own, dict) else None for key in ("x", "y"))
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise QuiverError(
                f"{file}: user {user!r} has no lists x and y of one length in 'user_data'."
            )
        if isinstance(counts, list) and counts[number] != len(y):
            raise QuiverError(
                f"{file}: user {user!r} has {len(y)} examples, and num_samples says "
                f"{counts[number]}."
            )
        users.append((user, x, y))
    return users


def _stack_users(
    path: Path, users: _Users, letters: str | None, shape: Sequence[int] | None
) -> _Part:
    if not users:
        raise QuiverError(f"{path} holds no examples.")
    owner = np.repeat(np.array(list(users)), [len(y) for _, y in users.values()])
    x, y = (
        _stack(path, [row for pair in users.values() for row in pair[i]], what)
        for i, what in enumerate(("x", "y"))
    )
    if letters is not None:
        x = _number_letters(path, x, letters)
    if shape is not None:
        x = _reshape(path, x, shape)
    if y.dtype.kind == "f" and np.array_equal(y, np.rint(y)):
        y = y.astype(np.int64)  # classes that were written as 3.0
    return _Part(x, y, owner)


def _stack(path: Path, rows: list[Any], what: str) -> AnyArray:
    try:
        array: AnyArray = np.array(rows)
    except ValueError as error:
        raise QuiverError(
            f"{path}: not every {what} has the same length: make a data set of it with code of "
            'your own, data.name = "module:function".'
        ) from error
    if array.dtype.kind not in "biufU" or (array.dtype.kind == "U" and array.ndim > 1):
        raise QuiverError(
            f"{path}: {what} is made of {type(rows[0]).__name__} with text or objects: the source "
            "leaf reads numbers and texts of one length; for others use code of your own, "
            'data.name = "module:function".'
        )
    return array


def _number_letters(path: Path, texts: AnyArray, letters: str) -> AnyArray:
    lengths = np.char.str_len(texts)
    if texts.ndim != 1 or len(set(lengths.tolist())) != 1 or not lengths[0]:
        raise QuiverError(
            f"{path}: texts of {int(lengths.min())} to {int(lengths.max())} characters: the source "
            "leaf reads texts of one length, as Shakespeare's lines; for others use code of your "
            'own, data.name = "module:function".'
        )
    codes = texts.view(np.uint32).reshape(len(texts), -1)[:, : lengths[0]]
    return np.searchsorted(np.array([ord(letter) for letter in letters]), codes).astype(np.int64)


def _reshape(path: Path, x: AnyArray, shape: Sequence[int]) -> AnyArray:
    size = int(np.prod(x.shape[1:]))
    if not all(isinstance(side, int) and side > 0 for side in shape) or np.prod(shape) != size:
        raise QuiverError(
            f"data.options.shape = {list(shape)}: an input of {path} has {size} numbers."
        )
    return x.reshape(len(x), *shape)


# FedScale.


MAPPING = "client_data_mapping"


def read_fedscale(
    path: Path,
    size: int | Sequence[int] | None = None,
    color: str = "rgb",
    test_share: float | None = None,
    classes: int | None = None,
) -> Dataset:
    """Images listed in client_data_mapping/train.csv and test.csv (or val.csv), by client.

    `size` and `color` are those of a folder of images. With `test_share` the list of test images is
    not used: every client's own training images are divided.
    """
    shape = check_image_options(size, color)
    lists = path / MAPPING if (path / MAPPING).is_dir() else path
    train = _read_mapping(path, lists / "train.csv")
    second = next((lists / f"{n}.csv" for n in TEST_LISTS if (lists / f"{n}.csv").exists()), None)
    test = None if second is None or test_share is not None else _read_mapping(path, second)
    used = [part for part in (train, test) if part is not None]
    parts = [
        _Part(decode_images(part.files, color, shape), part.labels, part.owners) for part in used
    ]
    notes = [] if second is None or test is not None else [f"{second} is not used."]
    dataset = _build(
        path, parts[0], parts[1] if len(parts) > 1 else None, test_share, notes, classes=classes
    )
    names, doubts = _name_classes(dataset.class_names, used)
    return replace(dataset, class_names=names, doubts=(*dataset.doubts, *doubts))


TEST_LISTS = ("test", "val", "validation")


@dataclass(frozen=True, eq=False)
class _Mapping:
    files: list[Path]
    labels: AnyArray
    owners: AnyArray
    names: dict[str, dict[str, str]]
    """Names of each label, and the place where each was first seen."""


def _read_mapping(root: Path, file: Path) -> _Mapping:
    if not file.is_file():
        raise QuiverError(
            f"{file} is missing: data.options.path is the folder of a data set of FedScale, which "
            f"has {MAPPING}/train.csv in it."
        )
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            reader = csv.reader(text)
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise QuiverError(f"{file} is no readable list ({error}): write it as UTF-8.") from error
    header = rows[0][1] if rows else []
    wanted = ("client_id", "sample_path", "label_id")
    if any(name not in header for name in wanted):
        raise QuiverError(
            f"{file}: its first line must name the columns {', '.join(wanted)}; it says "
            f"{', '.join(header) or 'nothing'}."
        )
    client, sample, label = (header.index(name) for name in wanted)
    called = header.index("label_name") if "label_name" in header else label
    files, labels, owners = [], [], []
    names: dict[str, dict[str, str]] = {}
    for line, row in rows[1:]:
        if len(row) != len(header) or not row[label].strip().isdigit():
            raise QuiverError(
                f"{file}, line {line}: it should have {len(header)} columns and a whole number as "
                f"label_id, not {','.join(row)[:60]!r}."
            )
        if not row[client].strip():
            raise QuiverError(f"{file}, line {line}: it has no client_id: say whose sample it is.")
        files.append(_find_sample(root, file, line, row[sample]))
        labels.append(int(row[label]))
        owners.append(row[client].strip())
        names.setdefault(str(labels[-1]), {}).setdefault(
            row[called].strip(), f"{file}, line {line}"
        )
    if not files:
        raise QuiverError(f"{file} lists no samples.")
    return _Mapping(files, np.array(labels, dtype=np.int64), np.array(owners), names)


def _find_sample(root: Path, file: Path, line: int, name: str) -> Path:
    """Find a sample below the data set's folder or the part's, like FedScale's loaders."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise QuiverError(
            f"{file}, line {line}: {name!r} leads out of {root}: sample_path is a place below it."
        )
    for place in (root / name, root / file.stem / name, root / "data" / name):
        if place.is_file():
            return place
    raise QuiverError(
        f"{file}, line {line}: there is no {root / name}, and none below {file.stem} or data: put "
        "the images where the list says."
    )


def _name_classes(
    numbers: tuple[str, ...], lists: Sequence[_Mapping]
) -> tuple[tuple[str, ...], list[str]]:
    """The names of the labels, unless two labels have one or one has two; what is doubtful."""
    known: dict[str, dict[str, str]] = {}
    for part in lists:
        for label, names in part.names.items():
            known.setdefault(label, {}).update({n: at for n, at in names.items() if n})
    doubts = []
    for label, names in known.items():
        if len(names) > 1:
            (one, first), (other, second) = list(names.items())[:2]
            doubts.append(
                f"label_id {label} is called {one!r} ({first}) and {other!r} ({second}): the "
                "numbers count, and classes go by them. Give every class a number of its own."
            )
            break
    first_names = tuple(next(iter(known.get(label, {})), label) for label in numbers)
    return (numbers if doubts or len(set(first_names)) < len(first_names) else first_names), doubts
