"""The report: runs in one HTML file that needs nothing else and no network.

Everything is in the page as still pictures and tables. Its script, which is in the page too, makes
them answer to the mouse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quiverfl.errors import QuiverError
from quiverfl.results import figures
from quiverfl.results.curves import (
    Against,
    Chart,
    clients_chart,
    consensus_chart,
    curve_chart,
    has_consensus,
    has_moving_mass,
    is_agreed,
    list_axes,
    list_metrics,
    mass_chart,
    records_consensus,
)
from quiverfl.results.formatting import write_result_file
from quiverfl.results.groups import Group, group_runs, split_by_case
from quiverfl.results.report import setup
from quiverfl.results.report.clients import client_table, constant_answer_notes
from quiverfl.results.report.html import (
    GENERATOR,
    Markup,
    data_table,
    lead_paragraph,
    make_legend,
    make_page,
    missing_note,
    panels,
    section,
    tag,
)
from quiverfl.results.run_files import RunResult, find_runs
from quiverfl.results.statistics import REFERENCE, choose_reference
from quiverfl.results.summary import STAGE_WORDS
from quiverfl.results.tables import (
    REPORT_TITLES,
    add_case_to_title,
    case_table,
    comparison_table,
    cost_table,
    describe_unfinished,
    difference_tables,
    order_stages,
    unseen_table,
)
from quiverfl.support import durable

_CURVE_WORDS = {
    "rounds": "At equal rounds. A server round trains only the clients it samples.",
    "bytes": "At equal communication. Every message counts once; stage “local” comes before the "
    "round's communication. A dotted line is the last value of a method that sent nothing.",
    "steps": "At equal computation: mini-batch steps of all clients together.",
    "clock": "At equal time on the runs' devices: seconds until all clients have done the round.",
    "joules": "At equal energy: training, waiting and bytes of all clients together.",
}
_CUT = (
    "Scales follow the values after the first fifth of the rounds, so that experiments that end "
    "close together can be told apart; lower beginnings are cut off."
)
MOST_COMMANDS = 8
LONGEST_TITLE = 80
"""Where experiments are counted in the title, not named."""


def write_report(
    folders: Sequence[Path],
    out: Path,
    stage: str = "local",
    reference: str = REFERENCE,
    prepare: Callable[[RunResult], RunResult] | None = None,
) -> list[Group]:
    """Read the runs of some folders and write one page about them.

    `stage` comes first. Differences are taken to the method `reference`. An earlier report is
    replaced; any other file in its place is left alone. `prepare` makes of every run what is
    reported.
    """
    durable.check_writable(out)
    if out.exists() and not _is_report(out):
        raise QuiverError(f"{out} exists and is not a report of Quiver: choose another --out.")
    runs = find_runs(folders)
    groups = group_runs(runs if prepare is None else map(prepare, runs))
    write_result_file(out, make_report(groups, stage, reference).encode("utf-8"))
    return groups


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(2000)


def make_report(groups: Sequence[Group], stage: str = "local", reference: str = REFERENCE) -> str:
    """Make the page; the named stage comes first, the other beside it."""
    stages = order_stages(stage)
    return make_page(
        make_title(groups),
        [
            results_section(groups, stages, reference),
            curves_section(groups, stages),
            clients_section(groups, stages, reference),
            setup.partition_section(groups),
            setup.topology_section(groups),
            mass_section(groups),
            setup.configuration_section(groups),
        ],
        eyebrow="Quiver report",
        facts=_list_facts(groups),
        contents={
            "results": "Results",
            "curves": "Learning curves",
            "clients": "Clients",
            "data": "Data",
            "graph": "Graph",
            "mass": "Push-sum weight",
            "configuration": "Configuration",
        },
        notes=list_notes(groups),
        footer=_make_footer(groups),
    )


def make_title(groups: Sequence[Group]) -> str:
    labels = [group.label for group in groups]
    names = labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"
    data = list(dict.fromkeys(_data_name(group.first) for group in groups))
    if len(labels) > 4 or len(names) > LONGEST_TITLE:
        different = len({group.method for group in groups}) == len(groups)
        names = f"{len(labels)} {'methods' if different else 'experiments'}"
    cases = split_by_case(groups)
    if len(cases) > 1:
        count = len({group.name for group in groups})
        names = f"{count} method{'s' if count > 1 else ''} in {len(cases)} cases"
    return f"{names} on {', '.join(data)}"


def _list_facts(groups: Sequence[Group]) -> dict[str, str]:
    runs = [run for group in groups for run in group.runs]
    return {
        "clients": _list_values(run.clients for run in runs),
        "rounds": _list_values(run.planned_rounds or run.done_rounds for run in runs),
        "seeds": _list_values(len(group.runs) for group in groups),
        "partition": _list_values(describe_partition(run) for run in runs),
        "model": _list_values(run.config.get("model", {}).get("name", "unknown") for run in runs),
    }


def list_notes(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before comparing."""
    notes = [*describe_unfinished(groups), *constant_answer_notes(groups)]
    pulled = [group.label for group in groups if group.first.topology == "random_pull"]
    if pulled:
        notes.append(
            f"{', '.join(pulled)} used random_pull: the paper's theorem does not cover it. "
            "μ stays 1 and the mean of u is not conserved."
        )
    cases = split_by_case(groups)
    if len(cases) > 1:
        notes.append(
            f"These runs are {len(cases)} cases, of unlike data, partition or model "
            f"({'; '.join(cases)}): nothing is compared across them."
        )
    for what in ("data", "model", "training"):
        if len({str(group.first.config.get(what)) for group in groups}) > 1:
            notes.append(f"The {what} settings differ between these experiments (see the end).")
    if len({group.first.planned_rounds for group in groups}) > 1:
        notes.append("These experiments do not have the same number of rounds.")
    for group in groups:
        notes += [
            f"{run.path.name} is left out: {group.label} with seed {run.seed} is here already."
            for run in group.left_out
        ]
    if len(groups) > 1 and all(len(group.runs) == 1 for group in groups):
        notes.append("One seed each: small differences may be chance; run several seeds.")
    return notes


