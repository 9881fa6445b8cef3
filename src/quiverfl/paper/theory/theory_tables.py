"""The findings as tables, for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Sequence

from quiverfl.paper.theory.connectivity import Connectivity
from quiverfl.paper.theory.conservation import Conservation, Mixing
from quiverfl.paper.theory.measure import Findings
from quiverfl.paper.theory.rate import Rate
from quiverfl.results.table_formats import Column, Table, TableCell

MINUS = "−"
_SCHEMES = (
    "push-sum: DFedPGP on random_push; pull: on random_pull, where rows sum to 1; "
    "push without μ: on random_push without de-biasing."
)
EXACT = 1e-12
"""Relative lengths below it are rounding."""


def all_tables(findings: Findings) -> tuple[Table, ...]:
    return (
        constants_table(findings),
        slope_table(findings.rate),
        rate_table(findings.rate),
        connectivity_table(findings.connectivity),
        mixing_table(findings.conservation),
        limit_table(findings.conservation),
    )


def constants_table(findings: Findings) -> Table:
    """The constants of the paper's assumptions, in the three experiments."""
    problems = (
        findings.rate.problem,
        findings.connectivity.problem,
        findings.conservation.limit_problem,
    )
    rows = (
        ("clients m", [f"{p.clients}" for p in problems]),
        ("dimension of u, of v", [f"{p.dimension}" for p in problems]),
        ("L_u", [f"{p.smooth_shared:g}" for p in problems]),
        ("L_v", [f"{p.smooth_personal:g}" for p in problems]),
        ("L_uv = L_vu", [f"{p.cross:.3g}" for p in problems]),
        ("χ", [f"{p.coupling:g}" for p in problems]),
        ("σ_u, σ_v", [f"{p.noise_shared:g}, {p.noise_personal:g}" for p in problems]),
        ("σ_g", [f"{p.diversity:g}" for p in problems]),
        ("F(ū¹, V¹) − F*", [f"{p.start_gap:.3g}" if not p.apart else "–" for p in problems]),
    )
    return _table(
        "Constants of the problems",
        ("constant", "rate", "connectivity", "conservation"),
        [(name, *values) for name, values in rows],
        "Quadratics, one stochastic step an epoch. σ² is the exact squared length of the noise in "
        "every stochastic gradient; σ_g is at the optimum.",
    )


def slope_table(rate: Rate) -> Table:
    rows = [
        (
            part.name,
            f"{part.rounds[0]} … {part.rounds[-1]}",
            signed(part.slope.value),
            f"{signed(part.slope.low)} … {signed(part.slope.high)}",
            signed(part.last_slope),
        )
        for part in rate.parts
    ]
    parts = "; ".join(f"{part.name}: {part.words}" for part in rate.parts[1:])
    return _table(
        "Slope of the average of Δ_ū/L_u + Δ_v/L_v against T, in logarithms",
        ("part", "T", "slope", "95 % interval", "last two T"),
        rows,
        f"The corollary's rate is {signed(-0.5)}. Alone: {parts}. Fitted for each of "
        f"{len(rate.parts[0].errors)} seeds; Student's interval over them. "
        f"η_u = {rate.scale:g}/(L_u K_u √T) and η_v = {rate.scale:g}/(L_v K_v √T) with "
        f"K_u = {rate.shared_steps}, K_v = {rate.personal_steps}, on random_push with "
        f"{rate.neighbors} neighbours.",
    )


def rate_table(rate: Rate) -> Table:
    whole = rate.parts[0]
    rows = []
    for place, rounds in enumerate(whole.rounds):
        values = [seed[place] for seed in whole.errors]
        mean = whole.means[place]
        rows.append(
            (
                f"{rounds:,}",
                f"{mean:.4f}",
                f"{min(values):.4f} … {max(values):.4f}",
                f"{mean * rounds**0.5:.3f}",
                "yes" if whole.allowed[place] else "no",
            )
        )
    return _table(
        "The average over T rounds",
        ("T", "average", "over seeds", "average · √T", "η_u allowed"),
        rows,
        "The fourth column is constant where the average falls exactly like 1/√T. η_u is allowed "
        "where it is below the theorem's δ/(4√2 L_u K_u), δ the smallest μ of these rounds.",
        words=0,
    )


