"""What came out: the sections of the report on results, each a function to HTML."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quiverfl.results import figures
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.html import Markup, tag
from quiverfl.results.report_parts import (
    at_both_stages,
    data_table,
    lead,
    legend,
    missing,
    panels,
    section,
)
from quiverfl.results.tables import (
    REPORT_TITLES,
    comparison_table,
    cost_table,
    difference_table,
    reference_of,
)

_CURVE_WORDS = {
    "rounds": "At equal rounds. A server round trains only the clients it samples.",
    "bytes": "At equal communication. Every message counts once; stage “local” comes before the "
    "round's communication. A dotted line is the last value of a method that sent nothing.",
    "steps": "At equal computation: mini-batch steps of all clients together.",
}


def results(groups: Sequence[Group], stages: Sequence[str]) -> Markup:
    headline = comparison_table(groups, "last", stages=stages, cost=False)
    others = [
        tag(
            "details",
            tag("summary", REPORT_TITLES[report]),
            data_table(comparison_table(groups, report, stages=stages, cost=False), groups),
        )
        for report in ("best", "last10")
    ]
    return section(
        "results",
        "Results",
        tag("h3", headline.title),
        data_table(headline, groups),
        *others,
        *_paired(groups, stages),
        tag("h3", "What it cost"),
        data_table(cost_table(groups), groups),
    )


def _paired(groups: Sequence[Group], stages: Sequence[str]) -> list[Markup]:
    """Differences within seeds, once there are enough of them to say something."""
    found = reference_of(groups)
    if found is None:
        return []
    several, reference = found
    return [
        tag("h3", f"Difference to {reference}, paired by seed"),
        data_table(difference_table(several, reference, stages=stages), several),
    ]


def curves(groups: Sequence[Group], stages: Sequence[str]) -> Markup:
    if not any(len(run.history) for group in groups for run in group.runs):
        return section("curves", "Learning curves", missing("Nothing has been evaluated yet."))
    words = f"Mean over clients of the test {common_metric(groups)}, each on its own data."
    if any(len(group.runs) > 1 for group in groups):
        words += " Lines are means over seeds, bands reach from the lowest seed to the highest."
    rows = []
    for against in figures.AGAINST:
        draw = partial(figures.draw_curves, groups=groups, against=against)
        drawn = at_both_stages(draw, stages, height=3.3)
        rows.append(tag("h3", f"Against {against if against != 'steps' else 'local steps'}"))
        rows.append(lead(_CURVE_WORDS[against]))
        rows.append(panels(drawn, f"{against}-"))
    return section("curves", "Learning curves", lead(words), legend(groups), *rows)


def clients(groups: Sequence[Group], stages: Sequence[str]) -> Markup:
    if not any(len(run.history) for group in groups for run in group.runs):
        return section("clients", "Clients", missing("Nothing has been evaluated yet."))
    drawn = at_both_stages(
        partial(figures.draw_clients, groups=groups),
        stages,
        height=1.15 + 0.42 * max(2, len(groups)),
    )
    words = (
        "Every client is a point, at the last evaluated round; the bar spans the middle half of "
        "the clients and the line is their median."
    )
    if any(len(group.runs) > 1 for group in groups):
        words += " The clients of all seeds are shown together."
    return section("clients", "Distribution over clients", lead(words), panels(drawn, "clients-"))


def mass(groups: Sequence[Group]) -> Markup:
    """How far μ spreads and how far clients are apart."""
    moving = [group for group in groups if figures.has_moving_mass(group)]
    still = [group.label for group in groups if group not in moving]
    drawn, words = [], []
    if moving:
        drawn.append(
            (
                "μ over rounds: from the smallest client to the largest",
                figures.picture(lambda axes: figures.draw_mass(axes, moving)),
            )
        )
    if figures.has_consensus(groups):
        drawn.append(
            (
                "Consensus distance: mean squared distance of the shared parts from their mean",
                figures.picture(lambda axes: figures.draw_consensus(axes, groups)),
            )
        )
    if still:
        words.append(f"μ stays 1, or is not used: {', '.join(still)}.")
    agreed = [group.label for group in groups if figures.is_agreed(group)]
    if agreed:
        words.append(f"The shared parts are equal after every round: {', '.join(agreed)}.")
    without = [group.label for group in groups if not figures.records_consensus(group)]
    if without:
        words.append(
            "No consensus distance, as nothing was evaluated yet or no field of the method's "
            f"state is declared Shared: {', '.join(without)}."
        )
    return section(
        "mass",
        "Push-sum weight and consensus",
        lead(
            "Where columns of the mixing matrix sum to 1, push-sum divides by μ, and the step on "
            "a client's model is the learning rate over μ: a small μ is a large step."
        ),
        legend(groups) if drawn else Markup(),
        panels(drawn, "mass-") if drawn else missing("No run recorded μ or a consensus distance."),
        *(tag("p", text, class_="caption") for text in words),
    )
