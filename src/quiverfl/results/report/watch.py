"""The page of `quiver watch`: every run below a folder, as its files are now."""

from __future__ import annotations

from collections.abc import Sequence

from quiverfl.results import formatting as numbers
from quiverfl.results.curves import Chart, live_chart
from quiverfl.results.groups import Group, common_metric, group_runs, name_alike, split_by_case
from quiverfl.results.report.html import (
    Markup,
    embed_json,
    lead_paragraph,
    legend_key,
    make_legend,
    make_page,
    missing_note,
    section,
    tag,
)
from quiverfl.results.report.overview import RunFinder, RunState, count_states
from quiverfl.results.summary import STAGE_WORDS, STAGES

MOST_CURVES = 60
"""With more runs than this in a case, their curves could not be told apart."""


def make_watch_page(finder: RunFinder, every: float) -> str:
    """The page as it is now; it asks every so many seconds whether anything has changed."""
    version = finder.version()  # before reading: what comes meanwhile is then read again
    runs = finder.read()
    groups = group_runs([one.run for one in runs if one.run is not None])
    counts = count_states(runs)
    left = [one.seconds_left for one in runs if one.seconds_left is not None]
    facts: dict[str, str] = {state: str(count) for state, count in counts.items()}
    if left:
        facts["longest still runs for about"] = numbers.format_duration(max(left))
    alive = tag("p", "live", class_="alive", data_version=version, data_every=str(every))
    failures = [f"{one.name} {one.state}: {one.error}" for one in runs if one.error]
    return make_page(
        f"{len(runs)} run{'' if len(runs) == 1 else 's'} below {finder.root}",
        [alive, *_curve_sections(groups), _run_section(runs, groups)],
        eyebrow="Quiver watch",
        facts=facts,
        notes=failures,
        live=True,
    )


def _curve_sections(groups: Sequence[Group]) -> list[Markup]:
    sections = []
    for number, (case, own) in enumerate(split_by_case(name_alike(groups)).items()):
        metric = common_metric(own)
        title = case or "Learning curves"
        curves = sum(len(group.runs) + len(group.under_way) for group in own)
        if not any(len(run.history) for g in own for run in (*g.runs, *g.under_way)):
            content = [missing_note("Nothing has been evaluated yet.")]
        elif curves > MOST_CURVES:
            content = [missing_note(f"{curves} runs: choose a folder with fewer to see curves.")]
        else:
            words = f"Mean over clients of the test {metric}, one curve for each run."
            charts = [(stage, live_chart(own, stage, metric)) for stage in STAGES]
            for _, chart in charts:  # the rounds of another case would squeeze these
                chart["scale"] = f"{chart['scale']} {number}"
            drawn = tag("div", *(_panel(stage, chart) for stage, chart in charts), class_="panels")
            content = [lead_paragraph(words), make_legend(own), drawn]
        sections.append(section(f"case-{number}", title, *content))
    return sections


def _panel(stage: str, chart: Chart) -> Markup:
    """A chart that the page's script draws; there is no still picture, as the page is served."""
    words = tag("figcaption", f"stage {stage}", tag("span", f" · {STAGE_WORDS[stage]}"))
    return tag("figure", words, tag("svg", viewBox="0 0 1 1"), embed_json(chart))


def _run_section(runs: Sequence[RunState], groups: Sequence[Group]) -> Markup:
    if not runs:
        return section("runs", "Runs", missing_note("No run has begun yet; this page waits."))
    keys = {
        run.path: legend_key(group)
        for group in groups
        for run in (*group.runs, *group.under_way, *group.left_out)
    }
    titles = ["run", "state", "rounds", *STAGES, "took", "time left"]
    words = {"run", "state"}
    head = tag(
        "tr",
        *(tag("th", t, scope="col", class_=None if t in words else "number") for t in titles),
    )
    rows = [_run_row(one, keys.get(one.path, Markup())) for one in runs]
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    return section("runs", "Runs", tag("div", table, class_="wide", tabindex=0))


def _run_row(one: RunState, key: Markup) -> Markup:
    done, planned = (0, None) if one.run is None else (one.run.done_rounds, one.run.planned_rounds)
    bar = tag("progress", value=done, max=planned) if planned else Markup()
    scores = [one.score(stage) for stage in STAGES]
    left = one.seconds_left
    cells = [
        tag("span", one.state, class_=f"state {one.state}"),
        Markup(f"{bar} {done} of {planned if planned is not None else '?'}"),
        *("" if s is None else numbers.format_score(s, one.metric) for s in scores),
        numbers.format_duration(one.seconds) if one.seconds else "",
        "" if left is None else numbers.format_duration(left),
    ]
    kinds = [None, *["number"] * 5]
    written = [tag("td", cell, class_=kind) for cell, kind in zip(cells, kinds, strict=True)]
    long = "long" if len(one.name) > 24 else None
    return tag("tr", tag("th", key, one.name, scope="row", class_=long), *written)
