"""MNIST and Fashion-MNIST: IDX files, gzipped or not.

An IDX file is a magic number (0, 0, type, number of sides), the sides as big-endian 32-bit numbers,
and the bytes.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from quiverfl.data.dataset import Dataset, Inputs, compute_channel_statistics
from quiverfl.data.sources.fetch import (
    check_labels,
    check_md5,
    fetch_again,
    fetch_remedy,
    read_file,
)
from quiverfl.errors import QuiverError
from quiverfl.types import Integers

CLASSES = 10
UNSIGNED_BYTE = 8

# Of the published .gz files, for the download.
MNIST = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
FASHION_MNIST = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
# Of the unpacked files, so that they are recognised however they were compressed: Debian's package
# dataset-fashion-mnist has the same bytes in other .gz files. Fashion-MNIST's were computed from
# that package; for both, projects that list the digest of the packed and the unpacked file agree.
MNIST_UNPACKED = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FASHION_MNIST_UNPACKED = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
DIGITS = tuple(str(digit) for digit in range(10))
CLOTHES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def read_mnist(folder: Path, verify: bool = True) -> Dataset:
    """60,000 + 10,000 handwritten digits of 28×28."""
    return _read(folder, "mnist", MNIST_UNPACKED, DIGITS, verify)


def read_fashion_mnist(folder: Path, verify: bool = True) -> Dataset:
    """60,000 + 10,000 pieces of clothing of 28×28."""
    return _read(folder, "fashion_mnist", FASHION_MNIST_UNPACKED, CLOTHES, verify)


def _read(
    folder: Path, name: str, md5: dict[str, str], class_names: tuple[str, ...], verify: bool
) -> Dataset:
    parts: list[tuple[Inputs, Integers]] = []
    for part in ("train", "t10k"):
        images_path, images = _load(folder, f"{part}-images-idx3-ubyte", 3, name, md5, verify)
        labels_path, labels = _load(folder, f"{part}-labels-idx1-ubyte", 1, name, md5, verify)
        if len(images) != len(labels) or not len(labels):
            raise QuiverError(
                f"{images_path} holds {len(images)} images and {labels_path} {len(labels)} labels; "
                "there must be equally many, and at least one."
            )
        check_labels(labels_path, int(labels.min()), int(labels.max()), CLASSES)
        parts.append((images[:, None], labels.astype(np.int64)))
    (train_x, train_y), (test_x, test_y) = parts
    mean, std = compute_channel_statistics(train_x)
    return Dataset(name, train_x, train_y, test_x, test_y, CLASSES, class_names, mean, std)


def _load(
    folder: Path, name: str, sides: int, source: str, md5: dict[str, str], verify: bool
) -> tuple[Path, Inputs]:
    raw, packed = folder / name, folder / f"{name}.gz"
    if raw.exists() or not packed.exists():
        return raw, _parse(raw, read_file(raw, f"{fetch_again(source, raw)}."), sides)
    try:
        content = gzip.decompress(read_file(packed))
    except (OSError, EOFError, zlib.error) as error:
        raise QuiverError(
            f"{packed} is truncated or damaged ({error}). {fetch_again(source, packed)}."
        ) from error
    array = _parse(packed, content, sides)
    if verify:
        check_md5(packed, content, md5[name], fetch_remedy(source, packed), unpacked=True)
    return packed, array


def _parse(path: Path, content: bytes, sides: int) -> Inputs:
    header = 4 + 4 * sides
    if content[:4] != bytes([0, 0, UNSIGNED_BYTE, sides]):
        raise QuiverError(f"{path} is not an IDX file of unsigned bytes with {sides} dimension(s).")
    if len(content) >= header:
        shape = struct.unpack(f">{sides}I", content[4:header])
        if len(content) == header + int(np.prod(shape, dtype=np.int64)):
            return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
    raise QuiverError(
        f"{path} is truncated: its {len(content)} bytes are not what its header announces."
    )
