"""A round's graph as a picture: clients on a circle with arrows, and the matrix beside it.

matplotlib is imported on the first call and without pyplot: no window, no global state.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from quiverfl.errors import QuiverError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from quiverfl.topologies.graph import Floats, Graph, Integers

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

    if isinstance(target, Axes):
        draw_circle(graph, target, highlight=highlight)
    else:
        _save(graph, target, title, highlight, format)


def _save(graph: Graph, target: Any, title: str, highlight: int | None, format: str | None) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if isinstance(target, str | Path):
        format = format or Path(target).suffix.lstrip(".").lower()
    if format not in FORMATS:
        raise QuiverError(
            f"picture {str(target)!r}: a file name ending in {', '.join('.' + f for f in FORMATS)} "
            "is needed."
        )
    figure = Figure(figsize=(11.6, 5.6), layout="constrained", facecolor="white")
    circle, matrix = figure.subplots(1, 2, width_ratios=(1, 1.06))
    draw_circle(graph, circle, highlight=highlight)
    draw_weights(graph, matrix)
    if title:
        figure.suptitle(title, color=_INK)
    # Without a date and with named ids the same graph is the same file.
    metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[format]
    try:
        with rc_context({"svg.hashsalt": "quiver"}):
            figure.savefig(target, format=format, dpi=150, metadata=metadata)
    except OSError as problem:
        raise QuiverError(f"picture {str(target)!r} could not be written: {problem}") from None


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
    ticks = _numbered(graph.clients)
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
        told = [(_OUT, f"client {highlight} sends", outgoing)]
        told += [(_IN, f"client {highlight} receives", incoming)]
        groups = [(color, text) for color, text, chosen in told if chosen.any()]
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
    for client in range(graph.clients) if inside else _numbered(graph.clients):
        x, y = places[client] * (1 if inside else 1.1)
        ink = _PALE if inside and graph.active[client] else _INK
        axes.text(x, y, str(client), color=ink, fontsize=7, ha="center", va="center", zorder=5)


def _numbered(clients: int) -> Integers:
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
