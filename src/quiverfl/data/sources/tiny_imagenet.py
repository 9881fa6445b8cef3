"""Tiny-ImageNet-200 as it is published: one folder per class, and a list for the validation part.

    wnids.txt                                the classes, by WordNet id
    words.txt                                what the ids mean
    train/<id>/images/*.JPEG
    val/images/*.JPEG, val/val_annotations.txt

The published test images have no labels, so the validation part is the test set here. Part of the
tree is enough, as long as every class of wnids.txt is there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quiverfl.data.dataset import Dataset, Inputs, Integers, channel_statistics
from quiverfl.data.sources.file_checks import read_file
from quiverfl.data.sources.images import decode, image_files
from quiverfl.errors import QuiverError


def read_tiny_imagenet(folder: Path) -> Dataset:
    """64×64 images; classes are numbered in the order of their sorted WordNet ids."""
    ids = _classes(folder)
    train_x, train_y = _train(folder, ids)
    test_x, test_y = _validation(folder, ids)
    mean, std = channel_statistics(train_x)
    names = _class_names(folder, ids)
    return Dataset("tiny_imagenet", train_x, train_y, test_x, test_y, len(ids), names, mean, std)


def _classes(folder: Path) -> list[str]:
    train = folder / "train"
    if not train.is_dir():
        raise QuiverError(f"{train} is missing: it should hold one folder per class.")
    found = {path.name for path in train.iterdir() if path.is_dir()}
    listed = set(read_file(folder / "wnids.txt").decode().split())
    for name in sorted(listed ^ found):
        other = "wnids.txt does not list it" if name in found else "that folder is missing"
        raise QuiverError(
            f"{folder / 'wnids.txt'} lists {len(listed)} classes and {train} holds {len(found)}: "
            f"{train / name}: {other}."
        )
    if not found:
        raise QuiverError(f"{train} is empty: it should hold one folder per class.")
    return sorted(found)


def _train(folder: Path, ids: list[str]) -> tuple[Inputs, Integers]:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(ids):
        images = folder / "train" / name / "images"
        if not images.is_dir():
            raise QuiverError(f"{images} is missing: it should hold the images of the class.")
        files = image_files(images)
        paths += files
        labels += [label] * len(files)
    return decode(paths), np.array(labels, dtype=np.int64)


def _validation(folder: Path, ids: list[str]) -> tuple[Inputs, Integers]:
    annotations = folder / "val" / "val_annotations.txt"
    number = {name: label for label, name in enumerate(ids)}
    paths: list[Path] = []
    labels: list[int] = []
    for line, text in enumerate(read_file(annotations).decode().splitlines(), start=1):
        fields = text.split("\t")
        if len(fields) < 2 or fields[1] not in number:
            raise QuiverError(
                f"{annotations}, line {line}: {text[:60]!r} is not an image and a class of "
                "wnids.txt."
            )
        paths.append(folder / "val" / "images" / fields[0])
        labels.append(number[fields[1]])
    if not paths:
        raise QuiverError(f"{annotations} is empty: it should list the validation images.")
    return decode(paths), np.array(labels, dtype=np.int64)


def _class_names(folder: Path, ids: list[str]) -> tuple[str, ...]:
    words: dict[str, str] = {}
    if (folder / "words.txt").exists():
        for line in read_file(folder / "words.txt").decode("utf-8", "replace").splitlines():
            name, _, meaning = line.partition("\t")
            words[name] = meaning.split(",")[0].strip()
    return tuple(words.get(name) or name for name in ids)
