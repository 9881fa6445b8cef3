"""Run folders in every state a run can leave them in."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from quiverfl.errors import QuiverError
from quiverfl.results.formatting import write_result_file
from quiverfl.results.run_files import find_runs, finish_history, read_run
from run_folders import Recipe, history_lines, write_comparison, write_json, write_lines, write_run


def test_a_finished_run_reads_as_the_running_one_did(tmp_path: Path) -> None:
    """Parquet holds to the last bit what the lines held."""
    running = read_run(write_run(tmp_path / "running", finished=False))
    finished = read_run(write_run(tmp_path / "finished"))
    (tmp_path / "finished" / "history.jsonl").unlink()
    (tmp_path / "finished" / "rounds.jsonl").unlink()
    again = read_run(tmp_path / "finished")
    for run in (finished, again):
        assert run.finished
        pd.testing.assert_frame_equal(run.history, running.history, check_exact=True)
        pd.testing.assert_frame_equal(run.rounds, running.rounds, check_exact=True)
    assert not running.finished
    assert running.protocol is None


def test_history_is_one_row_per_round_stage_and_client(tmp_path: Path) -> None:
    recipe = Recipe(clients=3, rounds=2)
    run = read_run(write_run(tmp_path / "run", recipe))
    assert list(run.history.columns) == ["round", "stage", "client", "accuracy", "loss"]
    assert len(run.history) == 2 * 2 * 3
    line = history_lines(recipe)[3]
    rows = run.history[(run.history["round"] == 1) & (run.history["stage"] == "mixed")]
    assert rows["accuracy"].tolist() == line["metrics"]["accuracy"]
    assert rows["client"].tolist() == [0, 1, 2]


def test_what_is_recorded_per_client_is_summed_per_round(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Recipe(clients=4, rounds=2)))
    assert run.rounds["steps"].tolist() == [120, 120]
    assert run.rounds["sent_bytes"].tolist() == [4 * 3 * 40_000] * 2
    assert run.rounds["busiest_bytes"].tolist() == [2 * 3 * 40_000] * 2


@pytest.mark.parametrize("tail", [b'{"round": 9, "stage": "loc', b"\x00\x00\x00", b"[1, 2]", b"{"])
def test_a_line_that_a_crash_cut_off_is_ignored(tmp_path: Path, tail: bytes) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    whole = read_run(folder).history
    for name in ("history.jsonl", "rounds.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(tail)
    pd.testing.assert_frame_equal(read_run(folder).history, whole)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
    lines[4] = lines[4][:20] + "\n"
    (folder / "history.jsonl").write_text("".join(lines))
    with pytest.raises(QuiverError, match=r"history\.jsonl, line 5 is damaged"):
        read_run(folder)


def test_a_round_recorded_twice_counts_as_recorded_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(clients=2, rounds=3), finished=False)
    again = {"round": 1, "stage": "local", "metrics": {"accuracy": [0.25, 0.5], "loss": [1, 2]}}
    write_lines(folder / "history.jsonl", [*history_lines(Recipe(clients=2, rounds=3)), again])
    history = read_run(folder).history
    rows = history[(history["round"] == 1) & (history["stage"] == "local")]
    assert rows["accuracy"].tolist() == [0.25, 0.5]
    assert len(history) == 3 * 2 * 2


def test_a_client_without_test_data_is_nan(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Recipe(clients=2), finished=False)
    line = {"round": 0, "stage": "local", "metrics": {"accuracy": [None, 0.5]}}
    write_lines(folder / "history.jsonl", [line])
    assert np.isnan(read_run(folder).history["accuracy"][0])


def test_lines_newer_than_the_parquet_win(tmp_path: Path) -> None:
    """A finished run that was extended and is running again."""
    folder = write_run(tmp_path / "run", Recipe(rounds=3))
    write_lines(folder / "history.jsonl", history_lines(Recipe(rounds=5)))
    os.utime(folder / "history.parquet", (1, 1))
    assert read_run(folder).history["round"].max() == 4


def test_a_damaged_parquet_falls_back_on_the_lines(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = read_run(folder).history
    (folder / "history.parquet").write_bytes(b"PAR1 but not really")
    pd.testing.assert_frame_equal(read_run(folder).history, whole)
    (folder / "history.jsonl").unlink()
    with pytest.raises(QuiverError, match=r"history\.parquet is damaged"):
        read_run(folder)


def test_a_run_that_crashed_before_its_first_round_is_a_run(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"quiver": "0.1.0", "config": {"method": {"name": "x"}}})
    run = read_run(tmp_path)
    assert (run.method, len(run.history), run.done_rounds, run.clients) == ("x", 0, 0, 0)
    assert run.train_counts is None
    finish_history(tmp_path)
    assert len(read_run(tmp_path).history) == 0


def test_the_configuration_answers_who_ran_what(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Recipe("fedper", {"name": "star"}, seed=7)))
    assert (run.method, run.topology, run.seed, run.planned_rounds) == ("fedper", "star", 7, 15)
    assert run.protocol is not None
    assert run.train_counts is not None
    assert run.train_counts.shape == (12, 10)
    assert run.test_samples is not None
    assert run.test_samples.shape == (12,)


def test_runs_are_found_below_a_comparison_once(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "compare")
    (folder / ".hidden").mkdir()
    runs = find_runs([folder, folder / "local-0"])
    assert [run.method for run in runs] == ["dfedpgp", "fedavg", "local"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "is not a folder"),
        (lambda path: path.mkdir(), "holds no run"),
        (lambda path: path.write_text("x"), "is not a folder"),
    ],
)
def test_a_folder_without_runs_is_refused(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path / "thing")  # type: ignore[operator]
    with pytest.raises(QuiverError, match=message):
        find_runs([tmp_path / "thing"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"[]"),
        ("summary.json", b"\xff\xfe"),
        ("environment.json", b""),
        ("partition.npz", b"PK but not really"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_bytes(content)
    with pytest.raises(QuiverError, match=name):
        read_run(folder)


def test_lines_of_another_program_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    write_lines(folder / "history.jsonl", [{"epoch": 1}, {"epoch": 2}])
    with pytest.raises(QuiverError, match="not what a run writes"):
        read_run(folder)


def test_replacing_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    write_result_file(tmp_path / "new" / "file", b"one")
    write_result_file(tmp_path / "new" / "file", b"two")
    assert (tmp_path / "new" / "file").read_bytes() == b"two"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(QuiverError, match="taken cannot be written"):
        write_result_file(tmp_path / "taken", b"one")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    (tmp_path / "file").write_bytes(b"one")
    with pytest.raises(QuiverError, match="cannot be written"):
        write_result_file(tmp_path / "file" / "below", b"two")