def _make_footer(groups: Sequence[Group]) -> list[Markup]:
    runs = [run for group in groups for run in group.runs]
    made = "one run folder" if len(runs) == 1 else f"{len(runs)} run folders"
    version = _list_values(_format_version(run) for run in runs)
    words = f"Made from {made} written by Quiver {version}{_format_start(runs)}."
    commands = dict.fromkeys(str(c) for run in runs if (c := run.environment.get("command")))
    listed = [tag("p", tag("code", command)) for command in list(commands)[:MOST_COMMANDS]]
    if len(commands) > MOST_COMMANDS:
        listed.append(tag("p", f"and {len(commands) - MOST_COMMANDS} more commands."))
    return [tag("p", f"{words} Rounds are counted from 1."), *listed]


def _format_version(run: RunResult) -> str:
    commit = run.environment.get("commit")
    return f"{run.version} (commit {commit})" if commit else run.version


def _format_start(runs: Sequence[RunResult]) -> str:
    """` between … and …`, to the minute."""
    started = sorted(str(s) for run in runs if (s := run.environment.get("started")))
    if not started:
        return ""
    first, last = (text[:16].replace("T", " ") for text in (started[0], started[-1]))
    return f", started {first} UTC" if first == last else f", started {first} to {last} UTC"


def describe_data(run: RunResult) -> str:
    return f"{_data_name(run)}, {describe_partition(run)}"


def _data_name(run: RunResult) -> str:
    """The data set's name; of data of one's own the name of its file or folder."""
    data = run.config.get("data", {})
    options = data.get("options")
    path = options.get("path") if isinstance(options, dict) else None
    return (
        Path(path).name if isinstance(path, str) and path else str(data.get("name", "unknown data"))
    )


def describe_partition(run: RunResult) -> str:
    data = run.config.get("data", {})
    options = [data.get(name) for name in ("alpha", "classes_per_client")]
    given = ", ".join(str(option) for option in options if option is not None)
    name = str(data.get("partition", "unknown"))
    return f"{name}({given})" if given else name


