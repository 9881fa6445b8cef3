"""Decoding image files into one array of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from quiverfl.data.dataset import Dataset, Inputs, compute_channel_statistics
from quiverfl.data.sources.arrays import from_arrays, split_train_test
from quiverfl.data.sources.fetch import read_file
from quiverfl.errors import QuiverError, suggest
from quiverfl.types import Integers

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
MODES = {"rgb": "RGB", "grey": "L"}
LAYOUTS = ("class", "owner/class", "class/owner")
THREADS = 4


def image_files(folder: Path) -> list[Path]:
    """The images directly in a folder, by name; a folder without any is refused."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if not files:
        deeper = any(path.is_dir() for path in folder.iterdir())
        remedy = (
            'set data.options.layout = "owner/class" or "class/owner" if folders are two deep'
            if deeper
            else "put some there, or remove the folder"
        )
        raise QuiverError(f"{folder} holds no images ({', '.join(sorted(EXTENSIONS))}): {remedy}.")
    return files


def decode_images(
    paths: Sequence[Path], color: str = "rgb", size: tuple[int, int] | None = None
) -> Inputs:
    """All images as uint8 [n, channels, height, width]; resized to (height, width) if given.

    Grey images become RGB where colour is asked for. Decoding lets go of Python's lock, so a few
    threads share it.
    """
    if not paths:
        raise QuiverError("there are no images to read.")
    first = _decode(paths[0], color, size)
    images = np.empty((len(paths), *first.shape), dtype=np.uint8)

    def place(number: int) -> None:
        image = _decode(paths[number], color, size)
        if image.shape != first.shape:
            raise QuiverError(
                f"{paths[number]} is {image.shape[1]}×{image.shape[2]}, {paths[0]} is "
                f"{first.shape[1]}×{first.shape[2]} (height × width): set data.options.size to "
                "bring all images to one size."
            )
        images[number] = image

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for _ in pool.map(place, range(len(paths))):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return images


