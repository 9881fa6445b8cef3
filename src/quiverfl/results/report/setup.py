"""What was run: the data, the graph and the settings, as sections of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quiverfl.errors import QuiverError
from quiverfl.identity import SEEDS, flatten_settings
from quiverfl.results.figures import make_figure
from quiverfl.results.groups import Group
from quiverfl.results.pictures import check_recorded_graphs
from quiverfl.results.report.html import (
    Markup,
    differences_table,
    lead_paragraph,
    missing_note,
    panels,
    section,
    settings_table,
    tag,
)
from quiverfl.results.run_files import Counts, RunResult
from quiverfl.support.references import is_reference

_MOST_PICTURES = 6


def partition_section(groups: Sequence[Group]) -> Markup:
    """Clients × classes, once for every different partition."""
    runs = [(group.label, run) for group in groups for run in group.runs]
    known = [(label, run) for label, run in runs if run.train_counts is not None]
    unknown = dict.fromkeys(label for label, run in runs if run.train_counts is None)
    notes = [missing_note(f"No counts per class: {', '.join(unknown)}.")] if unknown else []
    kinds = _different(known, _same_counts)
    drawn = [_heat_map(run, labels, groups) for labels, run in kinds[:_MOST_PICTURES]]
    words = "How many training samples of each class every client holds."
    pictures = panels(drawn, "data-") if drawn else Markup()
    return section("data", "Data", lead_paragraph(words), *_cut(kinds), pictures, *notes)


def topology_section(groups: Sequence[Group]) -> Markup:
    """The first round's graph, once for every different topology."""
    kinds = _different([(group.label, group.first) for group in groups], _same_topology)
    drawn, problems = [], []
    for labels, run in kinds[:_MOST_PICTURES]:
        title = f"{_topology_words(run)}: {', '.join(labels)}"
        try:
            drawn.append((title, _graph_figure(run)))
        except (QuiverError, TypeError, ValueError) as problem:
            problems.append(missing_note(f"{title} cannot be drawn. {problem}"))
    words = (
        "Who sends to whom in the first round. Arrows point from sender to receiver; "
        "filled clients train in this round."
    )
    pictures = panels(drawn, "graph-", "panels small") if drawn else Markup()
    parts = (*_cut(kinds), pictures, *problems, *_over_time(groups))
    return section("graph", "Graph of a round", lead_paragraph(words), *parts)


def _over_time(groups: Sequence[Group]) -> list[Markup]:
    """One line for each run with adaptive graphs: whether they stayed connected."""
    watches = [
        (group.label, run, check_recorded_graphs(run)) for group in groups for run in group.runs
    ]
    return [
        tag("p", f"{label}, seed {run.seed}, {run.topology}: {watch.describe()}")
        for label, run, watch in watches
        if watch is not None
    ]


def configuration_section(groups: Sequence[Group]) -> Markup:
    """Settings all experiments share, settings that differ, and what they ran on."""
    values = _values(groups)
    common = {name: column[0] for name, column in values.items() if _all_equal(column)}
    differing = {name: column for name, column in values.items() if not _all_equal(column)}
    environments = [run.environment for group in groups for run in group.runs]
    same = tag("div", *_by_section(common), _environment(environments), class_="columns")
    parts = [same]
    if differing:
        parts = [
            tag("h3", "What differs"),
            differences_table(differing, groups),
            tag("h3", "What is the same"),
            same,
        ]
    return section("configuration", "Configuration", lead_paragraph(_seeds(groups)), *parts)


def _heat_map(run: RunResult, labels: list[str], groups: Sequence[Group]) -> tuple[str, Figure]:
    assert run.train_counts is not None
    clients, classes = run.train_counts.shape
    height = float(np.clip(1.1 + 0.24 * classes, 2.6, 7))
    width = 5.4 if clients <= 20 else 7.4
    everybody = len(set(labels)) == len(groups) > 1
    caption = f"seed {run.seed}: {'all experiments' if everybody else ', '.join(labels)}"
    return caption, make_figure(partial(_draw_counts, run.train_counts), width, height)