def _list_values(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


# What came out.


def results_section(groups: Sequence[Group], stages: Sequence[str], reference: str) -> Markup:
    cases = split_by_case(groups)
    parts = []
    if len(cases) > 1:
        overview = case_table(groups, stages=stages)
        parts = [tag("h3", overview.title), data_table(overview, groups)]
    # There are differences only where several seeds are.
    differences = difference_tables(groups, stages=stages, reference=reference)
    for case, own in cases.items():
        parts += _score_tables(case, own, stages)
        if case in differences:
            parts += [_pairs_heading(case, own, reference), data_table(differences[case], own)]
    unseen = unseen_table(groups)
    if unseen is not None:
        parts += [tag("h3", unseen.title), data_table(unseen, groups)]
    return section(
        "results",
        "Results",
        *parts,
        tag("h3", "What it cost"),
        data_table(cost_table(groups), groups),
    )


def _score_tables(case: str, groups: Sequence[Group], stages: Sequence[str]) -> list[Markup]:
    headline = add_case_to_title(comparison_table(groups, "last", stages=stages, cost=False), case)
    others = [
        tag(
            "details",
            tag("summary", REPORT_TITLES[report]),
            data_table(comparison_table(groups, report, stages=stages, cost=False), groups),
        )
        for report in ("best", "last10")
    ]
    return [tag("h3", headline.title), data_table(headline, groups), *others]


def _pairs_heading(case: str, groups: Sequence[Group], reference: str) -> Markup:
    several = [group for group in groups if len(group.runs) > 1]
    words = f"Difference to {choose_reference(several, reference).name}, paired by seed"
    return tag("h3", f"{case}: {words}" if case else words)


def curves_section(groups: Sequence[Group], stages: Sequence[str]) -> Markup:
    if not any(len(run.history) for group in groups for run in group.runs):
        return section("curves", "Learning curves", missing_note("Nothing has been evaluated yet."))
    metrics = list_metrics(groups)
    words = f"Mean over clients of the test {' and '.join(metrics)}, each on its own data."
    if any(len(group.runs) > 1 for group in groups):
        words += " Lines are means over seeds, bands reach from the lowest seed to the highest."
    rows, cut = [], False
    for against in list_axes(groups):
        axis = {"steps": "local steps", "clock": "seconds"}.get(against, against)
        rows.append(tag("h3", f"Against {axis}"))
        rows.append(lead_paragraph(_CURVE_WORDS[against]))
        for metric in metrics if against == "rounds" else metrics[:1]:
            charts = [curve_chart(groups, stage, against, metric) for stage in stages]
            cut = cut or all(chart["cut"] for chart in charts)  # both are on one scale
            rows.append(_curve_panels(groups, stages, against, metric, charts))
    note = lead_paragraph(_CUT) if cut else Markup()
    return section(
        "curves", "Learning curves", lead_paragraph(words), note, make_legend(groups), *rows
    )


def _curve_panels(
    groups: Sequence[Group],
    stages: Sequence[str],
    against: Against,
    metric: str,
    charts: Sequence[Chart],
) -> Markup:
    draw = partial(figures.draw_curves, groups=groups, against=against, metric=metric, late=True)
    drawn = at_both_stages(draw, stages, height=3.3, of=metric)
    return panels(drawn, f"{against}-{metric}-", charts=charts)


def clients_section(groups: Sequence[Group], stages: Sequence[str], reference: str) -> Markup:
    if not any(len(run.history) for group in groups for run in group.runs):
        return section("clients", "Clients", missing_note("Nothing has been evaluated yet."))
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
        lead_paragraph(words),
        panels(drawn, "clients-", charts=charts),
        tag("h3", "Client by client"),
        client_table(groups, stages, reference),
    )


def mass_section(groups: Sequence[Group]) -> Markup:
    """How far μ spreads and how far clients are apart."""
    moving = [group for group in groups if has_moving_mass(group)]
    still = [group.label for group in groups if group not in moving]
    pictures, charts, words = [], [], []
    if moving:
        pictures.append(
            (
                "μ over rounds: from the smallest client to the largest",
                figures.make_figure(lambda axes: figures.draw_mass(axes, moving)),
            )
        )
        charts.append(mass_chart(moving))
    if has_consensus(groups):
        pictures.append(
            (
                "Consensus distance: mean squared distance of the shared parts from their mean",
                figures.make_figure(lambda axes: figures.draw_consensus(axes, groups)),
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
        lead_paragraph(
            "Where columns of the mixing matrix sum to 1, push-sum divides by μ, and the step on "
            "a client's model is the learning rate over μ: a small μ is a large step."
        ),
        make_legend(groups) if pictures else Markup(),
        panels(pictures, "mass-", charts=charts)
        if pictures
        else missing_note("No run recorded μ or a consensus distance."),
        *(tag("p", text, class_="caption") for text in words),
    )


def at_both_stages(
    draw: Callable[..., None], stages: Sequence[str], height: float, of: str = ""
) -> list[tuple[str, Figure]]:
    """One figure per stage, all on the same scale: draw(axes, stage=…). `of` names its subject."""
    drawn = [figures.make_figure(partial(draw, stage=stage), height=height) for stage in stages]
    all_axes = [figure.axes[0] for figure in drawn]
    for limits, change in (
        ([axes.get_xlim() for axes in all_axes], Axes.set_xlim),
        ([axes.get_ylim() for axes in all_axes], Axes.set_ylim),
    ):
        for axes in all_axes:
            change(axes, _cover(limits))
    name = f"{of}, stage" if of else "stage"
    return [(f"{name} {s}: {STAGE_WORDS[s]}", f) for s, f in zip(stages, drawn, strict=True)]


def _cover(limits: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The range that covers all, in the direction they have."""
    lows, highs = [min(pair) for pair in limits], [max(pair) for pair in limits]
    hull = min(lows), max(highs)
    return hull if limits[0][0] <= limits[0][1] else (hull[1], hull[0])
