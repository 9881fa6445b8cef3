"""Who is badly off, and with which data: the clients of a report, one by one.

Clients are compared within a population: the runs that partition the data in the same way. Their
table is written for the first population and stage; the page's script can show the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quiverfl.results import formatting as numbers
from quiverfl.results.curves import describe_group, metric_kind, plain_numbers
from quiverfl.results.groups import Group, common_metric
from quiverfl.results.report.html import Markup, embed_json, join_markup, legend_key, tag
from quiverfl.results.run_files import RunResult
from quiverfl.results.scores import run_scores
from quiverfl.results.statistics import REFERENCE, choose_reference
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


def list_populations(groups: Sequence[Group]) -> list[Population]:
    populations: dict[object, dict[str, RunResult]] = {}
    for group in groups:
        for run in group.runs:
            if len(run.history) and not run.is_condensed:
                populations.setdefault(_partition_key(run), {}).setdefault(group.label, run)
    return [Population(runs) for runs in populations.values()]


def client_table(
    groups: Sequence[Group], stages: Sequence[str], reference: str = REFERENCE
) -> Markup:
    """The table, and what the script needs to show it for other seeds and stages.

    Clients are in the order of their scores under the method `reference`, the worst first.
    """
    populations = list_populations(groups)[:MOST_POPULATIONS]
    if not populations:
        return tag("p", "The runs recorded hundredths of their clients and no single client's.")
    metric = common_metric(groups)
    views = [_make_view(one, groups, stages, metric, reference) for one in populations]
    first = views[0]
    judge = next(e["label"] for e in first["experiments"] if e["judge"])
    better = "lowest" if higher_is_better(metric) else "highest"
    words = (
        f"Test {numbers.metric_unit(metric)} of single clients in the last evaluated round, at "
        f"stage “{stages[0]}”, {first['name']}. First comes who is worst off under {judge} "
        f"(the {better} {metric}){_truncation_words(populations[0])}. A bar is a class, as high "
        "as the client has training samples of it."
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
        tag("div", _static_table(first, stages[0], metric, groups), class_="wide", tabindex=0),
        tag("p", words, class_="caption"),
        embed_json(content),
        class_="clients",
    )


def _partition_key(run: RunResult) -> object:
    counts = run.train_counts
    return (run.seed, run.clients) if counts is None else (counts.shape, counts.tobytes())


def _make_view(
    population: Population,
    groups: Sequence[Group],
    stages: Sequence[str],
    metric: str,
    reference: str,
) -> dict[str, Any]:
    """One population for the script: its clients, and a number for each under each experiment."""
    first = population.first
    present = [group for group in groups if group.label in population.runs]
    judge = choose_reference(present, reference)
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
        describe_group(group)
        | {
            "judge": group is judge,
            "scores": {
                stage: plain_numbers(scores[group.label][stage].iloc[worst]) for stage in stages
            },
        }
        for group in present
    ]
    seeds = ", ".join(dict.fromkeys(str(run.seed) for run in population.runs.values()))
    cases = "; ".join(dict.fromkeys(group.case for group in present if group.case))
    return {
        "name": f"{cases}, seed {seeds}" if cases else f"seed {seeds}",
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


def _truncation_words(population: Population) -> str:
    everybody = population.first.clients
    return f"; the page has {MOST_CLIENTS} of {everybody:,}" if everybody > MOST_CLIENTS else ""


def _static_table(view: dict[str, Any], stage: str, metric: str, groups: Sequence[Group]) -> Markup:
    """The table as it is without a script."""
    keys = {group.label: legend_key(group) for group in groups}
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
        text = numbers.DASH if value is None else numbers.format_score(value, metric)
        cells.append(tag("td", text, class_="number"))
    return tag("tr", *cells)


def _number(value: int | None) -> Markup:
    return tag("td", numbers.DASH if value is None else f"{value:,}", class_="number")


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
        join_markup(*bars, ground),
        viewBox=f"0 0 {wide} {HEIGHT + 1}",
        width=min(wide, 40 * BAR),
        height=HEIGHT + 1,
        preserveAspectRatio="none",
        role="img",
        class_="labels",
    )


# Models that seem to answer every question alike: a network that training has destroyed.
#
# It diverges nowhere and its accuracy looks like a number; it is the frequency of one class.


STAGE = "local"
"""Right after training. Communication mixes models, so that even good ones may look like this."""


def constant_answer_notes(groups: Sequence[Group]) -> list[str]:
    """A sentence for every experiment in which most clients look like that."""
    notes = []
    for group in groups:
        counted = [_suspects(run) for run in group.runs]
        suspects, clients = (sum(column) for column in zip(*counted, strict=True))
        if 2 * suspects > clients:
            notes.append(
                f"{group.label}: {suspects} of {clients} clients score exactly the frequency of "
                "one class in their test data, as a model that gives one answer to everything. "
                "Training may have destroyed it: try a smaller training.lr."
            )
    return notes


def _suspects(run: RunResult) -> tuple[int, int]:
    """How many clients score exactly the frequency of one class, of those that have two or more."""
    counts, history = run.test_counts, run.history
    if counts is None or "accuracy" not in history:
        return 0, 0
    local = history[history["stage"] == STAGE]
    last = local[local["round"] == local["round"].max()].set_index("client")["accuracy"]
    several = [c for c in last.index if c < len(counts) and np.count_nonzero(counts[c]) > 1]
    right = {c: last[c] * counts[c].sum() for c in several}
    class_fractions = {c: counts[c][counts[c] > 0] for c in several}
    alike = [c for c in several if bool((np.abs(class_fractions[c] - right[c]) < 1e-3).any())]
    return len(alike), len(several)
