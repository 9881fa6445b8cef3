"""Decoding image files into one array of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from quiverfl.data.dataset import Inputs
from quiverfl.errors import QuiverError

EXTENSIONS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
MODES = {"rgb": "RGB", "grey": "L"}
THREADS = 4


def image_files(folder: Path) -> list[Path]:
    """The images directly in a folder, by name; a folder without any is refused."""
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if not found:
        raise QuiverError(
            f"{folder} holds no images ({', '.join(sorted(EXTENSIONS))}): put some there, or "
            "remove the folder."
        )
    return found


def decode(
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


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """As RGB or grey bytes. Pillow would cut everything above 255 off deeper images."""
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
            image = in_mode(opened, MODES[color])
    except Exception as error:
        # Pillow's decoders raise many kinds of errors on damaged files; the file is what matters.
        raise QuiverError(
            f"{path} is not a readable image ({error}): replace or remove it."
        ) from error
    if size is not None and image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
