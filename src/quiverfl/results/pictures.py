"""Pictures of a round's graph (circle and matrix) and of a partition (heat-map).

matplotlib is imported on the first call and without pyplot: there is no window and no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.results.run_files import RunResult
from quiverfl.support.output_folders import PICTURES, refuse_other_file
from quiverfl.topologies.analysis import ConnectivityReport, check_connectivity, graph_from_text
from quiverfl.topologies.graph import Graph
from quiverfl.types import Integers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from quiverfl.types import Floats, Integers


CLIENT_LIMIT = 400
FORMATS = ("png", "svg", "pdf")
_INK, _PALE, _QUIET = "#222222", "#FFFFFF", "#7F7F7F"
_OUT, _IN, _BOTH = "#D55E00", "#0072B2", "#117733"
_BEND = 0.07  # how far a directed link bows aside, so that a → b and b → a are two lines
_PULL = 0.3  # how far links bow to the centre, so that short ones do not run through the dots
_MARGIN = 1.2


def draw_graph(
    graph: Graph,
    target: str | Path | BinaryIO | Axes,
    *,
    title: str = "",
    highlight: int | None = None,
    format: str | None = None,
) -> None:
    """Draw a round: on given axes (the circle only), or into a file (circle and matrix).

    The links of one client stand out, since those of a hundred at once are no more than texture:
    of `highlight`, else of the first that trains. An open file needs a `format`: png, svg or pdf.
    """
    if graph.clients > CLIENT_LIMIT:
        raise QuiverError(
            f"a picture of {graph.clients} clients cannot be read; the limit is {CLIENT_LIMIT}. "
            "Draw the same topology with fewer clients."
        )
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    if isinstance(target, Axes):
        draw_circle(graph, target, highlight=highlight)
        return
    format = choose_format(target, format)
    figure = Figure(figsize=(11.6, 5.6), layout="constrained", facecolor="white")
    circle, matrix = figure.subplots(1, 2, width_ratios=(1, 1.06))
    draw_circle(graph, circle, highlight=highlight)
    draw_weights(graph, matrix)
    try:
        save_picture(figure, target, title, format)
    except OSError as problem:
        raise QuiverError(f"picture {str(target)!r} could not be written: {problem}") from None


def choose_format(target: str | Path | BinaryIO, format: str | None = None) -> str:
    """The format asked for, or that of the file's name."""
    if format is None and isinstance(target, str | Path):
        format = Path(target).suffix.lstrip(".").lower()
    if format not in FORMATS:
        endings = ", ".join(f".{known}" for known in FORMATS)
        raise QuiverError(f"picture {str(target)!r}: a file name ending in {endings} is needed.")
    return format


def save_picture(
    figure: Figure, target: str | Path | BinaryIO, title: str, format: str | None = None
) -> None:
    """Write a picture under its title. Pictures have matplotlib's style, not that of curves."""
    from quiverfl.results.figures import render_figure

    format = choose_format(target, format)
    if title:
        figure.suptitle(title, color=_INK)
    content = render_figure(figure, format, dpi=150, style={"svg.hashsalt": "quiver"})
    if isinstance(target, str | Path):
        if f".{format}" in PICTURES:
            refuse_other_file(Path(target), "--picture", PICTURES[f".{format}"])
        Path(target).write_bytes(content)
    else:
        target.write(content)


def draw_circle(graph: Graph, axes: Axes, *, highlight: int | None = None) -> None:
    """Clients on a circle, clockwise from the top, and an arrow from sender to receiver."""
    places = _circle(graph.clients)
    if graph.hub:
        _draw_star(graph, axes, places)
    else:
        first = int(np.argmax(graph.active)) if highlight is None else highlight
        _draw_links(graph, axes, places, first)
    _draw_clients(graph, axes, places)
    axes.set(xlim=(-_MARGIN, _MARGIN), ylim=(-_MARGIN, _MARGIN), aspect="equal")
    axes.axis("off")


