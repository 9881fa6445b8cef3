"""Who is badly off, and with which data: the clients of a report, one by one.

Clients are compared within a population: the runs that share the data out in the same way. Their
table is written for the first population and stage; the page's script can show the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quiverfl.results import numbers
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.html import Markup, data, join, tag
from quiverfl.results.palette import plain
from quiverfl.results.report_charts import metric_kind, named, plain_numbers
from quiverfl.results.report_parts import key
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import run_scores
from quiverfl.results.summary import higher_is_better

MOST_POPULATIONS = 6
MOST_CLIENTS = 400
"""So many, the worst off, are in the page."""
AT_FIRST = 12
"""So many are in the table before anybody asks for more."""
BAR, HEIGHT = 6, 18
"""A class is a bar so wide and at most so high, in the picture of a client's labels."""


@dataclass(frozen=True, eq=False)
class Population:
    """Runs whose clients are the same people with the same data: one per experiment."""

    runs: dict[str, RunResult]

    @property
    def first(self) -> RunResult:
        return next(iter(self.runs.values()))


def populations(groups: Sequence[Group]) -> list[Population]:
    found: dict[object, dict[str, RunResult]] = {}
    for group in groups:
        for run in group.runs:
            if len(run.history):
                found.setdefault(_shared_out(run), {}).setdefault(group.label, run)
    return [Population(runs) for runs in found.values()]


def client_table(groups: Sequence[Group], stages: Sequence[str]) -> Markup:
    """The table, and what the script needs to show it for other seeds and stages."""
    there = populations(groups)[:MOST_POPULATIONS]
    metric = common_metric(groups)
    views = [_view(one, groups, stages, metric) for one in there]
    first = views[0]
    judge = next(e["label"] for e in first["experiments"] if e["judge"])
    better = "lowest" if higher_is_better(metric) else "highest"
    words = (
        f"Test {numbers.unit(metric)} of single clients in the last evaluated round, at stage "
        f"“{stages[0]}”, {first['name']}. First comes who is worst off under {judge} "
        f"(the {better} {metric}){_kept(there[0])}. A bar is a class, as high as the client has "
        "training samples of it."
    )
    content = {
        "metric": metric,
        "kind": metric_kind(metric),
        "higher": higher_is_better(metric),
        "stages": list(stages),
        "atFirst": AT_FIRST,
        "views": views,
    }
    return tag(
        "div",
        tag("div", _still(first, stages[0], metric, groups), class_="wide", tabindex=0),
        tag("p", words, class_="caption"),
        data(content),
        class_="clients",
    )


def _shared_out(run: RunResult) -> object:
    counts = run.train_counts
    return (run.seed, run.clients) if counts is None else (counts.shape, counts.tobytes())


def _view(
    population: Population, groups: Sequence[Group], stages: Sequence[str], metric: str
) -> dict[str, Any]:
    """One population for the script: its clients, and a number for each under each experiment."""
    first = population.first
    present = [group for group in groups if group.label in population.runs]
    judge = next((g for g in present if plain(g.method) == "dfedpgp"), present[-1])
    scores = {
        group.label: {
            stage: run_scores(population.runs[group.label], stage, "last", metric).reindex(
                range(first.clients)
            )
            for stage in stages
        }
        for group in present
    }
    order = scores[judge.label][stages[0]].to_numpy(dtype=np.float64)
    worst = np.argsort(order if higher_is_better(metric) else -order, kind="stable")[:MOST_CLIENTS]
    experiments = [
        named(group)
        | {
            "judge": group is judge,
            "scores": {
                stage: plain_numbers(scores[group.label][stage].iloc[worst]) for stage in stages
            },
        }
        for group in present
    ]
    seeds = ", ".join(dict.fromkeys(str(run.seed) for run in population.runs.values()))
    return {
        "name": f"seed {seeds}",
        "clients": [_client(first, int(client)) for client in worst],
        "highest": 0 if first.train_counts is None else int(first.train_counts.max()),
        "experiments": experiments,
    }


def _client(run: RunResult, client: int) -> dict[str, Any]:
    known: dict[str, Any] = {"name": run.client_name(client), "train": run.client_size(client)}
    if run.test_sizes is not None and client < len(run.test_sizes):
        known["test"] = int(run.test_sizes[client])
    if run.train_counts is not None and client < len(run.train_counts):
        known["counts"] = run.train_counts[client].tolist()
    return known


def _kept(population: Population) -> str:
    everybody = population.first.clients
    return f"; the page has {MOST_CLIENTS} of {everybody:,}" if everybody > MOST_CLIENTS else ""


def _still(view: dict[str, Any], stage: str, metric: str, groups: Sequence[Group]) -> Markup:
    """The table as it is without a script."""
    keys = {group.label: key(group) for group in groups}
    labelled = any("counts" in client for client in view["clients"])
    titles = ["client", "training", "test", *(["classes", "labels"] if labelled else [])]
    cells = [
        tag("th", title, scope="col", class_=None if title in ("client", "labels") else "number")
        for title in titles
    ]
    cells += [
        tag("th", keys[one["label"]], one["label"], scope="col", class_="number")
        for one in view["experiments"]
    ]
    rows = [
        _row(view, place, stage, metric, labelled)
        for place in range(min(AT_FIRST, len(view["clients"])))
    ]
    return tag("table", tag("thead", tag("tr", *cells)), tag("tbody", *rows), class_="people")


def _row(view: dict[str, Any], place: int, stage: str, metric: str, labelled: bool) -> Markup:
    client = view["clients"][place]
    counts = client.get("counts", [])
    cells = [
        tag("th", client["name"], scope="row"),
        *(_number(client.get(name)) for name in ("train", "test")),
    ]
    if labelled:
        cells.append(_number(sum(count > 0 for count in counts)))
        cells.append(tag("td", _labels(counts, view["highest"])))
    for one in view["experiments"]:
        value = one["scores"][stage][place]
        text = numbers.NOTHING if value is None else numbers.score(value, metric)
        cells.append(tag("td", text, class_="number"))
    return tag("tr", *cells)


def _number(value: int | None) -> Markup:
    return tag("td", numbers.NOTHING if value is None else f"{value:,}", class_="number")


def _labels(counts: Sequence[int], highest: int) -> Markup:
    """Bars, one per class."""
    bars = [
        tag("rect", x=BAR * label, y=HEIGHT - tall, width=BAR - 1, height=tall)
        for label, count in enumerate(counts)
        if count and (tall := max(2, round(HEIGHT * count / highest)))
    ]
    words = ", ".join(f"class {label}: {count}" for label, count in enumerate(counts) if count)
    wide = BAR * len(counts)
    ground = tag("rect", x=0, y=HEIGHT, width=wide - 1, height=1, class_="ground")
    return tag(
        "svg",
        tag("title", words),
        join(*bars, ground),
        viewBox=f"0 0 {wide} {HEIGHT + 1}",
        width=min(wide, 40 * BAR),
        height=HEIGHT + 1,
        preserveAspectRatio="none",
        role="img",
        class_="labels",
    )
