"""What was found, in a sentence or two each, from the numbers themselves."""

from __future__ import annotations

from typing import Any

from quiverfl.paper.theory.connectivity import Connectivity
from quiverfl.paper.theory.conservation import Conservation
from quiverfl.paper.theory.measure import Findings
from quiverfl.paper.theory.rate import Rate
from quiverfl.paper.theory.theory_tables import conserved, signed


def verdicts(findings: Findings) -> tuple[str, str, str]:
    """About the rate, the connectivity and the conservation."""
    return (
        _rate(findings.rate),
        _connectivity(findings.connectivity),
        _conservation(findings.conservation),
    )


def numbers(findings: Findings) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {"verdicts": verdicts(findings), **findings.as_dict()}


def _rate(rate: Rate) -> str:
    slope = rate.parts[0].slope
    inside = slope.low <= -0.5 <= slope.high
    return (
        f"The average of Δ_ū/L_u + Δ_v/L_v falls with slope {signed(slope.value)} "
        f"(95 %: {signed(slope.low)} … {signed(slope.high)}); the corollary’s −1/2 lies "
        f"{'inside' if inside else 'outside'} that interval."
    )


def _connectivity(found: Connectivity) -> str:
    worst, best = found.rows[0], found.rows[-1]
    return (
        f"With the same steps the error is {worst.error:.3f} on {worst.label} "
        f"(q = {worst.contraction:.3f}) and {best.error:.3f} on {best.label} "
        f"(q = {best.contraction:.3f}); the rank correlation of q and error over "
        f"{len(found.rows)} graphs is {found.rank_correlation:.2f}."
    )


def _conservation(found: Conservation) -> str:
    moved = [
        f"{m.label}: {'conserved' if conserved(m) else f'moved by {m.drift[-1]:.3f}'}"
        for m in found.mixing
    ]
    smallest = min(limit.step for limit in found.limits)
    ends = [
        f"{limit.label} {limit.mean_distance:.3f} (clients {limit.client_distance:.3f})"
        for limit in found.limits
        if limit.static and limit.step == smallest
    ]
    return (
        f"The mean over clients under mixing alone, in units of their spread: {'; '.join(moved)}. "
        f"Distance from the optimum on one fixed graph at step {smallest:g}: {'; '.join(ends)}."
    )