def draw_weights(graph: Graph, axes: Axes) -> None:
    """The matrix as a heat-map: receivers down, senders across, nothing sent is white."""
    weights = np.ma.masked_equal(graph.weights, 0)
    image = axes.imshow(weights, cmap="YlGnBu", vmin=0, interpolation="nearest")
    axes.set_xlabel("sender", color=_INK)
    axes.set_ylabel("receiver", color=_INK)
    axes.set_title("weights[receiver, sender]", color=_INK, fontsize="medium")
    axes.spines[:].set_color(_QUIET)
    ticks = _choose_ticks(graph.clients)
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
    if axes.figure is not None:
        axes.figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)


def _circle(clients: int) -> Floats:
    angle = np.pi / 2 - 2 * np.pi * np.arange(clients) / clients
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def _radius(clients: int) -> float:
    """A client's dot, small enough that neighbours on the circle never touch."""
    return float(min(0.085, 0.8 * np.pi / clients))


def _draw_links(graph: Graph, axes: Axes, places: Floats, highlight: int) -> None:
    links = graph.sparse.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    receivers, senders = links.row[across].astype(np.int64), links.col[across].astype(np.int64)
    backward = set(zip(senders.tolist(), receivers.tolist(), strict=True))
    undirected = backward == {(receiver, sender) for sender, receiver in backward}
    outgoing, incoming = senders == highlight, receivers == highlight
    rest = ~(outgoing | incoming)
    alpha = float(np.clip(50 / max(1, rest.sum()), 0.13, 0.8))
    bend = 0.0 if undirected else _BEND
    size = _radius(graph.clients)

    def arrows(chosen: Any, color: str, alpha: float, width: float, order: int) -> None:
        ends = places[senders[chosen]], places[receivers[chosen]]
        _draw_arrows(axes, *ends, bend, size, not undirected, color, alpha, width, order)

    arrows(rest, _QUIET, alpha, 1.2 if rest.sum() <= 150 else 0.8, 1)
    if undirected:
        arrows(outgoing, _BOTH, 0.95, 1.4, 2)
        groups = [(_BOTH, f"links of client {highlight}")] if outgoing.any() else []
    else:
        arrows(incoming, _IN, 0.95, 1.4, 2)
        arrows(outgoing, _OUT, 0.95, 1.4, 3)
        kinds = [(_OUT, f"client {highlight} sends", outgoing)]
        kinds += [(_IN, f"client {highlight} receives", incoming)]
        groups = [(color, text) for color, text, chosen in kinds if chosen.any()]
    _legend(axes, groups)


def _draw_star(graph: Graph, axes: Axes, places: Floats) -> None:
    """Sampled clients and the server exchange one message each way."""
    sampled = places[graph.active]
    centre = np.zeros_like(sampled)
    size = _radius(graph.clients)
    _draw_arrows(axes, sampled, centre, 0.06, 0.09, True, _OUT, 0.9, 1.3, 2)
    _draw_arrows(axes, centre, sampled, 0.06, size, True, _IN, 0.9, 1.3, 2)
    axes.scatter([0], [0], s=520, marker="s", color=_INK, zorder=4)
    axes.text(0, 0, "server", color=_PALE, ha="center", va="center", fontsize=6.5, zorder=5)
    count = f"{len(sampled)} sampled clients"
    _legend(axes, [(_OUT, f"{count} send"), (_IN, "and receive the average")])


def _draw_arrows(
    axes: Axes,
    begin: Floats,
    end: Floats,
    bend: float,
    gap: float,
    heads: bool,
    color: str,
    alpha: float,
    width: float,
    order: int,
) -> None:
    """Curved lines that stop at the rim of the receiver's dot, with a head there."""
    from matplotlib.collections import LineCollection, PolyCollection

    if not len(begin):
        return
    curves = _curves(begin, end, bend)
    pixels = len(begin) > 400  # as shapes they would make an SVG of megabytes
    lines = LineCollection(list(curves), colors=color, alpha=alpha, linewidths=width)
    lines.set(zorder=order, rasterized=pixels)
    axes.add_collection(lines)
    if heads:
        shapes = _heads(curves, end, gap, size=0.03 * width**1.4)
        faces = PolyCollection(
            list(shapes), facecolors=color, edgecolors="none", alpha=min(1, 2 * alpha)
        )
        faces.set(zorder=order, rasterized=pixels)
        axes.add_collection(faces)