def connectivity_table(found: Connectivity) -> Table:
    rows = [
        (
            row.label,
            f"{row.contraction:.3f}",
            f"{row.constant:.1f}",
            f"{row.smallest_mass:.3g}",
            f"{row.error:.4f}",
            f"{row.excess:.4f}",
            f"{row.disagreement:.4f}",
        )
        for row in found.rows
    ]
    return _table(
        f"The same {found.rounds} rounds on different graphs",
        ("graph", "q", "C", "δ", "error", "above full", "apart"),
        rows,
        "error: average of Δ_ū/L_u + Δ_v/L_v. apart: average of (1/m) Σ ‖z_i − ū‖². q and C "
        "are measured on the products of the matrices. Clients start apart. Rank correlation of q "
        f"and error: {found.rank_correlation:.2f}.",
    )


def mixing_table(found: Conservation) -> Table:
    columns = (
        Column("scheme", number=False),
        Column("1 round", above="ū moved by"),
        Column("all", above="ū moved by"),
        Column("their mean", above="clients end from"),
        Column("ū_0", above="clients end from"),
    )
    rows = [
        (
            mixing.label,
            _length(mixing.drift[0]),
            _length(mixing.drift[-1]),
            _length(mixing.disagreement),
            _length(mixing.distance),
        )
        for mixing in found.mixing
    ]
    return Table(
        f"{found.mixing_rounds} rounds of mixing, nobody trains",
        columns,
        tuple(tuple(TableCell(text) for text in row) for row in rows),
        "In units of how far apart the clients start; what clients use is z, or u where μ is "
        f"ignored. {_SCHEMES} {found.neighbors} neighbours, a new graph every round.",
    )


def limit_table(found: Conservation) -> Table:
    steps = list(dict.fromkeys(limit.step for limit in found.limits))
    columns = [Column("scheme and graph", number=False)]
    for above in ("‖ū − u*‖", "clients"):
        columns += [Column(f"{step:g}", above=above) for step in steps]
    rows = []
    for label in dict.fromkeys(limit.label for limit in found.limits):
        for static in (False, True):
            some = [x for x in found.limits if x.label == label and x.static == static]
            texts = [f"{label}, {'fixed' if static else 'new'}"]
            texts += [f"{limit.mean_distance:.3f}" for limit in some]
            texts += [f"{limit.client_distance:.2f}" for limit in some]
            rows.append(tuple(TableCell(text) for text in texts))
    return Table(
        f"Distance from the optimum after {found.limit_rounds} rounds without noise, by step",
        tuple(columns),
        tuple(rows),
        "The step is η_u L_u K_u = η_v L_v K_v. clients: root of the mean square of ‖z_i − u*‖, "
        "or of ‖u_i − u*‖ where μ is ignored. Averages over the last quarter of the rounds. "
        f"{_SCHEMES} {found.neighbors} neighbours, new in every round or fixed.",
    )


def conserved(mixing: Mixing) -> bool:
    """Whether ū stayed where it was but for rounding."""
    return max(mixing.drift) < EXACT


def signed(value: float) -> str:
    return f"{value:.3f}".replace("-", MINUS)


def _length(value: float) -> str:
    return "0" if value < EXACT else f"{value:.2g}" if value < 1e-3 else f"{value:.3f}"


def _table(
    title: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    caption: str,
    words: int = 1,
) -> Table:
    """The first `words` columns hold words, the others numbers."""
    return Table(
        title,
        tuple(Column(name, number=place >= words) for place, name in enumerate(columns)),
        tuple(tuple(TableCell(text) for text in row) for row in rows),
        caption,
    )
