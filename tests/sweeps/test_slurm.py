"""A Slurm array: the script, and what its command does for every index."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.results.run_files import read_lines
from quiverfl.sweeps.display import show_sweep
from quiverfl.sweeps.executor import CellNeeds
from quiverfl.sweeps.plan import SweepFolder, load_sweep
from quiverfl.sweeps.slurm import SlurmArray

PLAN = """
seeds = [0, 1]
[base.data]
clients = 4
samples_per_client = 12
test_per_client = 6
[base.model]
hidden = [4]
[base.topology]
neighbors = 2
[base.run]
rounds = 3
checkpoint_every = 1
threads = 1
"""
DIVERGING = """
[[case]]
name = "good"
[[case]]
name = "diverging"
training = { lr = 1e30 }
"""


def script(folder: Path, plan: str, *options: str) -> Path:
    (folder / "plan.toml").write_text(plan)
    words = ["sweep", str(folder / "plan.toml"), "--out", str(folder / "runs"), "--no-estimate"]
    result = CliRunner().invoke(app, [*words, "--on", "slurm", *options])
    assert result.exit_code == 0, result.output
    assert "submit it with sbatch" in result.output
    (found,) = (folder / "runs" / "slurm").glob("*.sh")
    return found


def run(found: Path, index: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(index)}
    return subprocess.run(["sh", str(found)], env=environment, capture_output=True, text=True)


def test_every_index_runs_its_cell_and_notes_how_it_ended(tmp_path: Path) -> None:
    found = script(tmp_path, PLAN.replace("[0, 1]", "[0]") + DIVERGING)
    asked = [line for line in found.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --array=0-1" in asked
    assert "#SBATCH --cpus-per-task=1" in asked
    assert "#SBATCH --requeue" in asked
    (memory,) = [line for line in asked if "--mem=" in line]
    assert 600 <= int(memory.split("=")[1].removesuffix("M")) < 1200
    assert [run(found, index).returncode for index in range(2)] == [0, 3]
    places, cells = SweepFolder(tmp_path / "runs"), load_sweep(tmp_path / "plan.toml").cells
    assert [places.state(cell) for cell in cells] == ["finished", "diverged"]
    assert [places.failure(cell).exists() for cell in cells] == [False, True]
    beyond = run(found, 2)
    assert beyond.returncode == 2
    assert "has no order 2" in beyond.stderr
    words = ["sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs"), "-q"]
    collected = CliRunner().invoke(app, [*words, "--on", "slurm"])
    assert collected.exit_code == 3  # nothing is left to run, and one has diverged
    assert (tmp_path / "runs" / "plan" / "good.csv").is_file()


def test_what_is_asked_of_slurm(tmp_path: Path) -> None:
    options = ("--cpus", "4", "--jobs", "1", "--no-memory", "--sbatch", "--time=12:00:00")
    found = script(tmp_path, PLAN, *options).read_text()
    for line in ("--array=0-1%1", "--cpus-per-task=4", "--time=12:00:00"):
        assert f"#SBATCH {line}\n" in found
    assert "--mem" not in found
    assert "export OMP_NUM_THREADS=4" in found


def test_a_warning_before_the_time_is_up_leaves_a_checkpoint_and_no_failure(tmp_path: Path) -> None:
    plan = PLAN.replace("rounds = 3", "rounds = 5000").replace("every = 1", "every = 4000")
    found = script(tmp_path, plan)
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0"}
    process = subprocess.Popen(["sh", str(found)], env=environment, stderr=subprocess.PIPE)
    places, cell = SweepFolder(tmp_path / "runs"), load_sweep(tmp_path / "plan.toml").cells[0]
    end = time.monotonic() + 120
    while len(read_lines(places.run(cell) / "rounds.jsonl")) < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"stopped after round" in said
    assert places.state(cell) == "begun"
    assert not places.failure(cell).exists()
    assert list((places.run(cell) / "checkpoints").glob("*.json"))


def test_submitting_needs_sbatch_and_says_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(QuiverError, match="no sbatch on this machine"):
        SlurmArray(CellNeeds(), submit=True)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "Submitted batch job 42"\n')
    sbatch.chmod(0o755)
    (tmp_path / "plan.toml").write_text(PLAN)
    words = ["sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs"), "--submit"]
    words += ["--on", "slurm", "--no-estimate"]
    assert "Submitted batch job 42: 2 cells" in CliRunner().invoke(app, words).output
    sbatch.write_text('#!/bin/sh\necho "invalid partition" >&2\nexit 1\n')
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, QuiverError)
    assert "invalid partition" in str(refused.exception)


def test_a_race_is_not_handed_to_slurm(tmp_path: Path) -> None:
    with (
        show_sweep([], {}, True) as watcher,
        pytest.raises(QuiverError, match=r"\[tuning\] cannot be handed to Slurm: "),
    ):
        SlurmArray(CellNeeds()).run([], SweepFolder(tmp_path), watcher, {"cell": 2})
    assert not list(tmp_path.iterdir())
