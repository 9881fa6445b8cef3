"""Successive halving: who runs on, what is repeated, and when a choice is inside the noise."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.paper.reproduce.catalogue import configs_folder
from quiverfl.runs.config import parse_config
from quiverfl.sweeps.plan import Cell, Sweep, SweepFolder, load_sweep
from quiverfl.sweeps.tune import (
    ONLY_THE_GRAPH,
    Rules,
    fit_decay,
    make_brackets,
    paired_difference,
    rank_tries,
    run_brackets,
    rung_round,
)
from run_folders import Recipe, history_lines, round_lines, write_lines, write_run

ROUNDS = 12


def cells(
    rates: Sequence[float], seeds: Sequence[int] = (0,), method: str = "dfedpgp", every: int = 3
) -> list[Cell]:
    return [
        Cell(
            parse_config(
                {
                    "data": {"validation": 0.2},
                    "method": {"name": method},
                    "training": {"lr": lr},
                    "run": {"seed": seed, "rounds": ROUNDS, "evaluate_every": every},
                }
            ),
            "a",
            (("training.lr", lr),),
        )
        for lr in rates
        for seed in seeds
    ]


class Written:
    """Stands in for the training: writes the run that a cell would come to, and remembers it."""

    def __init__(self, places: SweepFolder, level: Mapping[float, float]) -> None:
        self.places, self.level = places, level
        self.asked: list[dict[float, int]] = []

    def __call__(self, until: Mapping[str, int], some: Sequence[Cell]) -> None:
        self.asked.append({cell.config.training.lr: until[cell.name] for cell in some})
        for cell in some:
            folder = self.places.run(cell)
            level, seed = self.level[cell.config.training.lr], cell.config.run.seed
            recipe = Recipe(level=level, rounds=ROUNDS, seed=seed)
            if not folder.exists():
                write_run(folder, recipe, finished=False)
            for name, lines in (("history", history_lines), ("rounds", round_lines)):
                reached = [line for line in lines(recipe) if line["round"] < until[cell.name]]
                write_lines(folder / f"{name}.jsonl", reached)
            if until[cell.name] == ROUNDS:
                (folder / "summary.json").write_text(json.dumps({"finished": True}))


def test_the_worse_tries_are_dropped_at_every_rung(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    levels = {0.1: 0.9, 0.2: 0.6, 0.3: 0.5, 0.4: 0.4, 0.5: 0.3, 0.6: 0.2}
    run, rules = Written(places, levels), Rules((0.25, 0.5), 0.34)
    (found,) = make_brackets(cells(list(levels)), places, "local")
    run_brackets([found], rules, run)
    assert run.asked[0] == dict.fromkeys(levels, 3)
    assert set(run.asked[1]) == {0.1, 0.2, 0.3}  # ⌈0.34 · 6⌉
    assert set(run.asked[1].values()) == {6}
    assert run.asked[2] == {0.1: 12, 0.2: 12}  # at least two
    ranked = rank_tries(found, rules)
    assert [dict(one.point)["training.lr"] for one in ranked] == list(levels)
    assert [one.rounds for one in ranked] == [12, 12, 6, 3, 3, 3]
    assert not ranked[1].inside_the_noise
    assert ranked[1].behind == pytest.approx(0.3, abs=0.05)


def test_what_is_too_close_is_repeated_with_the_next_seed_and_then_said(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    levels = {0.1: 0.6, 0.2: 0.6, 0.3: 0.3}
    run, rules = Written(places, levels), Rules((), 0.34)
    (found,) = make_brackets(cells(list(levels), seeds=(0, 1, 2)), places, "local")
    run_brackets([found], rules, run)
    assert [set(asked) for asked in run.asked] == [{0.1, 0.2, 0.3}, {0.1, 0.2}, {0.1, 0.2}]
    best, second, third = rank_tries(found, rules)
    assert (best.seeds, second.seeds, third.seeds) == (3, 3, 1)
    assert second.inside_the_noise
    assert not third.inside_the_noise


def test_a_clear_winner_is_not_repeated(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    run = Written(places, {0.1: 0.6, 0.2: 0.3})
    (found,) = make_brackets(cells([0.1, 0.2], seeds=(0, 1)), places, "local")
    run_brackets([found], Rules(()), run)
    assert len(run.asked) == 1


def test_nothing_is_run_twice(tmp_path: Path) -> None:
    places, levels = SweepFolder(tmp_path), {0.1: 0.6, 0.2: 0.3}
    first, again = Written(places, levels), Written(places, levels)
    for run in (first, again):
        (found,) = make_brackets(cells([0.1, 0.2]), places, "local")
        run_brackets([found], Rules((0.5,)), run)
    assert first.asked
    assert again.asked == []


def test_a_try_that_diverged_is_never_chosen(tmp_path: Path) -> None:
    places, rules = SweepFolder(tmp_path), Rules(())
    run = Written(places, {0.1: 0.3, 0.2: 0.9})
    some = cells([0.1, 0.2])
    run({cell.name: ROUNDS for cell in some}, some)
    lost = {"finished": False, "diverged": {"round": 11, "client": 0}}
    (places.run(some[1]) / "summary.json").write_text(json.dumps(lost))
    (found,) = make_brackets(some, places, "local")
    run_brackets([found], rules, run)
    best, second = rank_tries(found, rules)
    assert dict(best.point)["training.lr"] == 0.1
    assert second.diverged
    assert math.isnan(second.score)


def test_the_error_is_paired_by_client_and_by_seed() -> None:
    """Scores of ±1 around 2 have a standard error of √(4/3)/2; seeds that differ have a larger."""
    one = np.array([1.0, 3.0, 1.0, 3.0])
    mean, error = paired_difference([one], [0])
    assert mean == 2
    assert error == pytest.approx(math.sqrt(4 / 3) / 2)
    mean, error = paired_difference([np.full(4, 1.0), np.full(4, 3.0)], [0, 1])
    assert mean == 2
    assert error == pytest.approx(math.sqrt(2) / math.sqrt(2))


def test_a_rung_ends_where_something_is_evaluated() -> None:
    (cell,) = cells([0.1], every=5)
    assert [rung_round(cell, share) for share in (0.1, 0.42, 0.5, 0.9, 1.0)] == [5, 10, 10, 12, 12]


def test_methods_that_differ_in_the_graph_alone_need_the_same_grid(tmp_path: Path) -> None:
    places = SweepFolder(tmp_path)
    same = cells([0.1, 0.2]) + cells([0.1, 0.2], method="dfedavgmp")
    found = make_brackets(same, places, "local")
    assert [one.methods for one in found] == [
        ("dfedpgp",),
        ("dfedavgmp",),
        ("dfedavgmp", "dfedpgp"),
    ]
    assert len(found[2].cells((("training.lr", 0.1),), 1)) == 2
    with pytest.raises(QuiverError, match="their grids differ"):
        make_brackets(cells([0.1, 0.2]) + cells([0.1, 0.3], method="dfedavgmp"), places, "local")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"rungs": [0.5, 1.5]}, "tuning.rungs"),
        ({"rungs": 0.5}, "tuning.rungs"),
        ({"keep": 0}, "tuning.keep"),
        ({"keeps": 0.5}, "no key 'keeps'"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused(written: dict[str, object], words: str) -> None:
    with pytest.raises(QuiverError, match=words):
        Rules.read(written)


def test_the_medium_scale_is_tuned_fairly() -> None:
    tuning = load_sweep(configs_folder() / "sweeps" / "tuning_medium.toml")
    tries: dict[str, set[object]] = {}
    for one in tuning.cells:
        tries.setdefault(one.config.method.name, set()).add(one.point)
    assert len(tries) == 11
    assert {len(points) for points in tries.values()} == {8}
    assert all(tries[one] == tries[other] for one, other in ONLY_THE_GRAPH)
    assert {one.config.data.validation for one in tuning.cells} == {0.2}
    assert min(one.config.run.seed for one in tuning.cells) >= 1000
    for one in tuning.cells:
        assert rung_round(one, 0.25) == one.config.run.rounds // 4


PLAN = """
seeds = [7]
methods = ["fedavg"]
[base.data]
validation = 0.2
clients = 5
samples_per_client = 20
[base.model]
hidden = [4]
[base.run]
rounds = 4
evaluate_every = 2
[tuning]
rungs = [0.5]
keep = 0.5
[grid]
training.lr = [0.00001, 0.3, 0.31]
"""


def test_the_command_races_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    rates = tmp_path / "rates.toml"
    words = ["tune", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs")]
    words += ["--no-estimate", "--json", "--write", str(rates)]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout)
    (contest,) = told["contests"]
    assert [one["rounds"] for one in contest["tries"]] == [4, 4, 2]
    assert contest["tries"][2]["point"] == {"training.lr": 0.00001}
    assert told["budget"]["rounds"] < told["budget"]["rounds_of_the_whole_grid"] == 12
    chosen = tomllib.loads(rates.read_text())["overrides"]["fedavg"]["training"]["lr"]
    assert chosen == contest["tries"][0]["point"]["training.lr"]
    assert json.loads(CliRunner().invoke(app, words).stdout) == told


def test_rates_decay_over_a_race_as_over_the_runs_they_are_for() -> None:
    config = parse_config({"data": {"validation": 0.2}, "training": {"lr": 0.1, "lr_decay": 0.9}})
    short, long = (config.with_values([("run.rounds", rounds)]) for rounds in (20, 60))
    plan = Sweep("a race", (Cell(short), Cell(long)), {"rounds": 60})
    one, other = (cell.config.training for cell in fit_decay(plan).cells)
    assert one.lr_decay == pytest.approx(0.9**3)
    assert one.lr == other.lr == 0.1
    assert other.lr_decay == pytest.approx(0.9)
    assert fit_decay(Sweep("a race", plan.cells, {})).cells == plan.cells


@pytest.mark.parametrize("rounds", [0, 1.5, True, "60"])
def test_rounds_that_are_none_are_refused(rounds: object) -> None:
    with pytest.raises(QuiverError, match=r"tuning\.rounds = .*number of rounds"):
        Rules.read({"rounds": rounds})
