"""Cells on a Ray cluster: the same numbers as in processes here, whatever happens to its nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from typer.testing import CliRunner

from quiverfl.cli.main import app
from quiverfl.engine.checkpoint import checkpoints
from quiverfl.errors import QuiverError
from quiverfl.results.run_files import read_lines
from quiverfl.runs.experiment import run_in_folder
from quiverfl.sweeps.executor import CellNeeds, Outcome
from quiverfl.sweeps.plan import Cell, SweepFolder, load_sweep

missing = importlib.util.find_spec("ray") is None
needs_ray = pytest.mark.skipif(missing, reason="ray is not installed: pip install 'quiverfl[ray]'")

PLAN = """
methods = ["dfedpgp", "fedavg"]
seeds = SEEDS
[base.data]
clients = 4
samples_per_client = 12
test_per_client = 6
[base.model]
hidden = [4]
[base.topology]
neighbors = 2
[base.run]
rounds = ROUNDS
checkpoint_every = 1
threads = 1
"""


class Told:
    """A watcher that remembers."""

    def __init__(self, places: SweepFolder) -> None:
        self._places = places
        self.rounds: dict[str, list[int]] = {}
        self.outcomes: list[Outcome] = []
        self.restarts: list[tuple[str, str, int]] = []

    def on_cell_start(self, cell: Cell) -> None:
        assert cell.name not in self.rounds
        self.rounds[cell.name] = []

    def on_cell_restart(self, cell: Cell, why: str) -> None:
        found = checkpoints(self._places.run(cell) / "checkpoints")
        newest = int(found[-1].stem.removeprefix("round-")) if found else 0
        self.restarts.append((cell.name, why, newest))
        self.rounds[cell.name] = []

    def on_cell_progress(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
        self.rounds[cell.name].append(rounds)

    def on_cell_end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def written(folder: Path, seeds: str = "[0]", rounds: int = 4) -> Path:
    path = folder / "plan.toml"
    path.write_text(PLAN.replace("SEEDS", seeds).replace("ROUNDS", str(rounds)))
    return path


def lines(places: SweepFolder, cell: Cell) -> list[dict[str, Any]]:
    return read_lines(places.run(cell) / "history.jsonl")


@pytest.fixture
def one_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of one node with two cores."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


@needs_ray
@pytest.mark.parametrize(
    "copy_results",
    [pytest.param(False, id="shared", marks=pytest.mark.slow), pytest.param(True, id="brought")],
)
def test_two_cells_on_one_node(copy_results: bool, tmp_path: Path, one_node: str) -> None:
    from quiverfl.sweeps.ray_executor import RayCluster

    sweep = load_sweep(written(tmp_path))
    there = SweepFolder(tmp_path / "there")
    report = Told(there)
    with RayCluster(one_node, CellNeeds(), copy_results=copy_results) as cluster:
        assert cluster.at_a_time == 2
        outcomes = cluster.run(sweep.cells, there, report)
        assert [outcome.ending for outcome in outcomes] == ["finished", "finished"]
        assert report.outcomes == outcomes
        assert {rounds[-1] for rounds in report.rounds.values()} == {4}
        with pytest.raises(QuiverError, match=r"needs 3 CPU .* more than 2 CPU: lower --cpus"):
            RayCluster(one_node, CellNeeds(cpus=3)).run(sweep.cells, there, report)
        much = CellNeeds(memory=lambda cells: {cell.name: 9 * 10**12 for cell in cells})
        with pytest.raises(QuiverError, match=r"9000\.0 GB of memory.*--no-memory"):
            RayCluster(one_node, much).run(sweep.cells, there, report)
    assert not report.restarts
    for cell in sweep.cells:
        assert there.state(cell) == "finished"
        run_in_folder(cell.config, tmp_path / cell.name)
        here = read_lines(tmp_path / cell.name / "history.jsonl")
        assert lines(there, cell) == here
    assert not list(there.root.glob(".shared-*"))


@needs_ray
@pytest.mark.slow
def test_a_cell_is_left_after_the_rounds_that_are_enough_for_now(
    tmp_path: Path, one_node: str
) -> None:
    for copy_results in (False, True):
        leave_a_cell(copy_results, tmp_path / str(copy_results), one_node)


def leave_a_cell(copy_results: bool, folder: Path, one_node: str) -> None:
    from quiverfl.sweeps.ray_executor import RayCluster

    folder.mkdir()
    cell = load_sweep(written(folder)).cells[0]
    there = SweepFolder(folder / "there")
    with RayCluster(one_node, CellNeeds(), copy_results=copy_results) as cluster:
        for until, state in (({cell.name: 2}, "begun"), (None, "finished")):
            report = Told(there)
            (outcome,) = cluster.run([cell], there, report, until)
            assert outcome.ending == "finished"
            assert report.rounds[cell.name][-1] == (2 if until else 4)
            assert there.state(cell) == state
            assert not there.failure(cell).exists()


@needs_ray
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere", "HOST:PORT"),
        ("ray://10.0.0.1:10001", "HOST:PORT"),
        ("localhost:PORT", "nobody answers there"),
        ("auto", "no Ray cluster was found"),
    ],
)
def test_an_address_without_a_cluster_is_one_sentence_at_once(
    address: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words_given = ["sweep", str(written(tmp_path)), "--out", str(tmp_path / "runs")]
    words_given += ["--on", "ray", "--address", address.replace("PORT", str(port))]
    begin = time.monotonic()
    result = CliRunner().invoke(app, words_given)
    assert isinstance(result.exception, QuiverError), result.output
    assert words in str(result.exception)
    assert time.monotonic() - begin < 60
    assert not (tmp_path / "runs" / "cells").exists()


def test_a_missing_extra_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["sweep", str(written(tmp_path)), "--out", str(tmp_path / "runs"), "--on", "ray"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, QuiverError)
    assert "pip install 'quiverfl[ray]'" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--copy-results"], "--copy-results has no meaning with --on local"),
        (["--bring-back"], "--bring-back is now called --copy-results"),
        (["--on", "slurm", "--address", "auto"], "--address has no meaning with --on slurm"),
        (["--on", "slurm", "--gpus", "1"], "add --set run.device=cuda"),
        (["--on", "slurm", "--cpus", "0"], "--cpus 0"),
        (["--on", "slurm", "--jobs", "0"], "--jobs 0"),
    ],
)
def test_options_without_meaning_are_refused(
    options: list[str], words: str, tmp_path: Path
) -> None:
    command = ["sweep", str(written(tmp_path)), "--out", str(tmp_path / "runs"), *options]
    result = CliRunner().invoke(app, command)
    assert isinstance(result.exception, QuiverError), result.output
    assert words in str(result.exception)


def test_a_folder_that_is_not_shared_is_said(tmp_path: Path) -> None:
    from quiverfl import __version__
    from quiverfl.sweeps.ray_task import RayOrder, run_order

    marker = str(tmp_path / "elsewhere" / ".shared")
    report = list(run_order(RayOrder({}, 1, ".", marker, __version__, None)))
    assert report[-1]["ended"] == 2
    assert "is not shared with this node" in report[-1]["message"]
    report = list(run_order(RayOrder({}, 1, ".", None, "9.9", None)))
    assert f"this node has Quiver {__version__}, the sweep 9.9" in report[-1]["message"]


@needs_ray
@pytest.mark.slow
def test_a_node_killed_half_way_costs_no_cell(tmp_path: Path) -> None:
    """Eight cells on two nodes; the tables are those of two processes here."""
    import ray
    from ray.cluster_utils import Cluster

    from quiverfl.sweeps.ray_executor import RayCluster

    path = written(tmp_path, "[0, 1, 2, 3]", rounds=300)
    sweep = load_sweep(path)
    here, there = SweepFolder(tmp_path / "here"), SweepFolder(tmp_path / "there")
    options = {"num_cpus": 1, "object_store_memory": 80_000_000}
    nodes = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    second = nodes.add_node(**options)
    nodes.wait_for_nodes()

    class Killing(Told):
        """Kills the second node as soon as half of the cells are over and two are at work."""

        killed = False

        def on_cell_progress(self, cell: Cell, rounds: int, scores: dict[str, float]) -> None:
            super().on_cell_progress(cell, rounds, scores)
            running = [
                name
                for name, seen in self.rounds.items()
                if seen and name not in {outcome.cell.name for outcome in self.outcomes}
            ]
            if not self.killed and len(self.outcomes) >= 4 and len(running) == 2:
                self.killed = True
                nodes.remove_node(second, allow_graceful=False)

    report = Killing(there)
    try:
        with RayCluster(nodes.address, CellNeeds()) as cluster:
            outcomes = cluster.run(sweep.cells, there, report)
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert report.killed
    assert sorted(outcome.ending for outcome in outcomes) == ["finished"] * 8
    assert len(report.restarts) >= 1
    for name, why, newest in report.restarts:
        assert "died" in why
        assert newest >= 1
        assert report.rounds[name][0] > newest  # it went on from there
    words = ["sweep", str(path), "--no-estimate", "--jobs", "2", "-q", "--out"]
    assert CliRunner().invoke(app, [*words, str(here.root)]).exit_code == 0
    again = CliRunner().invoke(app, [*words, str(there.root)])
    assert again.exit_code == 0
    tables = [pd.read_csv(places.root / "plan" / "report.csv") for places in (here, there)]
    measured = [name for name in tables[0] if "seconds" in name]
    pd.testing.assert_frame_equal(*(table.drop(columns=measured) for table in tables))
    for cell in sweep.cells:
        assert lines(there, cell) == lines(here, cell)


@needs_ray
@pytest.mark.slow
def test_ctrl_c_ends_everything_and_the_same_command_resumes(tmp_path: Path) -> None:
    path = written(tmp_path, rounds=400)
    words = ["sweep", str(path), "--out", str(tmp_path / "runs"), "--no-estimate", "--on", "ray"]
    command = ["env", "--default-signal=INT", sys.executable, "-m", "quiverfl.cli.main", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=dict(os.environ))
    places, cells = SweepFolder(tmp_path / "runs"), load_sweep(path).cells
    end = time.monotonic() + 120
    while not all(len(read_lines(places.run(cell) / "rounds.jsonl")) > 3 for cell in cells):
        assert time.monotonic() < end
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"the same command resumes" in said
    gone, left = psutil.wait_procs(children, timeout=30)
    assert gone
    assert not left
    assert {places.state(cell) for cell in cells} <= {"begun", "finished"}
    again = subprocess.run([*command, "--json"], capture_output=True, check=True)
    rows = json.loads(again.stdout.decode().splitlines()[-1])
    assert {row["state"] for row in rows} == {"finished"}
