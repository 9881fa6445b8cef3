"""What some runs were made with, in a sentence for the foot of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quiverfl.methods import method_title
from quiverfl.paper.reproduce.collect import Results
from quiverfl.results import numbers
from quiverfl.results.groups import Group
from quiverfl.results.html_report import partition_words

TRAINING = {
    "lr": "lr",
    "personal_lr": "personal lr",
    "lr_decay": "decay",
    "momentum": "momentum",
    "weight_decay": "weight decay",
    "batch_size": "batch",
    "clip_norm": "clipping at norm",
}

GRAPH = {
    "neighbors": "neighbors",
    "sampled": "sampled",
    "participation": "participation",
    "link_failure": "link failure",
}


def setting_words(results: Results) -> str:
    """Clients, samples, model, rounds, optimizer and graphs."""
    groups = results.all_groups()
    samples = [
        str(round(float(group.first.train_counts.sum(axis=1).mean())))
        for group in groups
        if group.first.train_counts is not None
    ]
    augment = [str(_option(group, "data", "augment") or "none") for group in groups]
    parts = [
        _several([partition_words(group.first) for group in groups]),
        f"{_range([group.first.clients for group in groups])} clients",
        f"about {_several(samples)} training samples each" if samples else "",
        _several([str(_option(group, "model", "name")) for group in groups]),
        f"{_range([group.first.planned_rounds or 0 for group in groups])} rounds",
        _epoch_words(groups),
        *(_training_words(groups, key, word) for key, word in TRAINING.items()),
        "" if set(augment) == {"none"} else f"augmentation {_several(augment)}",
    ]
    return f"{', '.join(filter(None, parts))}. {_graph_words(groups)}"


def _epoch_words(groups: list[Group]) -> str:
    epochs = [_option(group, "run", "epoch_groups") for group in groups]
    return _several([f"{', '.join(map(str, some))} local epochs" for some in epochs if some])


def step_words(results: Results) -> str:
    """How much each method trained in all: equal rounds are not equal computation."""
    steps = [(group.method, numbers.whole(_steps(group))) for group in results.all_groups()]
    if len({count for _, count in steps}) == 1:
        return ""
    return f"Local steps of a run, all clients together: {_by_method(steps)}."


def evaluation_words(results: Results) -> str:
    """How late a target may be seen."""
    every = [
        (group.method, str(_option(group, "run", "evaluate_every") or 1))
        for group in results.all_groups()
    ]
    if {count for _, count in every} == {"1"}:
        return ""
    return (
        f"Evaluated every {_by_method(every)} rounds: a target counts as reached at the next "
        "evaluation."
    )


def _training_words(groups: list[Group], key: str, word: str) -> str:
    values = [(group.method, _shown(_option(group, "training", key))) for group in groups]
    if {value for _, value in values} == {"None"}:
        return "no clipping" if key == "clip_norm" else ""
    absent = "none" if key == "clip_norm" else "as lr"
    return f"{word} {_by_method(values).replace('None', absent)}"


def _by_method(values: Sequence[tuple[str, str]]) -> str:
    """The usual value, and in brackets who has another: “0.02 (0.01 for Local, OSGP)”."""
    methods: dict[str, list[str]] = {}
    for method, value in values:
        named = methods.setdefault(value, [])
        if method_title(method) not in named:
            named.append(method_title(method))
    if sum(len(named) for named in methods.values()) > len({method for method, _ in values}):
        return " / ".join(methods)  # a method has several: they differ between cases, too
    usual = max(methods, key=lambda value: len(methods[value]))
    others = [f"{value} for {', '.join(m)}" for value, m in methods.items() if value != usual]
    return f"{usual} ({'; '.join(others)})" if others else usual


def _steps(group: Group) -> float:
    return float(group.first.rounds["steps"].sum())


def _shown(value: Any) -> str:
    """A decay that was spread over more rounds has more digits than anybody reads."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _graph_words(groups: list[Group]) -> str:
    """Which methods ran on which topology; what its theory does not cover is said."""
    kinds: dict[str, list[str]] = {}
    for group in groups:
        options = group.first.topology_options
        shown = [f"{words} {options[key]}" for key, words in GRAPH.items() if key in options]
        kind = f"{group.first.topology} ({', '.join(shown)})" if shown else group.first.topology
        kinds.setdefault(kind, []).append(method_title(group.method))
    listed = "; ".join(f"{', '.join(dict.fromkeys(n))} on {k}" for k, n in kinds.items())
    pull = " On random_pull μ stays 1 and the paper's theorem does not apply."
    return f"{listed}.{pull if any(k.startswith('random_pull') for k in kinds) else ''}"


def _option(group: Group, section: str, key: str) -> Any:
    return group.first.config.get(section, {}).get(key)


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}–{high}"


def _several(values: list[str]) -> str:
    return " / ".join(dict.fromkeys(values))
