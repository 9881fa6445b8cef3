"""Who holds which classes, as a heat-map: clients across, classes down.

matplotlib is imported on the first call and without pyplot: no window, no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from quiverfl.errors import QuiverError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Integers = npt.NDArray[np.int64]

FORMATS = ("png", "svg", "pdf")
_INK, _QUIET, _BAR = "#222222", "#7F7F7F", "#4292A8"
_ON_LIGHT, _ON_DARK = "#232323", "#FEFEFE"
"""Numbers in cells. Like the cells, and unlike all else, they are the same on a dark page."""
_NAMED_CLASSES = 24
_NUMBERED_CLIENTS = 20


def draw_partition(
    counts: Integers,
    target: str | Path | BinaryIO | Axes,
    *,
    title: str = "",
    class_names: Sequence[str] | None = None,
    format: str | None = None,
) -> None:
    """Draw counts [clients, classes]: on given axes (the map alone), or into a file.

    In a file the sizes of the clients stand above the map where they differ. An open file
    needs a `format`: png, svg or pdf.
    """
    from matplotlib.axes import Axes

    if isinstance(target, Axes):
        draw_counts(counts, target, class_names)
        if title:
            target.set_title(title, color=_INK, fontsize="medium")
    else:
        _save(counts, target, title, class_names, format)


def _save(
    counts: Integers,
    target: Any,
    title: str,
    class_names: Sequence[str] | None,
    format: str | None,
) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if isinstance(target, str | Path):
        format = format or Path(target).suffix.lstrip(".").lower()
    if format not in FORMATS:
        raise QuiverError(
            f"picture {str(target)!r}: a file name ending in {', '.join('.' + f for f in FORMATS)} "
            "is needed."
        )
    clients, classes = counts.shape
    size = (float(np.clip(0.3 * clients, 7, 12)), float(np.clip(1.2 + 0.3 * classes, 3.2, 8)))
    sizes = counts.sum(axis=1)
    if sizes.min() == sizes.max():
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        heat = figure.subplots()
    else:
        figure = Figure(figsize=(size[0], size[1] + 1), layout="constrained", facecolor="white")
        bars, heat = figure.subplots(2, 1, sharex=True, height_ratios=(1, size[1]))
        _draw_sizes(sizes, bars)
    draw_counts(counts, heat, class_names)
    if title:
        figure.suptitle(title, color=_INK)
    # Without a date and with named ids the same partition is the same file.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[format]
    with rc_context({"svg.hashsalt": "quiver"}):
        figure.savefig(target, format=format, dpi=150, metadata=metadata)


def draw_counts(
    counts: Integers, axes: Axes, class_names: Sequence[str] | None = None, numbers: bool = True
) -> None:
    """The heat-map; a class that a client does not have is white.

    The colour follows the square root of the number, so that a few examples can still be seen
    beside hundreds.
    """
    from matplotlib.colors import PowerNorm

    clients, classes = counts.shape
    shown = np.ma.masked_equal(counts.T, 0)
    scale = PowerNorm(0.5, vmin=0, vmax=max(1, int(counts.max())))
    image = axes.imshow(shown, cmap="YlGnBu", norm=scale, aspect="auto", interpolation="nearest")
    axes.set_xlabel("client", color=_INK)
    axes.set_ylabel("class", color=_INK)
    axes.set_xticks(_ticks(clients))
    axes.spines[:].set_color(_QUIET)
    axes.tick_params(colors=_INK, length=2)
    if class_names is not None and classes <= _NAMED_CLASSES:
        axes.set_yticks(range(classes), [name[:18] for name in class_names])
    else:
        axes.set_yticks(range(classes) if classes <= _NAMED_CLASSES else _ticks(classes))
    if numbers and clients <= _NUMBERED_CLIENTS and classes <= _NAMED_CLASSES:
        _write_numbers(counts, axes)
    if axes.figure is not None:
        bar = axes.figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015, aspect=30)
        bar.set_label("training examples", color=_INK)
        bar.outline.set_edgecolor(_QUIET)


def _write_numbers(counts: Integers, axes: Axes) -> None:
    dark = 0.36 * counts.max()
    for client, label in zip(*np.nonzero(counts), strict=True):
        count = int(counts[client, label])
        color = _ON_DARK if count > dark else _ON_LIGHT
        axes.text(client, label, str(count), color=color, ha="center", va="center", fontsize=6.5)


def _draw_sizes(sizes: Integers, axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    # One outline instead of a bar each: with a thousand clients that is seconds.
    axes.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, fill=True, color=_BAR)
    axes.set_ylabel("size", color=_INK)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color(_QUIET)
    axes.tick_params(colors=_INK, length=2, labelbottom=False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=2))


def _ticks(count: int) -> Integers:
    """About ten places to be numbered, at round distances."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if count <= 20 * s)
    return np.arange(0, count, step)