def _curves(begin: Floats, end: Floats, bend: float) -> Floats:
    """Quadratic curves [links, points, 2] that bow to the centre and, if directed, to one side."""
    across = end - begin
    pull = _PULL * np.minimum(1, np.linalg.norm(across, axis=1, keepdims=True) / 0.8)
    control = (1 - pull) * (begin + end) / 2 + bend * np.stack(
        [-across[:, 1], across[:, 0]], axis=1
    )
    s = np.linspace(0, 1, 33)[None, :, None]
    curves: Floats = (1 - s) ** 2 * begin[:, None] + s**2 * end[:, None]
    curves += 2 * s * (1 - s) * control[:, None]
    return curves


def _heads(curves: Floats, end: Floats, gap: float, size: float) -> Floats:
    """Triangles whose tips touch the receiver's dot."""
    arriving = end - curves[:, -4]
    arriving /= np.linalg.norm(arriving, axis=1, keepdims=True)
    tip = end - gap * arriving
    back = tip - size * arriving
    side = 0.38 * size * np.stack([-arriving[:, 1], arriving[:, 0]], axis=1)
    return np.stack([tip, back + side, back - side], axis=1)


def _draw_clients(graph: Graph, axes: Axes, places: Floats) -> None:
    """Dots: dark who trains, white with a grey rim who does not."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Circle

    size = _radius(graph.clients)
    dots = [Circle((x, y), size) for x, y in places]
    faces = [_INK if active else _PALE for active in graph.active]
    rims = [_INK if active else _QUIET for active in graph.active]
    axes.add_collection(PatchCollection(dots, facecolors=faces, edgecolors=rims, zorder=4))
    inside = graph.clients <= 30
    for client in range(graph.clients) if inside else _choose_ticks(graph.clients):
        x, y = places[client] * (1 if inside else 1.1)
        ink = _PALE if inside and graph.active[client] else _INK
        axes.text(x, y, str(client), color=ink, fontsize=7, ha="center", va="center", zorder=5)


def _choose_ticks(clients: int) -> Integers:
    """About ten clients to be named, at round distances."""
    step = next(s for s in (1, 2, 5, 10, 20, 50) if clients <= 10 * s or s == 50)
    return np.arange(0, clients, step)


def _legend(axes: Axes, groups: list[tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=color, linewidth=2, label=text) for color, text in groups]
    if lines:
        axes.legend(
            handles=lines,
            loc="lower center",
            bbox_to_anchor=(0.5, -0.04),
            ncols=2,
            frameon=False,
            fontsize=9,
        )


# Graphs that a run wrote down because they depend on its course.


def recorded_graphs(run: RunResult) -> list[Graph]:
    """The recorded graphs, by round; none if the topology does not depend on the run."""
    if "links" not in run.rounds:
        return []
    return [graph_from_text(text) for text in run.rounds["links"] if isinstance(text, str)]


def check_recorded_graphs(run: RunResult) -> ConnectivityReport | None:
    """Whether the union of consecutive graphs stayed strongly connected."""
    graphs = recorded_graphs(run)
    return check_connectivity(graphs) if graphs else None


# Who holds which classes, as a heat-map: clients across, classes down.


_BAR = "#4292A8"
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
    from matplotlib.figure import Figure

    if isinstance(target, Axes):
        draw_counts(counts, target, class_names)
        if title:
            target.set_title(title, color=_INK, fontsize="medium")
        return
    format = choose_format(target, format)
    clients, classes = counts.shape
    width, height = (
        float(np.clip(0.3 * clients, 7, 12)),
        float(np.clip(1.2 + 0.3 * classes, 3.2, 8)),
    )
    sizes = counts.sum(axis=1)
    equal = sizes.min() == sizes.max()
    figure = Figure(
        figsize=(width, height if equal else height + 1), layout="constrained", facecolor="white"
    )
    if equal:
        heat = figure.subplots()
    else:
        bars, heat = figure.subplots(2, 1, sharex=True, height_ratios=(1, height))
        _draw_sizes(sizes, bars)
    draw_counts(counts, heat, class_names)
    save_picture(figure, target, title, format)


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
