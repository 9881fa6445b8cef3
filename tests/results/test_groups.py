"""Which runs are one experiment, what it is called and what it looks like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quiverfl.results import palette
from quiverfl.results.groups import group_runs
from quiverfl.results.palette import Style
from quiverfl.results.report.page import make_report
from quiverfl.results.run_files import RunResult, find_runs, read_run
from quiverfl.results.scores import find_group
from quiverfl.results.tables import comparison_table
from run_folders import Recipe, write_comparison, write_exact, write_json, write_run


def test_the_same_experiment_run_twice_with_a_seed_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "crashed", finished=False)
    write_run(tmp_path / "again")
    (group,) = group_runs(find_runs([tmp_path]))
    assert [run.path.name for run in group.runs] == ["again"]
    assert [run.path.name for run in group.left_out] == ["crashed"]


def test_two_settings_of_one_method_are_told_apart(tmp_path: Path) -> None:
    for name in ("random_push", "random_pull"):
        for neighbors in (2, 5):
            topology = {"name": name, "neighbors": neighbors}
            write_run(tmp_path / f"{name}{neighbors}", Recipe(topology=topology, rounds=2))
    groups = group_runs(find_runs([tmp_path]))
    assert [group.label for group in groups] == [
        "DFedPGP (random_pull, neighbors 2)",
        "DFedPGP (random_pull, neighbors 5)",
        "DFedPGP (random_push, neighbors 2)",
        "DFedPGP (random_push, neighbors 5)",
    ]
    assert len({group.style.color for group in groups}) == 4


def test_labels_leave_out_what_is_not_set_and_round_what_nobody_typed(tmp_path: Path) -> None:
    for name, options in (("plain", {"p": None}), ("set", {"p": 0.9989954712917512})):
        write_run(tmp_path / name, Recipe(topology={"name": "erdos_renyi", **options}, rounds=2))
    labels = {group.label for group in group_runs(find_runs([tmp_path]))}
    assert labels == {"DFedPGP", "DFedPGP (p 0.998995)"}


def test_threads_do_not_make_another_experiment(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Recipe(rounds=2, seed=0))
    folder = write_run(tmp_path / "b", Recipe(rounds=2, seed=1))
    config = (folder / "config.json").read_text().replace('"threads": 2', '"threads": 7')
    (folder / "config.json").write_text(config)
    (group,) = group_runs(find_runs([tmp_path]))
    assert group.seeds == (0, 1)
    assert group.label == "DFedPGP"


def test_a_run_whose_data_lie_elsewhere_is_the_same_experiment(tmp_path: Path) -> None:
    for seed, root in enumerate(("here", "there")):
        folder = tmp_path / root
        write_exact(folder, "fedavg", seed, [[0.4, 0.6], [0.7, 0.9]], [[0.1, 0.1], [0.2, 0.4]])
        config = json.loads((folder / "config.json").read_text())
        config["config"]["data"]["root"] = root
        (folder / "config.json").write_text(json.dumps(config))
    (group,) = group_runs(find_runs([tmp_path]))
    assert group.seeds == (0, 1)


def test_runs_are_one_experiment_where_their_folders_say_so(tmp_path: Path) -> None:
    for seed, (name, level) in enumerate([("one", 1), ("one", 2), ("two", 1)]):
        folder = write_run(tmp_path / str(seed), Recipe(rounds=2, seed=seed))
        written = json.loads((folder / "config.json").read_text())
        written["config"]["model"]["depth"] = level
        write_json(folder / "config.json", {**written, "experiment": name})
    assert [group.seeds for group in group_runs(find_runs([tmp_path]))] == [(0, 1), (2,)]


@pytest.mark.parametrize(
    "key", ["gradients", "executor", "keep_local", "device", "threads", "checkpoint_every"]
)
def test_older_folders_and_newer_ones_are_put_together_by_their_settings(
    tmp_path: Path, key: str
) -> None:
    for seed in (0, 1):
        topology = {"name": "ring", "participation": 0.5, "participation_seed": seed}
        folder = write_run(tmp_path / str(seed), Recipe(topology=topology, rounds=2, seed=seed))
        written = json.loads((folder / "config.json").read_text())
        written["config"]["run"][key] = seed
        if seed:
            written["experiment"] = "of the newer one"
        write_json(folder / "config.json", written)
    (group,) = group_runs(find_runs([tmp_path]))
    assert (group.seeds, group.label) == ((0, 1), "DFedPGP")


def test_methods_come_in_the_order_of_the_paper_and_keep_their_colour(tmp_path: Path) -> None:
    groups = group_runs(find_runs([write_comparison(tmp_path / "c", rounds=2)]))
    assert [group.label for group in groups] == ["Local", "FedAvg", "DFedPGP"]
    alone = group_runs(find_runs([tmp_path / "c" / "dfedpgp-0"]))
    assert alone[0].style == groups[2].style


@pytest.mark.parametrize("name", ["dis-pfl", "Dis_PFL", "dispfl"])
def test_a_folder_without_a_title_is_called_as_the_first_version_did(
    tmp_path: Path, name: str
) -> None:
    (group,) = group_runs([read_run(write_run(tmp_path / "a", Recipe(name, rounds=2)))])
    assert group.label == "Dis-PFL"
    (own,) = group_runs([read_run(write_run(tmp_path / "b", Recipe("mine:MyOwn", rounds=2)))])
    assert own.label == "MyOwn"


def titled(folder: Path, name: str, title: str, order: int | None) -> RunResult:
    written = json.loads((write_run(folder, Recipe(name, rounds=2)) / "config.json").read_text())
    said = {"name": name, "title": title, "order": order}
    write_json(folder / "config.json", {**written, "experiment": folder.name, "method": said})
    return read_run(folder)


def test_titles_and_their_order_are_those_the_runs_wrote(tmp_path: Path) -> None:
    runs = [
        titled(tmp_path / "a", "mine:Mine", "zeta", None),
        titled(tmp_path / "b", "dfedpgp", "DFedPGP (PGP)", 7),
        titled(tmp_path / "c", "mine:Other", "Alpha", None),
        titled(tmp_path / "d", "brandnew", "BrandNew+", 3),
    ]
    groups = group_runs(runs)
    labels = ["BrandNew+", "DFedPGP (PGP)", "Alpha", "zeta"]
    assert [group.label for group in groups] == labels
    assert [row[0].text for row in comparison_table(groups).rows] == labels
    assert "BrandNew+" in make_report(groups)
    for name in ("Alpha", "mine:Other"):
        assert find_group(groups, name) is groups[2]


def test_two_methods_of_one_title_are_told_apart_by_their_names(tmp_path: Path) -> None:
    runs = [titled(tmp_path / n, f"{n}:Mine", "Mine", None) for n in ("a", "b")]
    assert [group.label for group in group_runs(runs)] == ["Mine (a:Mine)", "Mine (b:Mine)"]


def test_methods_of_the_paper_keep_their_style_and_others_take_what_is_free() -> None:
    paper = {"fedavg": Style("#0072B2", "s"), "dfedpgp": Style("#D55E00", "o")}
    assert palette.assign_styles([*paper]) == list(paper.values())
    many = ["a", "fedavg", "b", "dfedpgp", *(f"own{i}" for i in range(26))]
    given = palette.assign_styles(many)
    assert given == palette.assign_styles(many)
    assert (given[1], given[3]) == tuple(paper.values())
    assert len(set(given)) == len(many)
    assert len({style.color for style in given[:13]}) == 13
    assert {style.marker for style in given} <= set(palette.GLYPHS)
    assert len(palette.assign_styles([f"own{i}" for i in range(400)])) == 400


def test_a_mean_over_seeds_waits_for_those_under_way_but_not_for_diverged_ones(
    tmp_path: Path,
) -> None:
    write_exact(tmp_path / "over", "fedavg", 0, [[0.5], [0.7]], [[0.5], [0.6]])
    write_exact(tmp_path / "begun", "fedavg", 1, [[0.1], [0.1]], [[0.1], [0.1]])
    (tmp_path / "begun" / "summary.json").unlink()
    (group,) = group_runs(find_runs([tmp_path]))
    assert (group.seeds, [run.seed for run in group.under_way]) == ((0,), [1])
    table = comparison_table([group])
    assert table.rows[0][1].text == "70.00"
    assert "FedAvg (seed 1) has not finished: 2 of 2 rounds, and is left out." in table.caption
    lost = {"finished": False, "diverged": {"round": 1, "client": 0}}
    write_json(tmp_path / "begun" / "summary.json", lost)
    (group,) = group_runs(find_runs([tmp_path]))
    assert (group.seeds, group.under_way) == ((0, 1), ())
