"""Runs that are the same experiment with another seed belong together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quiverfl.experiment_keys import experiment_settings, flat
from quiverfl.results import palette
from quiverfl.results.palette import Style
from quiverfl.results.peer_runs import joined_peers
from quiverfl.results.run_files import RunResult
from quiverfl.results.summary import headline


@dataclass(frozen=True, eq=False)
class Group:
    """One experiment: a run for each seed, in the order of the seeds."""

    label: str
    runs: tuple[RunResult, ...]
    style: Style
    left_out: tuple[RunResult, ...] = ()
    """Further runs with a seed that is already here."""
    under_way: tuple[RunResult, ...] = ()
    """Runs that have not finished while another seed has: a mean over both would be of neither."""

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def title(self) -> str:
        """What the method is called; the label says what else sets the experiment apart."""
        return self.runs[0].title

    @property
    def first(self) -> RunResult:
        return self.runs[0]

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)


def group_runs(runs: Iterable[RunResult]) -> list[Group]:
    """The experiments among some runs: Quiver's methods in their order, then others by title.

    What the peers of one run recorded, each of itself, is one run.
    """
    sorted_groups = sorted(_together(joined_peers(runs)), key=lambda group: _place(group[0]))
    labels = _labels([group[0] for group in sorted_groups])
    styles = palette.styles([group[0].method for group in sorted_groups])
    return [
        _group(label, group, style)
        for label, style, group in zip(labels, styles, sorted_groups, strict=True)
    ]


def _place(run: RunResult) -> tuple[bool, int, str]:
    return run.order is None, run.order or 0, run.title.casefold()


def common_metric(groups: Sequence[Group]) -> str:
    """What most runs are judged by, the first of several; a run without it shows nothing."""
    found = [headline(run.history) for group in groups for run in group.runs if len(run.history)]
    return max(found, key=found.count, default="accuracy")


def _group(label: str, runs: list[RunResult], style: Style) -> Group:
    """The furthest run of each seed; counting one twice would make the seeds look closer.

    A run that diverged stays: leaving it out would keep the lucky seeds only.
    """
    furthest: dict[int, RunResult] = {}
    for run in sorted(runs, key=lambda run: (run.finished, run.done_rounds)):
        furthest[run.seed] = run
    kept = tuple(furthest[seed] for seed in sorted(furthest))
    over = tuple(run for run in kept if run.finished or run.diverged is not None) or kept
    return Group(
        label,
        over,
        style,
        left_out=tuple(run for run in runs if run not in kept),
        under_way=tuple(run for run in kept if run not in over),
    )


def settings(run: RunResult) -> dict[str, Any]:
    """What makes it this experiment, as `section.key`, with the topology that was used.

    What is not set is left out: a run of another version may not have the key.
    """
    used = flat(experiment_settings({**run.config, "topology": run.topology_options}))
    return {key: value for key, value in used.items() if value is not None}


def _together(runs: Iterable[RunResult]) -> list[list[RunResult]]:
    """Runs by experiment, as their folders name it; where one does not, all by their settings."""
    found = list(runs)
    named = all(run.experiment is not None for run in found)
    together: dict[str | None, list[RunResult]] = {}
    for run in found:
        key = run.experiment if named else json.dumps(settings(run), sort_keys=True, default=str)
        together.setdefault(key, []).append(run)
    return list(together.values())


def _labels(runs: list[RunResult]) -> list[str]:
    """The method's title, and what sets it apart where one comes more than once."""
    labels = []
    for run in runs:
        same = [settings(other) for other in runs if other.title == run.title]
        mine = settings(run)
        keys = sorted({key for other in same for key in {**other, **mine}})
        apart = [key for key in keys if any(other.get(key) != mine.get(key) for other in same)]
        words = ", ".join(_words(key, mine[key]) for key in apart if key in mine)
        labels.append(f"{run.title} ({words})" if words else run.title)
    return _numbered(labels)


def _words(key: str, value: Any) -> str:
    if key == "peers.mode":
        return f"peers, {value}"
    last = key.rsplit(".", 1)[-1]
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if last == "name" else f"{last} {text}"


def _numbered(labels: list[str]) -> list[str]:
    """Labels are told apart by a number where nothing else does."""
    return [
        label if labels.count(label) == 1 else f"{label} #{labels[: position + 1].count(label)}"
        for position, label in enumerate(labels)
    ]
