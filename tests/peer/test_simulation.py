"""One shard equals lone peers: eight processes over gRPC compute what `simulate` computes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from quiverfl.cli.peer_demo import make_swarm
from quiverfl.experiment import Experiment
from quiverfl.peer.audit import audit
from quiverfl.peer.ledger import UNIT
from quiverfl.peer.peer_folder import PeerFolder
from quiverfl.peer.schema import read_statement
from quiverfl.peer.setup import configuration, run_peer
from quiverfl.peer.store import Store

from .swarm import CONTEXT


def peer_process(path: Path) -> None:
    log = os.open(path / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    asyncio.run(run_peer(PeerFolder.read(path), join=False, trust_store=False))


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


@pytest.mark.parametrize(
    ("method", "peers", "dtype", "tolerance"),
    [("dfedpgp", 8, "float32", 1e-6), ("osgp", 3, "float64", 1e-12), ("local", 2, "float32", 0.0)],
)
def test_sync_peers_equal_the_simulation(
    tmp_path: Path, method: str, peers: int, dtype: str, tolerance: float
) -> None:
    """A share is rounded before it travels and the simulation's product is not: hence 1e-6."""
    folders = make_swarm(tmp_path / "swarm", peers, rounds=3, mode="sync")
    for folder in folders.values():
        text = (folder.path / "run.toml").read_text()
        if method != "dfedpgp":
            text = text.replace('name = "dfedpgp"\nstep_floor = 0.5', f'name = "{method}"\n')
        # The order of float32 sums inside a batched product depends on how many clients share it.
        text = text.replace(
            "[run]", f'[run]\nexecutor = "sequential"\nthreads = 1\ndtype = "{dtype}"'
        )
        text = text.replace("momentum = 0.9", "momentum = 0.0")  # it would amplify the rounding
        (folder.path / "run.toml").write_text(text)
    folders = {name: PeerFolder.read(folder.path) for name, folder in folders.items()}
    run_processes(folders, 60)
    experiment = Experiment.of(configuration(folders["peer-0"]))
    with torch.random.fork_rng():
        run = experiment.simulation.run()
    history = run.history
    for name, folder in folders.items():
        store = Store.open(folder.store)
        memory, accounts = store.memory(), store.accounts()
        store.close()
        state = run.state(folder.number)
        for field, found in {**memory.message, **memory.rest}.items():
            if field == "mu":
                continue
            expected = torch.cat([part.reshape(-1) for part in state[field].values()]).numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=name)
        assert accounts.units / UNIT == pytest.approx(float(state["mu"]), abs=1e-12)
        mine = history[(history.client == folder.number) & (history["round"] == 2)]
        line = json.loads((folder.path / "history.jsonl").read_text().splitlines()[-1])
        for stage in ("local", "mixed"):
            there = mine[mine.stage == stage].accuracy.item()
            assert line[stage]["accuracy"] == pytest.approx(there, abs=0.02)
    report = audit([read_statement(folder.store) for folder in folders.values()])
    assert report.passed, report.problems
    assert report.units == peers * UNIT
