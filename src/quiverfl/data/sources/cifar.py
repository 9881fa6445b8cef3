"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), the binary and the Python version.

A binary record is one label byte (CIFAR-100: the coarse and then the fine label) and 3,072 bytes of
32×32 pixels, channel by channel.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core.multiarray import _reconstruct

from quiverfl.data.dataset import Dataset, Inputs, compute_channel_statistics
from quiverfl.data.sources.fetch import (
    check_labels,
    check_md5,
    fetch_again,
    fetch_remedy,
    read_file,
)
from quiverfl.errors import QuiverError, suggest
from quiverfl.types import Integers

# Pickles that can hold arrays, lists, dicts, numbers and text, and can do nothing.
#
# An ordinary pickle may run any program when it is loaded. The Python version of CIFAR needs four
# names, all harmless; anything else is refused.


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes in old pickles, as Python 3 writes them: text and the name of this one encoding."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def load_pickle(path: Path, content: bytes | None = None) -> Any:
    """The value in a pickle of Python 2 or 3, with its text as bytes where Python 2 wrote it."""
    content = read_file(path) if content is None else content
    try:
        return _Restricted(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise QuiverError(
            f"{path} is not a pickle of plain arrays ({error}): it is truncated, damaged or not "
            "what it claims to be, and was not loaded."
        ) from error
    except Exception as error:
        # Damaged pickles raise nearly anything; none of it is of use to a person.
        raise QuiverError(
            f"{path} is truncated or damaged ({type(error).__name__}: {error})."
        ) from error


SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class Release:
    """One published folder: its files with their md5 sums, and where the labels are in them."""

    name: str
    train: dict[str, str]
    test: dict[str, str]
    classes: int
    names_file: str
    label: int | str
    label_bytes: int = 0
    names_key: str = ""


BINARY_10 = Release(
    name="cifar10",
    train={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    },
    test={"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
    classes=10,
    names_file="batches.meta.txt",
    label=0,
    label_bytes=1,
)
PYTHON_10 = Release(
    name="cifar10",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    classes=10,
    names_file="batches.meta",
    label="labels",
    names_key="label_names",
)


def _binary_100(kind: str, classes: int, label: int) -> Release:
    return Release(
        name="cifar100",
        train={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
        test={"test.bin": "4499cfba6c016c1be1438163640a0898"},
        classes=classes,
        names_file=f"{kind}_label_names.txt",
        label=label,
        label_bytes=2,
    )


def _python_100(kind: str, classes: int) -> Release:
    return Release(
        name="cifar100",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        classes=classes,
        names_file="meta",
        label=f"{kind}_labels",
        names_key=f"{kind}_label_names",
    )


HUNDRED = {
    "fine": (_binary_100("fine", 100, 1), _python_100("fine", 100)),
    "coarse": (_binary_100("coarse", 20, 0), _python_100("coarse", 20)),
}


def read_cifar10(folder: Path, verify: bool = True) -> Dataset:
    """50,000 + 10,000 images of 10 classes; `verify` holds the files against their checksums."""
    return _read(folder, BINARY_10, PYTHON_10, verify)


def read_cifar100(folder: Path, verify: bool = True, labels: str = "fine") -> Dataset:
    """50,000 + 10,000 images of 100 classes, or of the 20 classes above them (`coarse`)."""
    if labels not in HUNDRED:
        raise QuiverError(f"data.options.labels = {labels!r}: {suggest(labels, HUNDRED)}")
    return _read(folder, *HUNDRED[labels], verify)


def _read(folder: Path, binary: Release, python: Release, verify: bool) -> Dataset:
    release = binary if any((folder / name).exists() for name in binary.train) else python
    train_x, train_y = _read_part(folder, release, release.train, verify)
    test_x, test_y = _read_part(folder, release, release.test, verify)
    names = _class_names(folder / release.names_file, release)
    mean, std = compute_channel_statistics(train_x)
    return Dataset(
        release.name, train_x, train_y, test_x, test_y, release.classes, names, mean, std
    )


def _read_part(
    folder: Path, release: Release, files: dict[str, str], verify: bool
) -> tuple[Inputs, Integers]:
    parts: list[tuple[Inputs, Integers]] = []
    for name, md5 in files.items():
        path = folder / name
        content = read_file(path, f"{fetch_again(release.name, path)}.")
        read = _read_binary if isinstance(release.label, int) else _read_python
        # First as records: a cut-off file is then called that, and not just a wrong checksum.
        images, labels = read(path, content, release)
        if verify:
            check_md5(path, content, md5, fetch_remedy(release.name, path))
        check_labels(path, int(labels.min()), int(labels.max()), release.classes)
        parts.append((images, labels.astype(np.int64)))
    return (
        np.concatenate([images for images, _ in parts]),
        np.concatenate([labels for _, labels in parts]),
    )


def _read_binary(path: Path, content: bytes, release: Release) -> tuple[Inputs, Integers]:
    record = release.label_bytes + PIXELS
    if not content or len(content) % record:
        raise QuiverError(
            f"{path} is truncated: {len(content)} bytes are not a whole number of records of "
            f"{record} bytes. {fetch_again(release.name, path)}."
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    assert isinstance(release.label, int)
    images = records[:, release.label_bytes :].reshape(-1, *SHAPE)
    return images, records[:, release.label].astype(np.int64)


def _read_python(path: Path, content: bytes, release: Release) -> tuple[Inputs, Integers]:
    batch = _as_dict(path, load_pickle(path, content))
    images, labels = batch.get("data"), batch.get(str(release.label))
    if not isinstance(images, np.ndarray) or not isinstance(labels, list) or not labels:
        raise QuiverError(f"{path} holds no 'data' and {release.label!r}: it is not a CIFAR batch.")
    if images.dtype != np.uint8 or images.shape != (len(labels), PIXELS):
        raise QuiverError(
            f"{path} holds {images.dtype} data of shape {list(images.shape)} for {len(labels)} "
            f"labels; a CIFAR batch has uint8 of shape [{len(labels)}, {PIXELS}]."
        )
    return images.reshape(-1, *SHAPE), np.asarray(labels, dtype=np.int64)


def _class_names(path: Path, release: Release) -> tuple[str, ...]:
    if not path.exists():
        return tuple(str(label) for label in range(release.classes))
    if release.names_key:
        listed = _as_dict(path, load_pickle(path)).get(release.names_key, [])
        names = [n.decode() if isinstance(n, bytes) else str(n) for n in listed]
    else:
        names = read_file(path).decode("utf-8", "replace").split()
    if len(names) != release.classes:
        raise QuiverError(
            f"{path} names {len(names)} classes; {release.name} has {release.classes}."
        )
    return tuple(names)


def _as_dict(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise QuiverError(f"{path} holds a {type(value).__name__}: it is not a CIFAR file.")
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in value.items()}
