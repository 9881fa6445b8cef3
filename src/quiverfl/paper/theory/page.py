"""The findings in words, tables and files: one page that needs nothing else, pictures, numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from quiverfl.paper.theory.experiments import (
    EXACT,
    Connectivity,
    Conservation,
    Findings,
    Mixing,
    Rate,
    StepRow,
)
from quiverfl.paper.theory.figures import (
    connectivity_figure,
    conservation_figure,
    format_signed,
    rate_figure,
)
from quiverfl.results.figures import save_figure
from quiverfl.results.formatting import (
    Column,
    Table,
    TableCell,
    write_result_file,
    write_tables,
)
from quiverfl.results.report.html import (
    Markup,
    data_table,
    inline_svg,
    lead_paragraph,
    make_page,
    section,
    tag,
)
from quiverfl.support.output_folders import list_contents, refuse_foreign

_SCHEMES = (
    "push-sum: DFedPGP on random_push; pull: on random_pull, where rows sum to 1; "
    "push without μ: on random_push without de-biasing."
)


def all_tables(findings: Findings) -> tuple[Table, ...]:
    return (
        constants_table(findings),
        slope_table(findings.rate),
        rate_table(findings.rate),
        connectivity_table(findings.connectivity),
        mixing_table(findings.conservation),
        limit_table(findings.conservation),
        step_table(findings.steps),
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
    return _text_table(
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
            format_signed(part.slope.value),
            f"{format_signed(part.slope.low)} … {format_signed(part.slope.high)}",
            format_signed(part.last_slope),
        )
        for part in rate.parts
    ]
    parts = "; ".join(f"{part.name}: {part.words}" for part in rate.parts[1:])
    return _text_table(
        "Slope of the average of Δ_ū/L_u + Δ_v/L_v against T, in logarithms",
        ("part", "T", "slope", "95 % interval", "last two T"),
        rows,
        f"The corollary's rate is {format_signed(-0.5)}. Alone: {parts}. Fitted for each of "
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
    return _text_table(
        "The average over T rounds",
        ("T", "average", "over seeds", "average · √T", "η_u allowed"),
        rows,
        "The fourth column is constant where the average falls exactly like 1/√T. η_u is allowed "
        "where it is below the theorem's δ/(4√2 L_u K_u), δ the smallest μ of these rounds.",
    )


def connectivity_table(connectivity: Connectivity) -> Table:
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
        for row in connectivity.rows
    ]
    return _text_table(
        f"The same {connectivity.rounds} rounds on different graphs",
        ("graph", "q", "C", "δ", "error", "above full", "apart"),
        rows,
        "error: average of Δ_ū/L_u + Δ_v/L_v. apart: average of (1/m) Σ ‖z_i − ū‖². q and C "
        "are measured on the products of the matrices. Clients start apart. Rank correlation of q "
        f"and error: {connectivity.rank_correlation:.2f}.",
    )


def mixing_table(conservation: Conservation) -> Table:
    columns = (
        "scheme",
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
        for mixing in conservation.mixing
    ]
    return _text_table(
        f"{conservation.mixing_rounds} rounds of mixing, nobody trains",
        columns,
        rows,
        "In units of how far apart the clients start; what clients use is z, or u where μ is "
        f"ignored. {_SCHEMES} {conservation.neighbors} neighbours, a new graph every round.",
    )


def limit_table(conservation: Conservation) -> Table:
    steps = list(dict.fromkeys(limit.step for limit in conservation.limits))
    columns: list[Column | str] = ["scheme and graph"]
    for above in ("‖ū − u*‖", "clients"):
        columns += [Column(f"{step:g}", above=above) for step in steps]
    rows = []
    for label in dict.fromkeys(limit.label for limit in conservation.limits):
        for static in (False, True):
            matching = [x for x in conservation.limits if x.label == label and x.static == static]
            texts = [f"{label}, {'fixed' if static else 'new'}"]
            texts += [f"{limit.mean_distance:.3f}" for limit in matching]
            texts += [f"{limit.client_distance:.2f}" for limit in matching]
            rows.append(texts)
    return _text_table(
        f"Distance from the optimum after {conservation.limit_rounds} rounds without noise, "
        "by step",
        columns,
        rows,
        "The step is η_u L_u K_u = η_v L_v K_v. clients: root of the mean square of ‖z_i − u*‖, "
        "or of ‖u_i − u*‖ where μ is ignored. Averages over the last quarter of the rounds. "
        f"{_SCHEMES} {conservation.neighbors} neighbours, new in every round or fixed.",
    )


def step_table(steps: Sequence[StepRow]) -> Table:
    rounds = steps[0].rounds
    columns: list[Column | str] = [
        "step",
        "neighbours",
        *(Column(f"T = {count:,}", above="average of the bounded error") for count in rounds),
        "slope",
        Column("new graphs", above="‖ū − u*‖ without noise"),
        Column("one graph", above="‖ū − u*‖ without noise"),
    ]
    rows = [
        (
            row.rule,
            f"{row.neighbors}",
            *(f"{error:.4g}" for error in row.errors),
            format_signed(row.slope.value),
            *("diverges" if limit is None else f"{limit:.3f}" for limit in row.limits),
        )
        for row in steps
    ]
    return _text_table(
        "Three steps on z, on random_push",
        columns,
        rows,
        "paper: z moves by η/μ. step_floor = 1: by η, and by less where μ > 1. debiased: by η. "
        "The average is that of the rate, with the corollary's steps. The last two columns are "
        "averages over the last quarter of the rounds at the smallest step.",
    )


def is_conserved(mixing: Mixing) -> bool:
    """Whether ū stayed where it was but for rounding."""
    return max(mixing.drift) < EXACT


def _length(value: float) -> str:
    return "0" if value < EXACT else f"{value:.2g}" if value < 1e-3 else f"{value:.3f}"


def _text_table(
    title: str, columns: Sequence[Column | str], rows: Sequence[Sequence[str]], caption: str
) -> Table:
    """A table of texts. The first column holds names, and so do those that say it."""
    first, *others = (Column(c) if isinstance(c, str) else c for c in columns)
    return Table(
        title,
        (Column(first.title, number=False), *others),
        tuple(tuple(TableCell(text) for text in row) for row in rows),
        caption,
    )


# Verdicts, from the numbers themselves.


def describe_findings(findings: Findings) -> tuple[str, str, str, str]:
    """About the rate, the connectivity, the conservation and the step on z."""
    return (
        _describe_rate(findings.rate),
        _describe_connectivity(findings.connectivity),
        _describe_conservation(findings.conservation),
        _describe_steps(findings.steps),
    )


def findings_to_json(findings: Findings) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {"verdicts": describe_findings(findings), **findings.as_dict()}


def _describe_rate(rate: Rate) -> str:
    slope = rate.parts[0].slope
    inside = slope.low <= -0.5 <= slope.high
    return (
        f"The average of Δ_ū/L_u + Δ_v/L_v falls with slope {format_signed(slope.value)} "
        f"(95 %: {format_signed(slope.low)} … {format_signed(slope.high)}); the corollary’s "
        f"−1/2 lies {'inside' if inside else 'outside'} that interval."
    )


def _describe_connectivity(connectivity: Connectivity) -> str:
    worst, best = connectivity.rows[0], connectivity.rows[-1]
    return (
        f"With the same steps the error is {worst.error:.3f} on {worst.label} "
        f"(q = {worst.contraction:.3f}) and {best.error:.3f} on {best.label} "
        f"(q = {best.contraction:.3f}); the rank correlation of q and error over "
        f"{len(connectivity.rows)} graphs is {connectivity.rank_correlation:.2f}."
    )


def _describe_conservation(conservation: Conservation) -> str:
    moving = [
        f"{m.label}: {'conserved' if is_conserved(m) else f'moved by {m.drift[-1]:.3f}'}"
        for m in conservation.mixing
    ]
    smallest = min(limit.step for limit in conservation.limits)
    ends = [
        f"{limit.label} {limit.mean_distance:.3f} (clients {limit.client_distance:.3f})"
        for limit in conservation.limits
        if limit.static and limit.step == smallest
    ]
    return (
        f"The mean over clients under mixing alone, in units of their spread: {'; '.join(moving)}. "
        f"Distance from the optimum on one fixed graph at step {smallest:g}: {'; '.join(ends)}."
    )


def _describe_steps(steps: Sequence[StepRow]) -> str:
    few = min(row.neighbors for row in steps)
    ends = "; ".join(
        f"{row.rule} {row.errors[-1]:.3g}, slope {format_signed(row.slope.value)}"
        for row in steps
        if row.neighbors == few
    )
    return f"With {few} neighbours, after {steps[0].rounds[-1]:,} rounds: {ends}."


# Files.


PAGE, TABLES, NUMBERS = "index.html", "tables.md", "theory.json"
FIGURES = ("rate", "connectivity", "conservation")
KINDS = ("png", "svg")
FILES = {PAGE, TABLES, NUMBERS, *(f"{name}.{kind}" for name in FIGURES for kind in KINDS)}


def check_folder(folder: Path) -> None:
    """Refuse a folder with anything but earlier findings."""
    refuse_foreign(
        folder, lambda _: set(list_contents(folder)) <= FILES or (folder / NUMBERS).exists()
    )


def write_findings(findings: Findings, folder: Path) -> Path:
    """Write everything into the folder; the path of the page."""
    figures = {
        "rate": rate_figure(findings),
        "connectivity": connectivity_figure(findings),
        "conservation": conservation_figure(findings),
    }
    for name, figure in figures.items():
        for kind in KINDS:
            save_figure(figure, folder / f"{name}.{kind}")
    write_tables(all_tables(findings), folder / TABLES)
    write_result_file(
        folder / NUMBERS, (json.dumps(findings_to_json(findings), indent=2) + "\n").encode()
    )
    write_result_file(folder / PAGE, _make_page(findings, figures).encode())
    return folder / PAGE


def _make_page(findings: Findings, figures: dict[str, Figure]) -> str:
    verdicts = describe_findings(findings)
    rate, conservation = findings.rate, findings.conservation
    tables = (
        ("rate", "The rate", (slope_table(rate), rate_table(rate))),
        ("connectivity", "Connectivity", (connectivity_table(findings.connectivity),)),
        (
            "conservation",
            "Conservation of the mean",
            (mixing_table(conservation), limit_table(conservation)),
        ),
    )
    sections = [
        _make_section(name, title, verdict, figures[name], of_section)
        for (name, title, of_section), verdict in zip(tables, verdicts[:3], strict=True)
    ]
    steps = data_table(step_table(findings.steps), ())
    sections.append(section("steps", "The step on z", lead_paragraph(verdicts[3]), steps))
    constants = section("constants", "The problem", data_table(constants_table(findings), ()))
    return make_page(
        "DFedPGP’s theorem, measured",
        [*sections, constants],
        heading="DFedPGP’s theorem on a problem with known constants",
    )


def _make_section(
    name: str, title: str, verdict: str, figure: Figure, tables: tuple[Table, ...]
) -> Markup:
    shown = [tag("div", tag("h3", table.title), data_table(table, ())) for table in tables]
    picture = tag("figure", inline_svg(figure, title, name), style="margin-top:1.25rem")
    return section(name, title, lead_paragraph(verdict), picture, *shown)
