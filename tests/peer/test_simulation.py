"""One shard equals lone peers: processes over gRPC compute what `quiver run` computes."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
import torch

from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.api import Peer
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.setup import load_peer_config, restore_learner
from quiverfl.results.groups import group_runs
from quiverfl.results.run_files import find_runs, read_run
from quiverfl.runs.experiment import Experiment

from .swarm import CONTEXT


def peer_process(path: Path) -> None:
    log = os.open(path / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    asyncio.run(Peer.open(path).run())


def run_processes(folders: dict[str, PeerFolder], seconds: float) -> None:
    processes = [
        CONTEXT.Process(target=peer_process, args=(folder.path,), daemon=True)
        for folder in folders.values()
    ]
    try:
        for process in processes:
            process.start()
        for process, folder in zip(processes, folders.values(), strict=True):
            process.join(seconds)
            assert process.exitcode == 0, (folder.path / "log.txt").read_text()[-3000:]
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
                process.join()


def configured(root: Path, peers: int, rounds: int, changes: dict[str, str]) -> list[PeerFolder]:
    """A swarm whose run.toml has these lines in these sections."""
    folders = make_swarm(root, peers, rounds, mode="sync")
    for folder in folders.values():
        text = (folder.path / "run.toml").read_text()
        for section, lines in changes.items():
            text = re.sub(rf"\[{section}\]\n(.+\n)*", f"[{section}]\n{lines}\n", text)
        (folder.path / "run.toml").write_text(text)
    return [PeerFolder.read(folder.path) for folder in folders.values()]


@pytest.mark.parametrize(
    ("changes", "peers", "rounds"),
    [
        ({}, 5, 5),
        (
            {
                "method": 'name = "dispfl"\nepochs = 1',
                "topology": 'name = "random_regular"\nneighbors = 2',
                "run": 'rounds = 4\ndtype = "float64"',
            },
            3,
            4,
        ),
        ({"topology": 'name = "balanced_push"\nneighbors = 1'}, 3, 4),
    ],
    ids=["dfedpgp float32", "dispfl float64", "balanced push"],
)
def test_sync_peers_equal_quiver_run_with_their_arithmetic(
    tmp_path: Path, changes: dict[str, str], peers: int, rounds: int
) -> None:
    """Processes with momentum for rounds in which rounding would show; the same run.toml."""
    folders = configured(tmp_path / "swarm", peers, rounds, changes)
    run_processes({folder.own.name: folder for folder in folders}, 120)
    config = load_peer_config(folders[0]).with_values([("run.arithmetic", "peers")])
    run = Experiment.of(config).run(tmp_path / "simulated")
    for folder in folders:
        found, expected = restore_learner(folder), run._shard.state
        for name, leaf in found._shard.state._asdict().items():
            assert torch.equal(leaf[0], getattr(expected, name)[folder.number]), name
        seen = read_run(folder.path / "run")
        assert seen.finished
        mine = seen.history[seen.history.client == folder.number].reset_index(drop=True)
        there = run.history[run.history.client == folder.number].reset_index(drop=True)
        assert mine.equals(there[mine.columns])
    report = audit([read_statement(folder.store) for folder in folders])
    assert report.passed, report.problems
    assert report.units == peers * UNIT
    groups = group_runs(find_runs([*(folder.path for folder in folders), tmp_path / "simulated"]))
    assert len(groups) == 2
    together = next(group.first for group in groups if "peers, sync" in group.label)
    simulated = next(group.first for group in groups if "peers" not in group.label)
    columns = ["round", "stage", "client", "accuracy"]
    assert together.history[columns].equals(simulated.history[columns])
    assert together.finished
    assert together.rounds["steps"].tolist() == simulated.rounds["steps"].tolist()
    assert together.rounds["sent_bytes"].sum() > simulated.rounds["sent_bytes"].sum() > 0


def test_without_their_arithmetic_the_two_part_at_rounding(tmp_path: Path) -> None:
    """What the option is for: a matrix product rounds once where peers round every share."""
    config = load_peer_config(configured(tmp_path / "swarm", 3, 1, {})[0])
    states = []
    for arithmetic in ("matrix", "peers"):
        values = [("run.arithmetic", arithmetic), ("run.executor", "sequential")]
        states.append(Experiment.of(config.with_values(values)).run()._shard.state)
    apart = float((states[0].u - states[1].u).abs().max())
    assert 0 < apart < 1e-6
