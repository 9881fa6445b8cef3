"""Which runs may be compared: those on the same data, partitioned alike, with the same model.

They make a case, a column of a paper's table. Settings alone do not decide: a table may have been
edited under the same name, and another version may share the same data out otherwise. What run
folders recorded of both is compared wherever it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from quiverfl.identity import flatten_settings, select_experiment_settings
from quiverfl.results import palette
from quiverfl.results.palette import Style
from quiverfl.results.run_files import Counts, RunResult
from quiverfl.results.summary import headline_metric

if TYPE_CHECKING:
    import pandas as pd


SECTIONS = ("data.", "model.", "task.")
NOT_OF_A_CASE = frozenset({"model.personal", "model.kernels"})
"""Which part of the same model is personal is the method's, and how it is computed nobody's."""
OPTIONS = ("data.options.", "model.")
"""Keys that are written only where somebody set them. A run of another version may lack others."""


def experiment_settings(run: RunResult) -> dict[str, Any]:
    """What makes it this experiment, as `section.key`, with the topology that was used.

    What is not set is left out: a run of another version may not have the key.
    """
    used = flatten_settings(
        select_experiment_settings({**run.config, "topology": run.topology_options})
    )
    return {key: value for key, value in used.items() if value is not None}


def is_of_case(key: str) -> bool:
    """Whether this setting decides which runs may be compared."""
    return key.startswith(SECTIONS) and key not in NOT_OF_A_CASE


def case_settings(run: RunResult) -> dict[str, Any]:
    """The settings that decide which runs it may be compared with, as `section.key`."""
    written = flatten_settings(select_experiment_settings(run.config))
    return {
        key: value
        for key, value in written.items()
        if is_of_case(key) and not (value is None and key.startswith(OPTIONS))
    }


def are_comparable(run: RunResult, other: RunResult) -> bool:
    """Whether both are of one case; with the same seed the partition must be the same, too."""
    if not (_agree(case_settings(run), case_settings(other)) and have_same_inputs(run, other)):
        return False
    return run.seed != other.seed or have_same_partition(run, other)


def have_same_inputs(run: RunResult, other: RunResult) -> bool:
    """Whether the recorded digests of the data, and of a model of one's own, are the same."""
    mine, theirs = _inputs(run), _inputs(other)
    return all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys())


def have_same_partition(run: RunResult, other: RunResult) -> bool:
    """Whether every client has the same samples, as far as both folders say."""
    counted = ((run.train_counts, other.train_counts), (run.test_counts, other.test_counts))
    for mine, theirs in counted:
        if mine is not None and theirs is not None and not np.array_equal(mine, theirs):
            return False
    if run.member or other.member:  # one peer's file may have its own client alone
        return True
    mine_samples, their_samples = run.partition_digests, other.partition_digests
    common = mine_samples.keys() & their_samples.keys()
    return all(mine_samples[name] == their_samples[name] for name in common)


def number_cases(experiments: Sequence[Sequence[RunResult]]) -> list[int]:
    """The case of every experiment, given as its runs; cases are counted in the order they come."""
    cases: list[list[Sequence[RunResult]]] = []
    numbers = []
    for runs in experiments:
        number = next(
            (
                number
                for number, members in enumerate(cases)
                if all(_are_of_one_case(runs, member) for member in members)
            ),
            len(cases),
        )
        if number == len(cases):
            cases.append([])
        cases[number].append(runs)
        numbers.append(number)
    return numbers


def name_cases(examples: Sequence[RunResult]) -> list[str]:
    """What sets every case apart, from one run of each; nothing where there is one case."""
    if len(examples) < 2:
        return [""] * len(examples)
    written = [{**case_settings(run), "data.seed": _data_seed(run)} for run in examples]
    keys = dict.fromkeys(key for one in written for key in one)
    apart = [key for key in keys if any(one.get(key) != written[0].get(key) for one in written)]
    named = [
        ", ".join(setting_words(key, one[key]) for key in apart if one.get(key) is not None)
        for one in written
    ]
    return number_duplicates([name or "data" for name in named])


def case_order(run: RunResult) -> tuple[tuple[str, float, str], ...]:
    """Sorts cases by their settings, numbers as numbers."""
    settings = {**case_settings(run), "data.seed": _data_seed(run)}
    return tuple((key, *_sort_key(value)) for key, value in sorted(settings.items()))


def setting_words(key: str, value: Any) -> str:
    """A setting as part of a name: names speak for themselves, other values need their key."""
    if key == "peers.mode":
        return f"peers, {value}"
    last = key.rsplit(".", 1)[-1]
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if last == "name" or key == "data.partition" else f"{last} {text}"


def number_duplicates(labels: Sequence[str]) -> list[str]:
    """Labels are told apart by a number where nothing else does."""
    return [
        label if labels.count(label) == 1 else f"{label} #{labels[: position + 1].count(label)}"
        for position, label in enumerate(labels)
    ]


