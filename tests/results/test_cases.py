"""Tests of cases: runs of unlike data, partition or model are never compared.

The numbers are such that a comparison across cases would show: the second alpha is easier for
everybody, so its worst method beats the best one of the first.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.results.groups import Group, are_comparable, group_runs, split_by_case
from quiverfl.results.report.page import list_notes, make_title
from quiverfl.results.run_files import find_runs, read_run
from quiverfl.results.scores import compare_groups, rounds_to_target
from quiverfl.results.statistics import case_differences, holm, paired_differences
from quiverfl.results.tables import (
    case_table,
    comparison_table,
    difference_table,
    difference_tables,
    print_comparison,
    print_differences,
    result_tables,
)
from run_folders import write_exact, write_json

SCORES: dict[float, dict[str, list[list[float]]]] = {
    0.3: {"fedavg": [[0.5, 0.7], [0.4, 0.6]], "dfedpgp": [[0.6, 0.8], [0.4, 0.7]]},
    10.0: {"fedavg": [[0.9, 0.9], [0.8, 0.9]], "dfedpgp": [[0.85, 0.85], [0.7, 0.85]]},
}
"""By alpha and method: for each seed an accuracy per client."""


def change_config(folder: Path, section: str, **values: Any) -> None:
    written = json.loads((folder / "config.json").read_text())
    written["config"].setdefault(section, {}).update(values)
    write_json(folder / "config.json", written)


def give_partition(folder: Path, first: int, clients: int = 2) -> None:
    """Every client has one training sample of each class; which ones begins at `first`."""
    np.savez(
        folder / "partition.npz",
        train_counts=np.ones((clients, 2), dtype=np.int64),
        train_offsets=np.arange(0, 2 * clients + 1, 2),
        train_indices=np.arange(first, first + 2 * clients),
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two methods with two seeds on each of two alphas."""
    for alpha, methods in SCORES.items():
        for method, seeds in methods.items():
            for seed, scores in enumerate(seeds):
                folder = tmp_path / "runs" / f"{method}-{alpha}-{seed}"
                write_exact(folder, method, seed, [scores], [scores])
                change_config(folder, "data", alpha=alpha)
                give_partition(folder, first=int(alpha) + 100 * seed)
    return tmp_path / "runs"


@pytest.fixture
def groups(sweep: Path) -> list[Group]:
    return group_runs(find_runs([sweep]))


def test_cases_are_sorted_as_numbers_and_named_by_what_differs(groups: list[Group]) -> None:
    cases = split_by_case(groups)
    assert list(cases) == ["alpha 0.3", "alpha 10"]
    for own in cases.values():
        assert [group.name for group in own] == ["FedAvg", "DFedPGP"]
    assert [group.label for group in groups] == [
        "FedAvg (alpha 0.3)",
        "FedAvg (alpha 10)",
        "DFedPGP (alpha 0.3)",
        "DFedPGP (alpha 10)",
    ]


def test_the_best_of_each_case_is_bold(groups: list[Group]) -> None:
    table = case_table(groups)
    assert [(column.above, column.title) for column in table.columns] == [
        ("", "method"),
        ("stage local", "alpha 0.3"),
        ("stage local", "alpha 10"),
        ("stage mixed", "alpha 0.3"),
        ("stage mixed", "alpha 10"),
    ]
    fedavg, dfedpgp = table.rows
    assert [cell.text for cell in fedavg[:3]] == ["FedAvg", "55.00 ± 7.07", "87.50 ± 3.54"]
    assert [cell.text for cell in dfedpgp[:3]] == ["DFedPGP", "62.50 ± 10.61", "81.25 ± 5.30"]
    assert [cell.best for cell in fedavg] == [False, False, True, False, True]
    assert [cell.best for cell in dfedpgp] == [False, True, False, True, False]
    together = comparison_table(groups, stages=["local"])
    assert [row[1].best for row in together.rows] == [False, True, True, False]


def test_differences_stay_within_a_case_and_are_corrected_together(groups: list[Group]) -> None:
    frame = case_differences(groups)
    rows = frame[frame["stage"] == "local"].to_dict("records")
    assert [row["case"] for row in rows] == ["alpha 0.3", "alpha 10"]
    assert [row["reference"] for row in rows] == ["DFedPGP (alpha 0.3)", "DFedPGP (alpha 10)"]
    assert [row["difference"] for row in rows] == pytest.approx([-0.075, 0.0625])
    assert [(row["clients_won"], row["clients_lost"]) for row in rows] == [(0, 3), (4, 0)]
    assert frame["p_holm"].tolist() == pytest.approx(holm(frame["p"].tolist()))
    tables = difference_tables(groups)
    assert [table.title for table in tables.values()] == [
        "alpha 0.3: Against DFedPGP, accuracy in %",
        "alpha 10: Against DFedPGP, accuracy in %",
    ]
    assert [[row[0].text for row in table.rows] for table in tables.values()] == [["FedAvg"]] * 2


