"""Cells run in processes of their own: failures stay where they are, and nothing is done twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.errors import QuiverError
from quiverfl.results.run_files import read_lines
from quiverfl.runs.experiment import run_in_folder
from quiverfl.runs.folder import RunFolder
from quiverfl.sweeps.executor import LocalPool, Outcome, select_pending
from quiverfl.sweeps.plan import Cell, Sweep, SweepFolder, load_sweep

BASE = """
[base.data]
clients = 4
samples_per_client = 12
test_per_client = 6
[base.model]
hidden = [4]
[base.topology]
neighbors = 2
[base.training]
batch_size = "all"
[base.run]
rounds = 3
checkpoint_every = 1
threads = 1
"""
CASES = """
[[case]]
name = "refused"
model = { wrong = 1 }
[[case]]
name = "broken"
model = { name = "bad_models:broken", hidden = 4 }
[[case]]
name = "dying"
model = { name = "bad_models:dying", hidden = 4 }
[[case]]
name = "diverging"
training = { lr = 1e30 }
[[case]]
name = "good"
"""
BAD_MODELS = """
import os

def broken(input_shape, classes, hidden):
    print("a word of its own")
    return 1 / 0

def dying(input_shape, classes, hidden):
    os._exit(7)
"""


class Told:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[int]] = {}
        self.outcomes: dict[str, Outcome] = {}

    def on_cell_start(self, cell: Cell) -> None:
        assert cell.name not in self.rounds
        self.rounds[cell.name] = []

    def on_cell_restart(self, cell: Cell, why: str) -> None:
        raise AssertionError(f"{cell.name} was restarted: {why}")

    def on_cell_progress(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        assert set(scores) == {"local", "mixed"}
        self.rounds[cell.name].append(rounds)

    def on_cell_end(self, outcome: Outcome) -> None:
        self.outcomes[outcome.cell.case] = outcome


def plan(folder: Path, text: str) -> Sweep:
    (folder / "plan.toml").write_text(text)
    return load_sweep(folder / "plan.toml")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sweep, SweepFolder, Told]]:
    """A sweep in which everything happens that can go wrong, and one cell that goes well."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "bad_models.py").write_text(BAD_MODELS)
    before = Path.cwd()
    os.chdir(folder)
    try:
        sweep, places, told = plan(folder, BASE + CASES), SweepFolder(folder / "runs"), Told()
        LocalPool(1).run(sweep.cells, places, told)
        yield sweep, places, told
    finally:
        os.chdir(before)


def test_every_cell_ends_in_its_own_way(ended: tuple[Sweep, SweepFolder, Told]) -> None:
    _, _, told = ended
    endings = {case: outcome.ending for case, outcome in told.outcomes.items()}
    assert endings == {
        "refused": "failed",
        "broken": "failed",
        "dying": "failed",
        "diverging": "diverged",
        "good": "finished",
    }
    messages = {case: outcome.message for case, outcome in told.outcomes.items()}
    assert "no option 'wrong'" in messages["refused"]
    assert "ZeroDivisionError: division by zero" in messages["broken"]
    assert "ended with code 7" in messages["dying"]
    assert "training diverged" in messages["diverging"]
    assert messages["good"] == ""


def test_failures_are_recorded_and_successes_are_not(
    ended: tuple[Sweep, SweepFolder, Told],
) -> None:
    sweep, places, _ = ended
    cells = {cell.case: cell for cell in sweep.cells}
    records = {case: places.failure(cell) for case, cell in cells.items()}
    assert [case for case, path in records.items() if path.exists()] == list(cells)[:-1]
    assert json.loads(records["diverging"].read_text())["code"] == 3
    assert "division by zero" in places.log(cells["broken"]).read_text()
    assert "a word of its own" in places.log(cells["broken"]).read_text()
    assert places.message(cells["dying"]).endswith("code 7")


def test_progress_is_told_round_by_round(ended: tuple[Sweep, SweepFolder, Told]) -> None:
    sweep, _, told = ended
    assert told.rounds[sweep.cells[-1].name] == [1, 2, 3]


def test_finished_and_diverged_cells_are_not_run_again(
    ended: tuple[Sweep, SweepFolder, Told],
) -> None:
    sweep, places, _ = ended
    assert [cell.case for cell in select_pending(sweep.cells, places)] == [
        "refused",
        "broken",
        "dying",
    ]
    again = [cell.case for cell in select_pending(sweep.cells, places, retry=True)]
    assert again == ["refused", "broken", "dying", "diverging"]
    states = [places.state(cell) for cell in sweep.cells]
    assert states == ["new", "new", "new", "diverged", "finished"]


def test_a_cell_is_what_the_same_configuration_gives_alone(
    ended: tuple[Sweep, SweepFolder, Told], tmp_path: Path
) -> None:
    sweep, places, _ = ended
    run_in_folder(sweep.cells[-1].config, tmp_path / "alone")
    theirs = (places.run(sweep.cells[-1]) / "history.jsonl").read_bytes()
    assert (tmp_path / "alone" / "history.jsonl").read_bytes() == theirs