def _draw_counts(counts: Counts, axes: Axes) -> None:
    from quiverfl.results.pictures import draw_partition

    axes.grid(False)
    draw_partition(counts, axes)


def _graph_figure(run: RunResult) -> Figure:
    from quiverfl.results.pictures import draw_graph
    from quiverfl.topologies import make_topology

    if is_reference(run.topology):
        raise QuiverError(
            "It was made by code that is not part of the results, and a report runs none: "
            f"`quiver topology show {run.topology} --picture graph.svg` draws it."
        )
    options = {
        k: v
        for k, v in run.topology_options.items()
        if k != "name" and not k.endswith("_seed")  # which follow from the seed
    }
    graph = make_topology(run.topology, run.clients, **options)(0)
    return make_figure(lambda axes: draw_graph(graph, axes), 4.4, 4.4)


def _different(
    runs: Sequence[tuple[str, RunResult]], same: Callable[[RunResult, RunResult], bool]
) -> list[tuple[list[str], RunResult]]:
    """Runs that look alike put together: their labels, and one of them."""
    kinds: list[tuple[list[str], RunResult]] = []
    for label, run in runs:
        alike = next((labels for labels, other in kinds if same(run, other)), None)
        if alike is None:
            kinds.append(([label], run))
        elif label not in alike:
            alike.append(label)
    return kinds


def _same_counts(first: RunResult, second: RunResult) -> bool:
    if first.train_counts is None or second.train_counts is None:
        return False
    return np.array_equal(first.train_counts, second.train_counts)


def _same_topology(first: RunResult, second: RunResult) -> bool:
    return (first.topology_options, first.clients) == (second.topology_options, second.clients)


def _topology_words(run: RunResult) -> str:
    options = {
        k: v
        for k, v in run.topology_options.items()
        if k not in ("name", "seed") and not k.endswith("_seed") and v is not False
    }
    words = ", ".join(f"{name} {value}" for name, value in options.items())
    return f"{run.topology} ({words})" if words else run.topology


def _values(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Every setting with its value in each experiment, in the order of the sections.

    Seeds are told apart from settings, and overrides are already in what they override.
    """
    settings = [
        flatten_settings({**group.first.config, **_as_used(group.first)}) for group in groups
    ]
    names = dict.fromkeys(name for one in settings for name in one)
    sections = list(dict.fromkeys(name.split(".")[0] for name in names))
    together = sorted(names, key=lambda name: sections.index(name.split(".")[0]))
    kept = [name for name in together if name not in SEEDS - {"data.seed"}]
    return {name: [one.get(name) for one in settings] for name in kept}


def _as_used(run: RunResult) -> dict[str, Any]:
    """Sections with everything in them, where the configuration only has what was written."""
    return {"method": run.method_options, "topology": run.topology_options, "overrides": {}}


def _seeds(groups: Sequence[Group]) -> str:
    if _all_equal([group.seeds for group in groups]):
        return f"Seeds: {', '.join(map(str, groups[0].seeds))}."
    parts = (f"{group.label} {', '.join(map(str, group.seeds))}" for group in groups)
    return f"Seeds: {'; '.join(parts)}."


FOOT = ("started", "command")
"""What the page's last lines say."""


def _environment(environments: Sequence[Mapping[str, Any]]) -> Markup:
    known = [environment for environment in environments if environment]
    if not known:
        return tag("div", tag("h3", "environment"), missing_note("Not recorded."))
    names = dict.fromkeys(name for environment in known for name in environment if name not in FOOT)
    every = {
        name: " / ".join(dict.fromkeys(str(environment.get(name)) for environment in known))
        for name in names
    }
    return tag("div", tag("h3", "environment"), settings_table(every))


def _by_section(settings: Mapping[str, Any]) -> list[Markup]:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        head, _, rest = name.partition(".")
        sections.setdefault(head, {})[rest or head] = value
    return [tag("div", tag("h3", head), settings_table(part)) for head, part in sections.items()]


def _cut(kinds: Sequence[object]) -> list[Markup]:
    if len(kinds) <= _MOST_PICTURES:
        return []
    return [missing_note(f"The first {_MOST_PICTURES} of {len(kinds)} are shown.")]


def _all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)
