"""Tables: exact numbers, pairing by seed and client, and every format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from quiverfl.errors import QuiverError
from quiverfl.results import formatting as numbers
from quiverfl.results import formatting as table_formats
from quiverfl.results.groups import Group, group_runs
from quiverfl.results.run_files import find_runs
from quiverfl.results.scores import compare_groups, rounds_to_target
from quiverfl.results.statistics import paired_differences
from quiverfl.results.tables import (
    comparison_table,
    difference_table,
    print_comparison,
    target_table,
)
from run_folders import ALONE, STAR, Recipe, write_exact, write_json, write_run


@pytest.fixture
def groups(tmp_path: Path) -> list[Group]:
    write_exact(tmp_path / "a0", "fedavg", 0, [[0.4, 0.6], [0.7, 0.9]], [[0.1, 0.1], [0.2, 0.4]])
    write_exact(tmp_path / "a1", "fedavg", 1, [[0.4, 0.6], [0.6, 0.8]], [[0.1, 0.1], [0.2, 0.4]])
    write_exact(tmp_path / "l0", "local", 0, [[0.5, 0.5], [0.5, 0.7]], [[0.5, 0.5], [0.5, 0.7]])
    write_exact(tmp_path / "l1", "local", 1, [[0.5, 0.5], [0.5, 0.6]], [[0.5, 0.5], [0.5, 0.6]])
    return group_runs(find_runs([tmp_path]))


def row_of(frame: pd.DataFrame, label: str) -> dict[str, Any]:
    found = frame[frame["label"] == label]
    assert len(found) == 1
    return {str(key): value for key, value in found.iloc[0].items()}


def test_seeds_are_one_row_with_mean_and_spread_over_seeds(groups: list[Group]) -> None:
    row = row_of(compare_groups(groups), "FedAvg")
    assert row["seeds"] == 2
    assert row["local_mean"] == pytest.approx(0.75)
    assert row["local_mean_seed_std"] == pytest.approx(np.std([0.8, 0.7], ddof=1))
    assert row["local_client_std"] == pytest.approx(0.1)
    assert row["local_worst10"] == pytest.approx(0.65)
    assert row["mixed_mean"] == pytest.approx(0.3)


def test_the_gap_to_local_is_paired_by_client_and_seed(groups: list[Group]) -> None:
    frame = compare_groups(groups)
    row = row_of(frame, "FedAvg")
    by_seed = [np.mean([0.7 - 0.5, 0.9 - 0.7]), np.mean([0.6 - 0.5, 0.8 - 0.6])]
    assert row["local_gap"] == pytest.approx(np.mean(by_seed))
    assert row["local_gap_seed_std"] == pytest.approx(np.std(by_seed, ddof=1))
    assert row["mixed_gap"] == pytest.approx(np.mean([-0.3, -0.25]))
    assert np.isnan(row_of(frame, "Local")["local_gap"])


def test_a_local_run_on_other_data_is_no_base_for_a_gap(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Recipe("fedavg", STAR, clients=12))
    write_run(tmp_path / "b", Recipe("local", ALONE, clients=10))
    frame = compare_groups(group_runs(find_runs([tmp_path])))
    assert np.isnan(row_of(frame, "FedAvg")["local_gap"])


def test_weighting_by_test_samples(groups: list[Group]) -> None:
    row = row_of(compare_groups(groups, weighting="samples"), "FedAvg")
    seeds = [(3 * 0.7 + 0.9) / 4, (3 * 0.6 + 0.8) / 4]
    assert row["local_mean"] == pytest.approx(np.mean(seeds))


def test_costs_are_per_run(groups: list[Group]) -> None:
    row = row_of(compare_groups(groups), "FedAvg")
    # Two rounds, both clients sampled, 40 kB up and 40 kB down for each, 30 steps each.
    assert (row["bytes"], row["busiest_bytes"], row["steps"]) == (320_000, 160_000, 120)
    assert row_of(compare_groups(groups), "Local")["bytes"] == 0


def test_rounds_to_target_count_from_one_and_speed_up_is_over_the_slowest(
    groups: list[Group],
) -> None:
    frame = rounds_to_target(groups, 0.5)
    assert row_of(frame, "FedAvg")["rounds"] == 1
    assert row_of(frame, "Local")["rounds"] == 1
    frame = rounds_to_target(groups, 0.55)
    assert row_of(frame, "FedAvg")["rounds"] == 2
    assert row_of(frame, "FedAvg")["steps"] == 120
    # Right after local training the second round has not communicated yet.
    assert row_of(frame, "FedAvg")["bytes"] == 160_000
    assert row_of(rounds_to_target(groups, 0.25, "mixed"), "FedAvg")["bytes"] == 320_000


def test_speed_ups_leave_out_who_never_arrives(tmp_path: Path) -> None:
    slow, fast = [[0.1]] * 3 + [[0.9]], [[0.9]] * 4
    write_exact(tmp_path / "slow", "fedavg", 0, slow, slow)
    write_exact(tmp_path / "fast", "fedper", 0, fast, fast)
    write_exact(tmp_path / "never", "local", 0, [[0.1]] * 4, [[0.1]] * 4)
    frame = rounds_to_target(group_runs(find_runs([tmp_path])), 0.8)
    assert row_of(frame, "FedAvg")["speedup"] == 1
    assert row_of(frame, "FedPer")["speedup"] == 4
    assert np.isnan(row_of(frame, "Local")["rounds"])
    assert row_of(frame, "Local")["reached"] == 0


def test_a_target_only_some_seeds_reach_has_no_rounds(groups: list[Group]) -> None:
    row = row_of(rounds_to_target(groups, 0.75), "FedAvg")
    assert np.isnan(row["rounds"])
    assert (row["reached"], row["seeds"]) == (1, 2)


def test_differences_are_taken_within_a_seed(groups: list[Group]) -> None:
    row = row_of(paired_differences(groups, "local"), "FedAvg")
    differences = [0.8 - 0.6, 0.7 - 0.55]
    assert row["difference"] == pytest.approx(np.mean(differences))
    assert row["seed_std"] == pytest.approx(np.std(differences, ddof=1))
    # Student's t with one degree of freedom: 12.706 standard errors.
    reach = 12.7062 * np.std(differences, ddof=1) / np.sqrt(2)
    assert row["high95"] == pytest.approx(np.mean(differences) + reach, rel=1e-5)


def test_seeds_only_one_of_them_has_are_not_paired(tmp_path: Path) -> None:
    for seed, base in ((0, 0.5), (1, 0.6)):
        write_exact(tmp_path / f"l{seed}", "local", seed, [[base]], [[base]])
    write_exact(tmp_path / "a", "fedavg", 1, [[0.9]], [[0.9]])
    row = row_of(paired_differences(group_runs(find_runs([tmp_path])), "Local"), "FedAvg")
    assert row["seeds"] == 1
    assert row["difference"] == pytest.approx(0.3)
    assert np.isnan(row["low95"])


def test_an_unknown_reference_is_refused(groups: list[Group]) -> None:
    with pytest.raises(QuiverError, match="did you mean 'FedAvg'"):
        paired_differences(groups, "FedAve")


def test_a_narrow_terminal_breaks_names_and_no_number(tmp_path: Path) -> None:
    for neighbors in (2, 5):
        topology = {"name": "random_push", "neighbors": neighbors, "and_a_long_option": "x" * 30}
        for seed in (0, 1):  # a mean with its spread is what would be broken
            recipe = Recipe(topology=topology, rounds=2, level=0.7, seed=seed)
            write_run(tmp_path / f"{neighbors}-{seed}", recipe)
    write_run(tmp_path / "other", Recipe(rounds=2))
    groups = group_runs(find_runs([tmp_path]))
    stream = io.StringIO()
    print_comparison(Console(width=60, file=stream), groups)
    shown = stream.getvalue()
    assert "…" not in shown
    for stage in ("local", "mixed"):
        for row in comparison_table(groups, stages=[stage], cost=False).rows:
            assert all(cell.text in shown for cell in row[1:])


def test_the_table_says_which_accuracy_and_bolds_the_best(groups: list[Group]) -> None:
    table = comparison_table(groups)
    assert [text for text, _ in table.spans()] == ["", "stage local", "stage mixed", "cost"]
    local, fedavg = table.rows
    assert (fedavg[1].text, fedavg[1].best) == ("75.00 ± 7.07", True)
    assert (local[1].text, local[1].best) == ("57.50 ± 3.54", False)
    assert local[5].best
    assert fedavg[4].text == "+17.50"
    assert fedavg[8].text == f"{numbers.MINUS}27.50"
    for words in ("“local”", "“mixed”", "last evaluated round", "unweighted", "over seeds"):
        assert words in table.caption


def test_fine_tuned_methods_are_named_in_the_caption(tmp_path: Path) -> None:
    write_run(tmp_path / "babu", Recipe("fedbabu", STAR, finetune="5 epochs of fine-tuning"))
    write_run(tmp_path / "avg", Recipe("fedavg", STAR))
    caption = comparison_table(group_runs(find_runs([tmp_path]))).caption
    assert "FedBABU after 5 epochs of fine-tuning; the others without" in caption


def test_an_unfinished_run_is_said_to_be_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=4), finished=False)
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:3]))
    caption = comparison_table(group_runs(find_runs([tmp_path]))).caption
    assert "DFedPGP (seed 0) has not finished: 3 of 4 rounds." in caption


def test_in_a_grid_the_gap_is_to_local_with_the_same_settings(tmp_path: Path) -> None:
    for method, level, lr in (
        ("local", 0.5, 0.1), ("local", 0.6, 0.2), ("fedavg", 0.7, 0.1), ("fedavg", 0.7, 0.2)
    ):  # fmt: skip
        folder = tmp_path / f"{method}{lr}"
        write_exact(folder, method, 0, [[level]], [[level]])
        written = json.loads((folder / "config.json").read_text())
        written["config"]["training"]["lr"] = lr
        write_json(folder / "config.json", written)
    table = comparison_table(group_runs(find_runs([tmp_path])))
    gaps = {row[0].text: row[4].text for row in table.rows}
    assert gaps["FedAvg (lr 0.1)"] == "+20.00"
    assert gaps["FedAvg (lr 0.2)"] == "+10.00"
    assert "under Local with the closest settings" in table.caption


def test_clients_without_test_data_are_counted(tmp_path: Path) -> None:
    write_exact(tmp_path / "a", "fedavg", 0, [[0.5, 0.5, 0.5]], [[0.5, 0.5, 0.5]])
    caption = comparison_table(group_runs(find_runs([tmp_path]))).caption
    assert "no test data" not in caption
    np.savez(
        tmp_path / "a" / "partition.npz",
        train_counts=np.ones((3, 2), dtype=np.int64),
        test_counts=np.array([[3, 0], [0, 0], [1, 1]]),
    )
    caption = comparison_table(group_runs(find_runs([tmp_path]))).caption
    assert "1 of 3 clients have no test data and are in no mean." in caption


def test_a_diverged_run_says_where(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(rounds=4), finished=False)
    write_json(folder / "summary.json", {"finished": False, "diverged": {"round": 4, "client": 7}})
    caption = comparison_table(group_runs(find_runs([tmp_path]))).caption
    assert "DFedPGP (seed 0) diverged in round 5 at client 7: 4 of 4 rounds." in caption


def test_a_run_that_recorded_nothing_is_a_row_of_dashes(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Recipe(rounds=2))
    folder = write_run(tmp_path / "b", Recipe("fedavg", STAR), finished=False)
    (folder / "history.jsonl").write_text("")
    table = comparison_table(group_runs(find_runs([tmp_path])))
    assert table.rows[0][1].text == numbers.DASH


def test_means_that_differ_by_rounding_alone_are_both_best(tmp_path: Path) -> None:
    some = [[0.1, 0.2, 0.3]]
    write_exact(tmp_path / "a", "fedavg", 0, some, some)
    write_exact(tmp_path / "b", "local", 0, [some[0][::-1]], [some[0][::-1]])
    groups = group_runs(find_runs([tmp_path]))
    means = compare_groups(groups)["local_mean"]
    assert means[0] != means[1]  # else nothing is shown
    rows = comparison_table(groups, cost=False).rows
    assert [row[1].best for row in rows] == [True, True]


def test_regression_runs_are_compared_by_loss_and_the_lowest_is_best(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Recipe(level=0.9, metrics=("loss",)))
    write_run(tmp_path / "b", Recipe("local", ALONE, level=0.5, metrics=("loss",)))
    table = comparison_table(group_runs(find_runs([tmp_path])))
    local, ours = table.rows
    assert ours[1].best
    assert float(ours[1].text) < float(local[1].text)
    assert "Test loss" in table.caption


def test_every_format_holds_every_cell(groups: list[Group]) -> None:
    table = comparison_table(groups)
    stream = io.StringIO()
    Console(width=250, file=stream).print(table_formats.format_rich(table))
    terminal = stream.getvalue()
    markdown, latex = table_formats.format_markdown(table), table_formats.format_latex(table)
    for row in table.rows:
        for cell in row:
            assert cell.text in terminal
            assert cell.text in markdown
            assert table_formats.escape_latex(cell.text) in latex
    assert r"\textbf{75.00 $\pm$ 7.07}" in latex
    assert r"\multicolumn{4}{c}{stage local}" in latex
    assert "**75.00 ± 7.07**" in markdown
    widths = {line.count("&") for line in latex.splitlines() if line.endswith(r"\\")}
    assert max(widths) == len(table.columns) - 1


def test_csv_holds_the_plain_numbers(groups: list[Group]) -> None:
    rows = list(csv.DictReader(io.StringIO(compare_groups(groups).to_csv(index=False))))
    assert float(rows[1]["local_mean"]) == pytest.approx(0.75)
    assert rows[1]["label"] == "FedAvg"


def test_special_letters_do_no_harm_in_markdown_and_latex() -> None:
    cell = table_formats.TableCell("a|b_c & 50 % <i> $x$ \\end")
    table = table_formats.Table("t", (table_formats.Column("c"),), ((cell,),), "")
    row = table_formats.format_markdown(table).splitlines()[4]
    assert row == "| a\\|b\\_c & 50 % \\<i> $x$ \\\\end |"
    assert r"a|b\_c \& 50 \% <i> \$x\$ \textbackslash{}end" in table_formats.format_latex(table)


def test_the_best_round_is_counted_from_one_and_shown(tmp_path: Path) -> None:
    rising_then_falling = [[0.1], [0.9], [0.2]]
    write_exact(tmp_path / "a", "fedavg", 0, rising_then_falling, [[0.3], [0.2], [0.1]])
    groups = group_runs(find_runs([tmp_path]))
    row = row_of(compare_groups(groups, "best"), "FedAvg")
    assert (row["local_rounds"], row["mixed_rounds"]) == (2, 1)
    assert (row["local_mean"], row["mixed_mean"]) == (0.9, 0.3)
    table = comparison_table(groups, "best", cost=False)
    assert [column.title for column in table.columns if column.above == "stage local"] == [
        "mean", "σ", "worst 10 %", "rounds",
    ]  # fmt: skip
    assert table.rows[0][4].text == "2"


def test_target_and_difference_tables_read_well(groups: list[Group]) -> None:
    target = target_table(groups, 0.55)
    assert target.title == "Rounds to accuracy ≥ 55.00 %"
    assert [cell.text for cell in target.rows[1]] == [
        "FedAvg", "2.0 ± 0.0", "1.00 ×", "160 kB", "120", "2 of 2",
    ]  # fmt: skip
    difference = difference_table(groups, "local")
    assert difference.title == "Against Local, accuracy in %"
    assert [cell.text for cell in difference.rows[0]][:3] == ["FedAvg", "+17.50", "3.54"]
    assert difference.rows[0][7].text == f"{numbers.MINUS}27.50"
    assert difference.rows[0][-1].text == "2"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (999_600, "1.0 MB"),
     (5.25e9, "5.2 GB"), (3e15, "3000 TB"), (float("nan"), "–")],
)  # fmt: skip
def test_sizes(count: float, text: str) -> None:
    assert numbers.format_bytes(count) == text


def test_other_numbers() -> None:
    assert numbers.format_duration(3.14) == "3.1 s"
    assert numbers.format_duration(600) == "10.0 min"
    assert numbers.format_duration(7 * 3600) == "7.0 h"
    assert numbers.format_count(12345.4) == "12,345"
    assert numbers.format_signed(-0.00001, "accuracy") == "0.00"
    assert numbers.format_score(float("inf"), "loss") == "∞"
    assert numbers.format_score(0.12341, "loss") == "0.1234"