def test_a_reference_of_one_case_is_compared_with_nobody_of_another(groups: list[Group]) -> None:
    table = difference_table(groups, "DFedPGP (alpha 0.3)")
    assert [row[0].text for row in table.rows] == ["FedAvg"]
    rows = {
        r["label"]: r for r in paired_differences(groups, "DFedPGP (alpha 0.3)").to_dict("records")
    }
    assert rows["FedAvg (alpha 0.3)"]["seeds"] == 2
    for label in ("FedAvg (alpha 10)", "DFedPGP (alpha 10)"):
        assert rows[label]["seeds"] == 0
        assert np.isnan(rows[label]["difference"])
        assert (rows[label]["clients_won"], rows[label]["clients_lost"]) == (0, 0)


def test_speed_ups_are_over_the_slowest_of_the_case(tmp_path: Path) -> None:
    paths = {("fedavg", 1.0): 2, ("fedper", 1.0): 4, ("fedavg", 2.0): 1}
    for (method, alpha), arrives in paths.items():
        scores = [[0.9 if t + 1 >= arrives else 0.1] * 2 for t in range(4)]
        folder = tmp_path / f"{method}{alpha}"
        write_exact(folder, method, 0, scores, scores)
        change_config(folder, "data", alpha=alpha)
    frame = rounds_to_target(group_runs(find_runs([tmp_path])), 0.8).set_index("label")
    assert frame["speedup"].to_dict() == {
        "FedAvg (alpha 1)": 2,
        "FedAvg (alpha 2)": 1,
        "FedPer": 1,
    }


def test_every_format_shows_the_cases(sweep: Path, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"table{kind}" for kind in (".md", ".tex", ".csv")}
    words = ["report", str(sweep), "--out", str(tmp_path / "r.html"), "--columns", "all"]
    for path in files.values():
        words += ["--table", str(path)]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    texts = [shown.output, files[".md"].read_text(), files[".tex"].read_text()]
    texts.append((tmp_path / "r.html").read_text())
    for text, words_before in zip(texts, ["Against"] * 3 + ["Difference to"], strict=True):
        assert f"alpha 0.3: {words_before} DFedPGP" in text
        assert f"alpha 10: {words_before} DFedPGP" in text
        assert "Against DFedPGP (alpha" not in text
        assert "only these are compared" in " ".join(text.split())
    assert "| FedAvg | 55.00 ± 7.07 | **87.50 ± 3.54** |" in texts[1]
    assert r"FedAvg & 55.00 $\pm$ 7.07 & \textbf{87.50 $\pm$ 3.54} &" in texts[2]
    assert r"method & alpha 0.3 & alpha 10 & alpha 0.3 & alpha 10 \\" in texts[2]
    header = files[".csv"].read_text().splitlines()[0].split(",")
    assert header[:2] == ["label", "case"]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert {row["case"] for row in found["rows"]} == {"alpha 0.3", "alpha 10"}
    assert {(row["case"], row["label"]) for row in found["differences"]} == {
        ("alpha 0.3", "FedAvg (alpha 0.3)"),
        ("alpha 10", "FedAvg (alpha 10)"),
    }


def test_a_narrow_terminal_shows_the_cases_stage_by_stage(groups: list[Group]) -> None:
    stream = io.StringIO()
    console = Console(width=64, file=stream)
    print_comparison(console, groups)
    print_differences(console, groups)
    lines = stream.getvalue().splitlines()
    assert "…" not in "".join(line for line in lines if "±" in line)
    assert sum(line.split() == ["method", "alpha", "0.3", "alpha", "10"] for line in lines) == 2
    assert [line for line in lines if line in ("alpha 0.3", "alpha 10")] == [
        "alpha 0.3",
        "alpha 10",
    ]


def test_the_page_says_how_many_cases_there_are(groups: list[Group]) -> None:
    assert make_title(groups) == "2 methods in 2 cases on digits"
    (note,) = (note for note in list_notes(groups) if "cases" in note)
    assert "alpha 0.3; alpha 10" in note
    assert "nothing is compared across them" in note


def test_one_case_reads_as_before(sweep: Path) -> None:
    groups = group_runs(find_runs([sweep / f"{m}-0.3-{s}" for m in SCORES[0.3] for s in (0, 1)]))
    assert [(group.label, group.name, group.case) for group in groups] == [
        ("FedAvg", "FedAvg", ""),
        ("DFedPGP", "DFedPGP", ""),
    ]
    assert [table.title for table in result_tables(groups)] == [
        "Last round, accuracy in %",
        "Against DFedPGP, accuracy in %",
    ]


