"""What came out: the sections of the report on results, each a function to HTML."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quiverfl.results import figures
from quiverfl.results.curve_data import (
    AGAINST,
    Against,
    has_consensus,
    has_moving_mass,
    is_agreed,
    metrics_shown,
    records_consensus,
)
from quiverfl.results.figures import draw_curves
from quiverfl.results.groups import Group
from quiverfl.results.html import Markup, tag
from quiverfl.results.report_charts import (
    Chart,
    clients_chart,
    consensus_chart,
    curve_chart,
    mass_chart,
)
from quiverfl.results.report_clients import client_table
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
_CUT = (
    "Scales follow the values after the first fifth of the rounds, so that experiments that end "
    "close together can be told apart; lower beginnings are cut off."
)


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
    shown = metrics_shown(groups)
    words = f"Mean over clients of the test {' and '.join(shown)}, each on its own data."
    if any(len(group.runs) > 1 for group in groups):
        words += " Lines are means over seeds, bands reach from the lowest seed to the highest."
    rows, cut = [], False
    for against in AGAINST:
        rows.append(tag("h3", f"Against {against if against != 'steps' else 'local steps'}"))
        rows.append(lead(_CURVE_WORDS[against]))
        for metric in shown if against == "rounds" else shown[:1]:
            charts = [curve_chart(groups, stage, against, metric) for stage in stages]
            cut = cut or all(chart["cut"] for chart in charts)  # both are on one scale
            rows.append(_curve_panels(groups, stages, against, metric, charts))
    note = lead(_CUT) if cut else Markup()
    return section("curves", "Learning curves", lead(words), note, legend(groups), *rows)


def _curve_panels(
    groups: Sequence[Group],
    stages: Sequence[str],
    against: Against,
    metric: str,
    charts: Sequence[Chart],
) -> Markup:
    draw = partial(draw_curves, groups=groups, against=against, metric=metric, late=True)
    drawn = at_both_stages(draw, stages, height=3.3, of=metric)
    return panels(drawn, f"{against}-{metric}-", charts=charts)


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
    charts = [clients_chart(groups, stage) for stage in stages]
    return section(
        "clients",
        "Clients",
        lead(words),
        panels(drawn, "clients-", charts=charts),
        tag("h3", "Client by client"),
        client_table(groups, stages),
    )


def mass(groups: Sequence[Group]) -> Markup:
    """How far μ spreads and how far clients are apart."""
    moving = [group for group in groups if has_moving_mass(group)]
    still = [group.label for group in groups if group not in moving]
    drawn, charts, words = [], [], []
    if moving:
        drawn.append(
            (
                "μ over rounds: from the smallest client to the largest",
                figures.picture(lambda axes: figures.draw_mass(axes, moving)),
            )
        )
        charts.append(mass_chart(moving))
    if has_consensus(groups):
        drawn.append(
            (
                "Consensus distance: mean squared distance of the shared parts from their mean",
                figures.picture(lambda axes: figures.draw_consensus(axes, groups)),
            )
        )
        charts.append(consensus_chart(groups))
    if still:
        words.append(f"μ stays 1, or is not used: {', '.join(still)}.")
    agreed = [group.label for group in groups if is_agreed(group)]
    if agreed:
        words.append(f"The shared parts are equal after every round: {', '.join(agreed)}.")
    without = [group.label for group in groups if not records_consensus(group)]
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
        panels(drawn, "mass-", charts=charts)
        if drawn
        else missing("No run recorded μ or a consensus distance."),
        *(tag("p", text, class_="caption") for text in words),
    )