def test_the_command_says_what_is_missing_and_with_which_code(
    ended: tuple[Sweep, SweepFolder, Told],
) -> None:
    _, places, _ = ended
    some = ["sweep", "plan.toml", "--out", str(places.root), "--cases", "diverging; good"]
    result = CliRunner().invoke(app, [*some, "--dry-run", "--no-estimate", "--json"])
    assert result.exit_code == 0
    rows = {row["case"]: row for row in json.loads(result.stdout)}
    assert [row["state"] for row in rows.values()] == ["diverged", "finished"]
    assert "training diverged" in rows["diverging"]["error"]
    assert Path(rows["good"]["folder"], "summary.json").is_file()
    result = CliRunner().invoke(app, some)
    assert result.exit_code == 3, result.output
    assert "2 cells, 2 of them done before" in result.output
    assert "not finished: DFedPGP, diverging, seed 0. round 1, client" in result.output
    assert (places.root / "plan" / "good.html").is_file()


def test_cells_of_two_versions_of_the_data_are_not_put_together(tmp_path: Path) -> None:
    def written(shift: float) -> None:
        x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
        np.savez(tmp_path / "mine.npz", x=x + shift, y=y)

    text = BASE.replace("clients = 4", 'clients = 4\nname = "npz"')
    text += f'[base.data.options]\npath = "{tmp_path / "mine.npz"}"\ncache = "{tmp_path}"\n'
    (tmp_path / "plan.toml").write_text(text)
    words = ["sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs"), "-q"]
    written(0.0)
    assert CliRunner().invoke(app, words).exit_code == 0
    written(1.0)
    again = CliRunner().invoke(app, words)
    assert isinstance(again.exception, QuiverError)
    assert "a run with another data npz" in str(again.exception)
    (tmp_path / "mine.npz").unlink()
    assert CliRunner().invoke(app, words).exit_code == 0


def test_where_there_is_no_data_at_all_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        BASE.replace("clients = 4", 'clients = 4\nname = "cifar10"') + "[grid]\nrun.seed = [0, 1]"
    )
    words = ["sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs")]
    words += ["--set", f"data.root={tmp_path}"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, QuiverError)
    assert "quiver data fetch cifar10" in str(result.exception)
    assert not (tmp_path / "runs").exists()
    planned = CliRunner().invoke(app, [*words, "--dry-run"])
    assert planned.exit_code == 0
    assert "2 of them cannot run yet: cifar10 is not there" in planned.output
    assert "could not be estimated." in planned.output


def test_what_diverged_is_in_the_report_and_said_to_have(tmp_path: Path) -> None:
    text = BASE.replace("[base.run]", "[base.run]\nevaluate_every = 1")
    text += "[grid]\ntraining.lr = [0.05, 1e30]\n"
    (tmp_path / "plan.toml").write_text(text)
    words = ["sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "runs"), "-q"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 3
    page = (tmp_path / "runs" / "plan" / "report.html").read_text()
    assert "DFedPGP (lr 1e+30) (seed 0) diverged in round" in page


def test_jobs_must_be_at_least_one() -> None:
    with pytest.raises(QuiverError, match="--jobs 0"):
        LocalPool(0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QuiverError, match="cannot be made"):
        LocalPool(1).run([], SweepFolder(tmp_path / "file"), Told())


def wait_for(happened: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_ends_the_processes_and_leaves_cells_that_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(BASE.replace("rounds = 3", "rounds = 2000"))
    command = [sys.executable, "-m", "quiverfl.cli.main", "sweep", "plan.toml", "--no-estimate"]
    # A test run in the background of a script is deaf to Ctrl-C; what it starts must not be.
    command = ["env", "--default-signal=INT", *command]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    places, cell = SweepFolder(tmp_path / "runs"), load_sweep(tmp_path / "plan.toml").cells[0]
    wait_for(lambda: len(read_lines(places.run(cell) / "rounds.jsonl")) > 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 1
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"the same command resumes" in said
    assert not [child for child in children if child.is_running()]
    assert places.state(cell) == "begun"
    assert not places.failure(cell).exists()
    checkpoint = RunFolder(places.run(cell)).resume()
    assert checkpoint is not None
    assert checkpoint.round >= 3


def test_a_cell_that_another_sweep_runs_is_waited_for(tmp_path: Path) -> None:
    """The other one finishes it meanwhile; it is then not run again."""
    cell, places = plan(tmp_path, BASE).cells[0], SweepFolder(tmp_path / "runs")
    run_in_folder(cell.config, tmp_path / "finished")
    told = Told()
    with ThreadPoolExecutor(1) as pool:
        with RunFolder(places.run(cell)).lock():
            waiting = pool.submit(LocalPool(1).run, [cell], places, told)
            wait_for(lambda: places.log(cell).exists())
            time.sleep(0.5)
            assert not waiting.done()
            shutil.copytree(tmp_path / "finished", places.run(cell), dirs_exist_ok=True)
        assert [outcome.ending for outcome in waiting.result(60)] == ["finished"]
    assert told.rounds == {cell.name: []}