def replace_data(folder: Path) -> None:
    written = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**written, "inputs": {"data digits": "of another file"}})


def replace_model(folder: Path) -> None:
    change_config(folder, "model", hidden=[8])


def replace_partition(folder: Path) -> None:
    give_partition(folder, first=7)  # the same counts of other samples


def replace_task(folder: Path) -> None:
    change_config(folder, "task", loss="mean_squared_error")


@pytest.mark.parametrize("change", [replace_data, replace_model, replace_partition, replace_task])
def test_what_folders_recorded_decides_not_the_grid_alone(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    for name in ("fedavg", "dfedpgp"):
        for seed in (0, 1):
            folder = tmp_path / f"{name}-{seed}"
            write_exact(folder, name, seed, [[0.5 + seed / 10, 0.6]], [[0.5, 0.6]])
            change_config(folder, "task", loss="cross_entropy")
            written = json.loads((folder / "config.json").read_text())
            write_json(folder / "config.json", {**written, "inputs": {"data digits": "of a file"}})
            give_partition(folder, first=100 * seed)
    (row,) = paired_differences(group_runs(find_runs([tmp_path])), "DFedPGP").to_dict("records")
    assert row["seeds"] == 2
    for seed in (0, 1):
        change(tmp_path / f"fedavg-{seed}")
    run, base = (read_run(tmp_path / f"{name}-0") for name in ("fedavg", "dfedpgp"))
    assert not are_comparable(run, base)
    groups = group_runs(find_runs([tmp_path]))
    assert len(split_by_case(groups)) == 2
    (row,) = paired_differences(groups, "DFedPGP").to_dict("records")
    assert row["seeds"] == 0
    assert case_differences(groups).empty
    assert not any(row[1].best for row in comparison_table(groups).rows)


def test_seeds_of_unlike_data_are_no_mean(tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        write_exact(folder, "fedavg", seed, [[0.5, 0.6]], [[0.5, 0.6]])
        written = json.loads((folder / "config.json").read_text())
        inputs = {"data digits": f"of file {seed}"}
        write_json(folder / "config.json", {**written, "experiment": "one", "inputs": inputs})
    groups = group_runs(find_runs([tmp_path]))
    assert [group.seeds for group in groups] == [(0,), (1,)]
    assert [group.case for group in groups] == ["data #1", "data #2"]


def test_seeds_of_the_partition_beside_one_run_seed_are_cases(tmp_path: Path) -> None:
    """Otherwise one partition would stand for all, and each method could keep another one."""
    for method in ("fedavg", "dfedpgp"):
        for data_seed in (0, 1):
            for seed in (0, 1):
                folder = tmp_path / f"{method}-{data_seed}-{seed}"
                accuracy = 0.5 + 0.1 * data_seed
                write_exact(folder, method, seed, [[accuracy, accuracy]], [[accuracy, accuracy]])
                change_config(folder, "data", seed=data_seed)
                give_partition(folder, first=100 * data_seed)
    groups = group_runs(find_runs([tmp_path]))
    assert {(group.case, group.name) for group in groups} == {
        (f"seed {data_seed}", name) for data_seed in (0, 1) for name in ("FedAvg", "DFedPGP")
    }
    assert all(len(group.runs) == 2 and not group.left_out for group in groups)


def test_personal_parts_and_kernels_make_no_case(tmp_path: Path) -> None:
    for seed, (personal, kernels) in enumerate([(["head"], "torch"), (["body"], "compiled")]):
        folder = tmp_path / str(seed)
        write_exact(folder, "dfedpgp", 0, [[0.5, 0.6]], [[0.5, 0.6]])
        change_config(folder, "model", personal=personal, kernels=kernels)
    groups = group_runs(find_runs([tmp_path]))
    assert [group.case for group in groups] == ["", ""]
    assert len({group.name for group in groups}) == 2


def test_a_setting_that_older_folders_lack_makes_no_case(tmp_path: Path) -> None:
    write_exact(tmp_path / "old", "fedavg", 0, [[0.5, 0.6]], [[0.5, 0.6]])
    write_exact(tmp_path / "new", "dfedpgp", 0, [[0.5, 0.6]], [[0.5, 0.6]])
    change_config(tmp_path / "new", "data", validation=None)
    change_config(tmp_path / "new", "task", loss="cross_entropy")
    assert list(split_by_case(group_runs(find_runs([tmp_path])))) == [""]


def test_a_gap_needs_a_local_run_on_the_same_samples(tmp_path: Path) -> None:
    for name, first in (("fedavg", 0), ("local", 5)):
        write_exact(tmp_path / name, name, 0, [[0.5, 0.6]], [[0.5, 0.6]])
        give_partition(tmp_path / name, first)
    assert compare_groups(group_runs(find_runs([tmp_path])))["local_gap"].isna().all()