def convert_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to RGB or grey bytes. Pillow would clip deeper images at 255."""
    if image.mode.startswith("I;16"):
        deep = np.asarray(image).astype(np.uint16)
        image = Image.fromarray((deep // 257).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise QuiverError(
            f"its pixels are {'32-bit integers' if image.mode == 'I' else 'floats'} of an unknown "
            "range; save it with 8 or 16 bits"
        )
    return image.convert(mode)


def _decode(path: Path, color: str, size: tuple[int, int] | None) -> Inputs:
    try:
        with Image.open(path) as opened:
            image = convert_mode(opened, MODES[color])
    except Exception as error:
        # Pillow's decoders raise many kinds of errors on damaged files; the file is what matters.
        raise QuiverError(
            f"{path} is not a readable image ({error}): replace or remove it."
        ) from error
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


# Your own images: a folder per class, either below train/ and test/ or in one tree to split.


def read_folder(
    path: Path,
    size: int | Sequence[int] | None = None,
    color: str = "rgb",
    test_share: float = 0.2,
    classes: int | None = None,
    layout: str = "class",
) -> Dataset:
    """`size` brings all images to one size: a side, or (height, width). `color`: rgb or grey.

    `layout` says what the folders are: "class", or "owner/class" or "class/owner" where they are
    two deep.
    """
    shape = check_image_options(size, color)
    if layout not in LAYOUTS:
        raise QuiverError(f"data.options.layout = {layout!r}: {suggest(layout, LAYOUTS)}")
    if layout != "class":
        return _read_owned(path, layout, shape, color, test_share, classes)
    if (path / "train").is_dir():
        names = _folder_classes(path / "train", classes)
        train_x, train_y = _read(path / "train", names, color, shape)
        test_x, test_y = _read_test(path, names, color, shape)
    else:
        names = _folder_classes(path, classes)
        x, y = _read(path, names, color, shape)
        train, test = split_train_test(y, test_share)
        train_x, train_y, test_x, test_y = x[train], y[train], x[test], y[test]
    mean, std = compute_channel_statistics(train_x)
    return Dataset(path.name, train_x, train_y, test_x, test_y, len(names), names, mean, std)


def check_image_options(size: int | Sequence[int] | None, color: str) -> tuple[int, int] | None:
    """The size that all images are brought to, (height, width)."""
    if color not in MODES:
        raise QuiverError(f"data.options.color = {color!r}: {suggest(color, MODES)}")
    return _check_size(size)


def _read_owned(
    path: Path,
    layout: str,
    size: tuple[int, int] | None,
    color: str,
    test_share: float,
    classes: int | None,
) -> Dataset:
    """Folders two deep: of owners and classes, or of classes and owners."""
    split = (path / "train").is_dir()
    parts = [_list_owned(path / "train" if split else path, layout)]
    if split:
        parts.append(_list_owned(_find_test(path), layout))
    x = [decode_images([file for file, _, _ in files], color, size) for files in parts]
    y, owners = ([np.array([one[i] for one in files]) for files in parts] for i in (1, 2))
    if not split:
        train, test = split_train_test(owners[0], test_share)
        x, y, owners = ([part[0][train], part[0][test]] for part in (x, y, owners))
    new = sorted(set(y[1]) - set(y[0]))
    if new:
        raise QuiverError(f"{path}: the class {new[0]} is in the test images alone.")
    pairs = (x[0], y[0]), (x[1], y[1])
    return from_arrays(path.name, str(path), *pairs, (owners[0], owners[1]), classes)


def _list_owned(folder: Path, layout: str) -> list[tuple[Path, str, str]]:
    """Every image with its class and its owner."""
    files = []
    for outer in _folder_classes(folder, None):
        for inner in _folder_classes(folder / outer, None):
            label, owner = (inner, outer) if layout == "owner/class" else (outer, inner)
            files += [(file, label, owner) for file in image_files(folder / outer / inner)]
    return files


def _check_size(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1:
        raise QuiverError(f"data.options.size = {size}: give one side, or height and width.")
    return sides[0], sides[1]


def _folder_classes(folder: Path, classes: int | None) -> tuple[str, ...]:
    if not folder.is_dir():
        raise QuiverError(f"{folder} is not a folder: it should hold one folder per class.")
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise QuiverError(
            f"{folder} {_list_contents(folder)}: it should hold one folder of images per class."
        )
    if classes is not None and len(names) != classes:
        raise QuiverError(
            f"{folder} holds {len(names)} classes, not data.options.classes = {classes}: "
            f"{', '.join(names[:10])}{', …' if len(names) > 10 else ''}."
        )
    return tuple(names)


def _list_contents(folder: Path) -> str:
    """Say what lies in a folder that has no folders."""
    files = sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))
    if not files:
        return "is empty"
    images = [name for name in files if Path(name).suffix.lower() in EXTENSIONS]
    kind, names = ("image", images) if images else ("file", files)
    several = "s" if len(names) > 1 else ""
    first = ", ".join([*names[:2], *(["…"] if len(names) > 2 else [])])
    return f"holds {len(names):,} {kind}{several} ({first}) and no folders"


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
    return decode_images(paths, color, size), np.array(labels, dtype=np.int64)


def _find_test(path: Path) -> Path:
    folder = next((path / part for part in ("test", "val") if (path / part).is_dir()), None)
    if folder is None:
        raise QuiverError(
            f"{path} has a train folder but neither test nor val: add one, or put what is in train "
            "directly there to have it split."
        )
    return folder


def _read_test(
    path: Path, names: Sequence[str], color: str, size: tuple[int, int] | None
) -> tuple[Inputs, Integers]:
    folder = _find_test(path)
    for name in _folder_classes(folder, None):
        if name not in names:
            raise QuiverError(
                f"{folder / name} is a class that {path / 'train'} does not have: there are "
                f"{len(names)} classes."
            )
    return _read(folder, names, color, size)


# Tiny-ImageNet-200 as it is published: one folder per class, and a list for the validation part.
#
#     wnids.txt                                the classes, by WordNet id
#     words.txt                                what the ids mean
#     train/<id>/images/*.JPEG
#     val/images/*.JPEG, val/val_annotations.txt
#
# The published test images have no labels, so the validation part is the test set here. Part of
# the tree is enough, as long as every class of wnids.txt is there.


def read_tiny_imagenet(folder: Path) -> Dataset:
    """64×64 images; classes are numbered in the order of their sorted WordNet ids."""
    ids = _read_class_ids(folder)
    train_x, train_y = _read_training(folder, ids)
    test_x, test_y = _read_validation(folder, ids)
    mean, std = compute_channel_statistics(train_x)
    names = _read_class_names(folder, ids)
    return Dataset("tiny_imagenet", train_x, train_y, test_x, test_y, len(ids), names, mean, std)


def _read_class_ids(folder: Path) -> list[str]:
    train = folder / "train"
    if not train.is_dir():
        raise QuiverError(f"{train} is missing: it should hold one folder per class.")
    folders = {path.name for path in train.iterdir() if path.is_dir()}
    listed = set(read_file(folder / "wnids.txt").decode().split())
    for name in sorted(listed ^ folders):
        other = "wnids.txt does not list it" if name in folders else "that folder is missing"
        raise QuiverError(
            f"{folder / 'wnids.txt'} lists {len(listed)} classes and {train} holds {len(folders)}: "
            f"{train / name}: {other}."
        )
    if not folders:
        raise QuiverError(f"{train} is empty: it should hold one folder per class.")
    return sorted(folders)


def _read_training(folder: Path, ids: list[str]) -> tuple[Inputs, Integers]:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(ids):
        images = folder / "train" / name / "images"
        if not images.is_dir():
            raise QuiverError(f"{images} is missing: it should hold the images of the class.")
        files = image_files(images)
        paths += files
        labels += [label] * len(files)
    return decode_images(paths), np.array(labels, dtype=np.int64)


def _read_validation(folder: Path, ids: list[str]) -> tuple[Inputs, Integers]:
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
    return decode_images(paths), np.array(labels, dtype=np.int64)


def _read_class_names(folder: Path, ids: list[str]) -> tuple[str, ...]:
    words: dict[str, str] = {}
    if (folder / "words.txt").exists():
        for line in read_file(folder / "words.txt").decode("utf-8", "replace").splitlines():
            name, _, meaning = line.partition("\t")
            words[name] = meaning.split(",")[0].strip()
    return tuple(words.get(name) or name for name in ids)