def _are_of_one_case(runs: Sequence[RunResult], others: Sequence[RunResult]) -> bool:
    """Whether two experiments are: seeds that both have must have the same partition."""
    if not are_comparable(runs[0], others[0]):
        return False
    by_seed = {run.seed: run for run in others}
    return all(have_same_partition(run, by_seed[run.seed]) for run in runs if run.seed in by_seed)


def _agree(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    optional = {key for key in mine.keys() ^ theirs.keys() if key.startswith(OPTIONS)}
    return not optional and all(mine[key] == theirs[key] for key in mine.keys() & theirs.keys())


def _inputs(run: RunResult) -> dict[str, str]:
    model = str(run.config.get("model", {}).get("name"))
    return {
        name: digest
        for name, digest in run.inputs.items()
        if name.startswith("data ") or name == f"code of {model}"
    }


def _sort_key(value: Any) -> tuple[float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), ""
    return float("-inf"), str(value)


# What several peers recorded of one run, put together: each knows its own client and no other.


ADDED = ("sent_bytes", "received_bytes", "network_bytes", "active", "steps")
SMALLEST = ("mu_min",)
"""The largest of the others counts: the slowest peer ends the round."""


def join_peers(runs: Iterable[RunResult]) -> list[RunResult]:
    """The same runs, with the peers of one run and seed as one, in the place of the first."""
    by_run: dict[object, list[RunResult]] = {}
    for run in runs:
        name = run.member.get("run")
        key = (name, run.experiment, run.seed) if name is not None else run.path
        by_run.setdefault(key, []).append(run)
    return [_join_run(peers) if peers[0].member else peers[0] for peers in by_run.values()]


def _join_run(peers: Sequence[RunResult]) -> RunResult:
    import pandas as pd

    own = [run.history[run.history["client"] == run.member["number"]] for run in peers]
    history = pd.concat(own, ignore_index=True).sort_values(
        ["round", "stage", "client"], ignore_index=True
    )
    return replace(
        peers[0],
        history=history.drop_duplicates(["round", "stage", "client"], ignore_index=True),
        rounds=_join_rounds([run.rounds for run in peers]),
        train_counts=_join_counts([run.train_counts for run in peers]),
        test_counts=_join_counts([run.test_counts for run in peers]),
        finished=all(run.finished for run in peers),
        diverged=next((run.diverged for run in peers if run.diverged is not None), None),
    )


def _join_rounds(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    whole = pd.concat(frames, ignore_index=True)
    how = {
        name: "sum" if name in ADDED else "min" if name in SMALLEST else "max"
        for name in whole.columns
        if name != "round"
    }
    together: pd.DataFrame = whole.groupby("round", as_index=False).agg(how)
    return together


def _join_counts(known: Sequence[Counts | None]) -> Counts | None:
    """A peer knows how the run's data set is partitioned, or its own rows alone.

    One that has joined later knows more rows.
    """
    present = [counts for counts in known if counts is not None]
    if not present:
        return None
    rows, columns = np.max([counts.shape for counts in present], axis=0)
    wide = [np.pad(c, ((0, rows - c.shape[0]), (0, columns - c.shape[1]))) for c in present]
    largest: Counts = np.maximum.reduce(wide)
    return largest


# Runs that are the same experiment with another seed belong together.
#
# Experiments on the same data, partition and model are a case (see `cases`).


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
    case: str = ""
    """What sets its data, partition or model apart from those of others; "" if nothing does."""
    case_position: int = 0
    """The place of its case among all cases."""
    name: str = ""
    """What it is called beside others of its case; the label is its name among all."""

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
    experiments, positions, case_names = _sort_experiments(_group_by_experiment(join_peers(runs)))
    firsts, cases = [own[0] for own in experiments], [case_names[p] for p in positions]
    styles = palette.assign_styles([run.method for run in firsts])
    names = _name_experiments(firsts, cases)
    return [
        _make_group(own, label, name, style, case_names[position], position)
        for own, position, (name, label), style in zip(
            experiments, positions, names, styles, strict=True
        )
    ]


def split_by_case(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Experiments that may be compared, by the name of their case."""
    sorted_groups = sorted(groups, key=lambda group: group.case_position)
    cases = dict.fromkeys(group.case for group in sorted_groups)
    return {case: [group for group in groups if group.case == case] for case in cases}


def name_alike(groups: Sequence[Group]) -> list[Group]:
    """The groups by their names, which look the same in every case."""
    styles = {group.name: group.style for group in reversed(groups)}
    return [replace(group, label=group.name, style=styles[group.name]) for group in groups]


def _method_position(run: RunResult) -> tuple[bool, int, str]:
    return run.order is None, run.order or 0, run.title.casefold()


def common_metric(groups: Sequence[Group]) -> str:
    """What most runs are judged by, the first of several; a run without it shows nothing."""
    metrics = [
        headline_metric(run.history) for group in groups for run in group.runs if len(run.history)
    ]
    return max(metrics, key=metrics.count, default="accuracy")


def _make_group(
    runs: list[RunResult], label: str, name: str, style: Style, case: str, case_position: int
) -> Group:
    """The furthest run of each seed; counting one twice would make the seeds look closer.

    A run that diverged stays: leaving it out would keep the lucky seeds only.
    """
    furthest: dict[int, RunResult] = {}
    for run in sorted(runs, key=lambda run: (run.finished, run.done_rounds)):
        furthest[run.seed] = run
    one_each = tuple(furthest[seed] for seed in sorted(furthest))
    over = tuple(run for run in one_each if run.finished or run.diverged is not None) or one_each
    return Group(
        label,
        over,
        style,
        left_out=tuple(run for run in runs if run not in one_each),
        under_way=tuple(run for run in one_each if run not in over),
        case=case,
        case_position=case_position,
        name=name,
    )


def _group_by_experiment(runs: Iterable[RunResult]) -> list[list[RunResult]]:
    """Runs by experiment, as their folders name it; where one does not, all by their settings.

    Runs with other data under the same name are another experiment.
    """
    listed = list(runs)
    named = all(run.experiment is not None for run in listed)
    together: dict[str | None, list[list[RunResult]]] = {}
    for run in listed:
        key = (
            run.experiment
            if named
            else json.dumps(experiment_settings(run), sort_keys=True, default=str)
        )
        of_key = together.setdefault(key, [])
        same = (group for group in of_key if all(have_same_inputs(run, other) for other in group))
        group = next(same, None)
        if group is None:
            of_key.append([run])
        else:
            group.append(run)
    groups = [group for of_key in together.values() for group in of_key]
    return [part for group in groups for part in _split_by_partition(group)]


def _split_by_partition(runs: list[RunResult]) -> list[list[RunResult]]:
    """Part the runs of an experiment by `data.seed` where one run seed has several of them.

    Their partitions differ, so they are no repetitions: one of them would stand for all.
    """
    pairs = {(run.seed, _data_seed(run)) for run in runs}
    if len(pairs) == len({seed for seed, _ in pairs}):
        return [runs]
    parts: dict[Any, list[RunResult]] = {}
    for run in runs:
        parts.setdefault(_data_seed(run), []).append(run)
    return list(parts.values())


def _data_seed(run: RunResult) -> Any:
    """The seed of the partition; None where it is the run's own."""
    return run.config.get("data", {}).get("seed")


def _sort_experiments(
    experiments: Sequence[list[RunResult]],
) -> tuple[list[list[RunResult]], list[int], list[str]]:
    """Methods in their order, each by its cases.

    Returns the experiments, the position of each one's case, and the names of the cases.
    """
    numbers = number_cases(experiments)
    examples = {number: runs[0] for number, runs in zip(numbers, experiments, strict=True)}
    sorted_numbers = sorted(examples, key=lambda number: case_order(examples[number]))
    names = name_cases([examples[number] for number in sorted_numbers])
    pairs = sorted(
        zip(experiments, map(sorted_numbers.index, numbers), strict=True),
        key=lambda pair: (*_method_position(pair[0][0]), pair[1]),
    )
    return [runs for runs, _ in pairs], [position for _, position in pairs], names


def _name_experiments(runs: Sequence[RunResult], cases: Sequence[str]) -> list[tuple[str, str]]:
    """What an experiment is called within its case, and among all of them.

    Its method's title, and what sets it apart from experiments of the same title and case. A
    setting that does so in one case is named in all.
    """
    words = [_distinguishing_words(run, runs, cases) for run in runs]
    names = [_add_words(run.title, own) for run, own in zip(runs, words, strict=True)]
    for case in set(cases):
        places = [place for place, other in enumerate(cases) if other == case]
        numbered = number_duplicates([names[place] for place in places])
        for place, name in zip(places, numbered, strict=True):
            names[place] = name
    labels = [
        _add_words(run.title, case if _is_in_several(run.title, runs, cases) else "", own)
        for run, case, own in zip(runs, cases, words, strict=True)
    ]
    return list(zip(names, number_duplicates(labels), strict=True))


def _add_words(title: str, *words: str) -> str:
    said = ", ".join(filter(None, words))
    return f"{title} ({said})" if said else title


def _is_in_several(title: str, runs: Sequence[RunResult], cases: Sequence[str]) -> bool:
    return len({case for run, case in zip(runs, cases, strict=True) if run.title == title}) > 1


def _distinguishing_words(run: RunResult, runs: Sequence[RunResult], cases: Sequence[str]) -> str:
    mine = experiment_settings(run)
    by_case: dict[str, list[dict[str, Any]]] = {}
    for other, case in zip(runs, cases, strict=True):
        if other.title == run.title:
            by_case.setdefault(case, []).append(experiment_settings(other))
    keys = {key for same in by_case.values() for one in same for key in one}
    apart = [
        key
        for key in sorted(keys)
        if not is_of_case(key)
        and any(one.get(key) != same[0].get(key) for same in by_case.values() for one in same)
    ]
    return ", ".join(setting_words(key, mine[key]) for key in apart if key in mine)
