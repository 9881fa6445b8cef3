"""Tiny files in the official formats, for the tests of the readers."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from quiverfl.seeds import stream


def images(count: int, shape: tuple[int, ...] = (3, 32, 32), seed: int = 0) -> np.ndarray:
    return stream(seed, "test-images").integers(0, 256, (count, *shape), dtype=np.uint8)


def write_cifar10_binary(root: Path, per_file: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """The six files; all images and labels in order, training first."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    x, y = images(6 * per_file), np.arange(6 * per_file) % 10
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for number, name in enumerate(names):
        part = slice(number * per_file, (number + 1) * per_file)
        records = np.concatenate([y[part, None].astype(np.uint8), x[part].reshape(per_file, -1)], 1)
        (folder / name).write_bytes(records.tobytes())
    # The published file ends with an empty line.
    names_of_classes = "\n".join(f"class{label}" for label in range(10)) + "\n\n"
    (folder / "batches.meta.txt").write_text(names_of_classes)
    return x, y


def write_cifar10_python(root: Path, per_file: int = 4) -> tuple[np.ndarray, np.ndarray]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    x, y = images(6 * per_file), np.arange(6 * per_file) % 10
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        part = slice(number * per_file, (number + 1) * per_file)
        batch = {b"data": x[part].reshape(per_file, -1), b"labels": y[part].tolist()}
        write_pickle(folder / name, batch)
    write_pickle(folder / "batches.meta", {b"label_names": [b"class%d" % i for i in range(10)]})
    return x, y


def write_pickle(path: Path, value: Any) -> None:
    path.write_bytes(pickle.dumps(value, protocol=2))


def write_cifar100_binary(root: Path, count: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """train.bin and test.bin with `count` images each; coarse and fine labels of all."""
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    x = images(2 * count)
    fine = np.arange(2 * count) * 7 % 100
    coarse = fine // 5
    labels = np.stack([coarse, fine], 1).astype(np.uint8)
    records = np.concatenate([labels, x.reshape(len(x), -1)], 1)
    (folder / "train.bin").write_bytes(records[:count].tobytes())
    (folder / "test.bin").write_bytes(records[count:].tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)))
    (folder / "coarse_label_names.txt").write_text("\n".join(f"coarse{i}" for i in range(20)))
    return x, coarse, fine


def write_cifar100_python(root: Path, count: int = 6) -> tuple[np.ndarray, np.ndarray]:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    x, fine = images(2 * count), np.arange(2 * count) * 7 % 100
    for name, part in (("train", slice(0, count)), ("test", slice(count, None))):
        batch = {
            b"data": x[part].reshape(count, -1),
            b"fine_labels": fine[part].tolist(),
            b"coarse_labels": (fine[part] // 5).tolist(),
        }
        write_pickle(folder / name, batch)
    names = {
        b"fine_label_names": [b"fine%d" % i for i in range(100)],
        b"coarse_label_names": [b"coarse%d" % i for i in range(20)],
    }
    write_pickle(folder / "meta", names)
    return x, fine


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """12 training and 8 test images of 28×28, in that order."""
    folder.mkdir(parents=True)
    x, y = images(20, (28, 28)), np.arange(20) % 10
    for name, part in (("train", slice(0, 12)), ("t10k", slice(12, None))):
        for kind, array in (("images-idx3", x[part]), ("labels-idx1", y[part])):
            content = idx_bytes(array)
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return x, y


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Channels-first pixels as an image file; one channel is written as a grey image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    array = pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)
    Image.fromarray(array).save(path)


TINY_IDS = ("n02", "n01", "n03")


def write_tiny_imagenet(root: Path, train: int = 3, val: int = 2) -> Path:
    """Three classes; the first image of the first class is a grey JPEG."""
    folder = root / "tiny-imagenet-200"
    annotations = []
    for label, name in enumerate(sorted(TINY_IDS)):
        for i in range(train):
            channels = 1 if label == 0 and i == 0 else 3
            pixels = np.full((channels, 64, 64), 40 * label + 10 * i + 20, np.uint8)
            write_image(folder / "train" / name / "images" / f"{name}_{i}.JPEG", pixels)
        for i in range(val):
            file = f"val_{label * val + i}.JPEG"
            pixels = np.full((3, 64, 64), 40 * label + 5, np.uint8)
            write_image(folder / "val" / "images" / file, pixels)
            annotations.append(f"{file}\t{name}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(annotations))
    (folder / "wnids.txt").write_text("\n".join(TINY_IDS) + "\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tbullfrog\n")
    return folder
