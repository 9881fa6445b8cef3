"""A run whose models give one answer to everything is told, and no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiverfl.results.groups import Group, group_runs
from quiverfl.results.report.clients import constant_answer_notes
from quiverfl.results.run_files import RunResult, read_run
from run_folders import Recipe, write_run

CLIENTS = 12
COUNTS = np.random.default_rng(0).integers(1, 9, (CLIENTS, 4))


def run_with(folder: Path, constant: int, stage: str = "local") -> RunResult:
    """A run in which so many clients score the share of a class in the last round."""
    write_run(folder, Recipe(clients=CLIENTS, rounds=3), finished=False)
    path = folder / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shares = COUNTS[:, 1] / COUNTS.sum(axis=1)
    for line in lines:
        if line["stage"] == stage and line["round"] == 2:
            line["metrics"]["accuracy"][:constant] = shares[:constant].tolist()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replace(read_run(folder), test_counts=COUNTS)


def groups(run: RunResult) -> list[Group]:
    return group_runs([run])


@pytest.mark.parametrize(("constant", "told"), [(12, True), (7, True), (6, False), (0, False)])
def test_more_than_half_of_the_clients(tmp_path: Path, constant: int, told: bool) -> None:
    notes = constant_answer_notes(groups(run_with(tmp_path / "run", constant)))
    assert [f"{constant} of 12 clients" in note for note in notes] == [True] * told


def test_after_communication_it_may_be_meant(tmp_path: Path) -> None:
    assert constant_answer_notes(groups(run_with(tmp_path / "run", 12, "mixed"))) == []


def test_who_has_one_class_is_not_counted(tmp_path: Path) -> None:
    one = np.zeros_like(COUNTS)
    one[:, 1] = 5
    run = replace(run_with(tmp_path / "run", 12), test_counts=one)
    assert constant_answer_notes(groups(run)) == []


def test_without_counts_nothing_is_said(tmp_path: Path) -> None:
    run = replace(run_with(tmp_path / "run", 12), test_counts=None)
    assert constant_answer_notes(groups(run)) == []
