"""The findings as pictures. Each `draw_…` fills one axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from quiverfl.paper.theory.experiments import (
    EXACT,
    Connectivity,
    Conservation,
    Findings,
    GraphRow,
    Rate,
    RatePart,
)
from quiverfl.results.figures import make_panels
from quiverfl.results.formatting import MINUS

INK = "#444444"
PART_COLORS = {
    "everything": "#D55E00",
    "start": "#0072B2",
    "noise": "#009E73",
    "diversity": "#CC79A7",
}
SCHEME_COLORS = ("#D55E00", "#0072B2", "#009E73")
GRAPH_COLORS = matplotlib.colormaps["viridis"]
NEW = (0, (4, 2.5))
"""The dashes of what is on a new graph every round."""
Draw = Callable[[Axes], None]


def rate_figure(findings: Findings) -> Figure:
    rate = findings.rate
    return join_panels(
        [
            ("All together: the fitted slope", lambda axes: draw_fit(axes, rate.parts[0])),
            ("The sources one by one", lambda axes: draw_parts(axes, rate)),
        ]
    )


def connectivity_figure(findings: Findings) -> Figure:
    connectivity = findings.connectivity
    return join_panels(
        [
            (
                "How far clients are apart (colours as beside)",
                lambda axes: draw_courses(axes, connectivity),
            ),
            ("What slow mixing costs", lambda axes: draw_excess(axes, connectivity)),
        ]
    )


def _scheme_key(conservation: Conservation) -> list[Line2D]:
    """Colours are schemes, dashes tell new graphs from a fixed one."""
    schemes = [
        Line2D([], [], color=color, label=mixing.label)
        for mixing, color in zip(conservation.mixing, SCHEME_COLORS, strict=True)
    ]
    graphs = [
        Line2D([], [], color=INK, linestyle=NEW, label="a new graph every round"),
        Line2D([], [], color=INK, label="one fixed graph"),
    ]
    return schemes + graphs


def conservation_figure(findings: Findings) -> Figure:
    conservation = findings.conservation
    return join_panels(
        [
            ("Mixing alone: the mean over clients", lambda axes: draw_drift(axes, conservation)),
            (
                "Training: how far ū ends from u*",
                lambda axes: draw_limits(axes, conservation, "mean"),
            ),
            ("… and what the clients use", lambda axes: draw_limits(axes, conservation, "client")),
        ],
        _scheme_key(conservation),
    )


def join_panels(panels: Sequence[tuple[str, Draw]], key: Sequence[Line2D] = ()) -> Figure:
    """Panels next to each other, with a common key below them."""
    width = 5.3 * len(panels) if len(panels) < 3 else 14.2
    return make_panels([panels], (width, 4.3 if key else 4.0), key, gridspec_kw={"wspace": 0.08})


def format_signed(value: float) -> str:
    return f"{value:.3f}".replace("-", MINUS)


def draw_fit(axes: Axes, part: RatePart) -> None:
    """Every seed as a point, the fit, and a line of slope -1/2 through the last mean."""
    rounds, color = np.array(part.rounds, dtype=float), PART_COLORS[part.name]
    axes.plot(
        rounds,
        part.means[-1] * np.sqrt(rounds[-1] / rounds),
        color=INK,
        linewidth=1.1,
        linestyle=(0, (5, 3)),
        label="slope −1/2, through the last point",
    )
    for errors in part.errors:
        axes.scatter(rounds, errors, s=26, color=color, alpha=0.55, linewidths=0, zorder=3)
    level = np.log(part.means).mean() - part.slope.value * np.log(rounds).mean()
    value, low, high = map(format_signed, (part.slope.value, part.slope.low, part.slope.high))
    axes.plot(
        rounds,
        np.exp(level) * rounds**part.slope.value,
        color=color,
        label=f"fit: {value} ({low} … {high})",
    )
    _log_rounds(axes, part.rounds)
    axes.set_ylabel("average of Δ_ū/L_u + Δ_v/L_v over T rounds")
    axes.legend(loc="upper right")


def draw_parts(axes: Axes, rate: Rate) -> None:
    for part in rate.parts:
        label = part.name if part.name == "everything" else f"{part.name} alone"
        axes.plot(
            part.rounds,
            part.means,
            color=PART_COLORS[part.name],
            marker="o",
            markersize=4.5,
            label=f"{label}: {format_signed(part.slope.value)}",
        )
    _log_rounds(axes, rate.parts[0].rounds)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 5, high)
    axes.set_ylabel("average of Δ_ū/L_u + Δ_v/L_v over T rounds")
    axes.legend(loc="lower left", fontsize="small")


def draw_courses(axes: Axes, connectivity: Connectivity) -> None:
    """The disagreement round by round; on the full graph there is none after the first."""
    shown = [row for row in connectivity.rows if max(row.course) > EXACT]
    for row, color in zip(shown, _colors(len(connectivity.rows)), strict=False):
        rounds = np.arange(1, len(row.course) + 1)
        axes.plot(rounds, row.course, color=color, linewidth=1.4)
    axes.set_yscale("log")
    _powers(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rounds")
    axes.set_ylabel("(1/m) Σ ‖z_i − ū‖²")


def draw_excess(axes: Axes, connectivity: Connectivity) -> None:
    """Error above that on the full graph, which contracts at once, against q."""
    shown = [row for row in connectivity.rows if row.excess > 0]
    for row, color in zip(shown, _colors(len(connectivity.rows)), strict=False):
        axes.scatter(row.contraction, row.excess, s=48, color=color, zorder=3, linewidths=0)
        _name_point(axes, row)
    axes.set_yscale("log")
    low, high = min(row.excess for row in shown), max(row.excess for row in shown)
    axes.set_ylim(low / 2, high * 2.5)
    _plain_numbers(axes)
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("contraction q of the graph, measured")
    axes.set_ylabel("error above that on the full graph")


def _name_point(axes: Axes, row: GraphRow) -> None:
    edge = row.contraction > 0.9
    axes.annotate(
        row.label,
        (row.contraction, row.excess),
        xytext=(-9, 0) if edge else (0, 11),
        textcoords="offset points",
        ha="right" if edge else "center",
        va="center",
        fontsize="small",
        color=INK,
    )


def draw_drift(axes: Axes, conservation: Conservation) -> None:
    """How far ū has moved; on a logarithmic axis rounding has a place of its own."""
    floor = 1e-17
    for mixing, color, width in zip(
        conservation.mixing, SCHEME_COLORS, (5.0, 1.7, 1.7), strict=True
    ):
        rounds = np.arange(1, len(mixing.drift) + 1)
        drift = np.maximum(mixing.drift, floor)
        wide = width > 2  # two schemes have the same u: one shows on both sides of the other
        axes.plot(rounds, drift, color=color, linewidth=width, alpha=0.45 if wide else 1)
    axes.set_yscale("log")
    axes.set_ylim(floor, 30)
    _powers(axes, every=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("rounds")
    axes.set_ylabel("‖ū_t − ū_0‖ / spread of the clients")


def draw_limits(axes: Axes, conservation: Conservation, whose: str) -> None:
    """Distance from the optimum against the step: to zero with it, or to something else."""
    schemes = [mixing.label for mixing in conservation.mixing]
    for label, color in zip(schemes, SCHEME_COLORS, strict=True):
        for static, dashes in ((True, "-"), (False, NEW)):
            matching = [x for x in conservation.limits if x.label == label and x.static == static]
            values = [x.mean_distance if whose == "mean" else x.client_distance for x in matching]
            steps = [x.step for x in matching]
            axes.plot(steps, values, color=color, linestyle=dashes, marker="o", markersize=4.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(
        FixedLocator(sorted({limit.step for limit in conservation.limits}))
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _plain_numbers(axes)
    axes.set_xlabel("step η_u L_u K_u")
    axes.set_ylabel("‖ū − u*‖" if whose == "mean" else "clients’ ‖z_i − u*‖")


def _colors(count: int) -> list[tuple[float, float, float, float]]:
    """From the worst graph to the best."""
    return [GRAPH_COLORS(0.92 * place / max(1, count - 1)) for place in range(count)]


def _log_rounds(axes: Axes, rounds: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(rounds)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    _plain_numbers(axes)
    axes.set_xlabel("rounds T")


def _plain_numbers(axes: Axes) -> None:
    """Numbers on a logarithmic axis, the more the shorter it is."""
    low, high = axes.get_ylim()
    subs = (1, 2, 3, 4, 6) if high < 8 * low else (1, 2, 5) if high < 800 * low else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _powers(axes: Axes, every: int = 1) -> None:
    axes.yaxis.set_major_locator(LogLocator(base=10.0**every, numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.yaxis.set_minor_locator(NullLocator())


def _power(value: float) -> str:
    """10⁻⁴ without a formula."""
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return f"10{str(round(np.log10(value))).translate(raised)}"
