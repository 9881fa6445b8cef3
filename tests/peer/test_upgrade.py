"""Peers of the edition before this one: their messages, stores and agreements still hold."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import quiverfl
from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import signing
from quiverfl.peer.changes import open_amendment_log, open_eviction_log
from quiverfl.peer.demo import make_swarm
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.link.identity import Identity
from quiverfl.peer.link.messages import Manifest
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import (
    Amendment,
    EvictionNotice,
    Terms,
    decode_statements,
    encode_statements,
)

from .swarm import free_ports, make_folders
from .test_commands import RUN

AGREED, STORE = "a" * 64, "2" * 16
NOTICE = f'{{"by":"peer-0","about":"peer-2","store":"{STORE}","ban":true,"proof":""}}'
TERMS = '{"since":3,"rounds":8,"lr":0.05}'
AMENDMENT = f'{{"by":"peer-0","terms":{TERMS},"proof":""}}'


def test_statements_have_the_bytes_they_had() -> None:
    notice = EvictionNotice(by="peer-0", about="peer-2", store=STORE, ban=True)
    amendment = Amendment(by="peer-0", terms=Terms(since=3, rounds=8, lr=0.05))
    notices = f'{{"notices":[{NOTICE}]}}'.encode()
    amendments = f'{{"amendments":[{AMENDMENT}]}}'.encode()
    assert encode_statements(EvictionNotice, [notice]) == notices
    assert encode_statements(Amendment, [amendment]) == amendments
    assert decode_statements(EvictionNotice, notices) == [notice]
    assert decode_statements(Amendment, amendments) == [amendment]


def test_logs_that_agree_have_the_hash_they_had(tmp_path: Path) -> None:
    """Peers of both editions compare these hashes, and check each other's signatures."""
    folder = make_folders(tmp_path, 3)[0]
    roster, identity = Roster.read(folder / ROSTER), Identity.read(folder)
    evictions, amendments = open_eviction_log(AGREED), open_amendment_log(AGREED)
    notice = EvictionNotice(by="peer-0", about="peer-2", store=STORE, ban=True)
    amendment = Amendment(by="peer-0", terms=Terms(since=3, rounds=8, lr=0.05))
    assert evictions.add(signing.sign_statement(identity, AGREED, notice), roster)
    assert amendments.add(signing.sign_statement(identity, AGREED, amendment), roster)
    assert evictions.hash == hashlib.sha256(NOTICE.encode()).hexdigest()
    assert amendments.hash == hashlib.sha256(f"peer-0 {TERMS}".encode()).hexdigest()
    fields = json.dumps([AGREED, "peer-0", "peer-2", STORE, True]).encode()
    assert notice.signed_text(AGREED) == b"quiver eviction\0" + fields
    fields = json.dumps([AGREED, "peer-0", 3, 8, 0.05]).encode()
    assert amendment.signed_text(AGREED) == b"quiver amendment\0" + fields


def test_renamed_keys_are_agreed_on_as_before(tmp_path: Path) -> None:
    folder = next(iter(make_swarm(tmp_path / "swarm", 2, rounds=1, mode="sync").values()))
    path = folder.path / "run.toml"
    text = path.read_text()
    path.write_text(text + "max_debt = 0.5\nround_interval = 2.0\n")
    peers = {
        "mode": "sync",
        "deadline": 60.0,
        "staleness": 3,
        "lend": 0.5,
        "pause": 2.0,
        "linger": 30.0,
        "outlier": "off",
        "outlier_factor": 10.0,
        "mass_cap": None,
    }
    opened = PeerFolder.read(folder.path)
    content = {"experiment": opened.agreed_experiment, "peers": peers}
    written = json.dumps(content, sort_keys=True, separators=(",", ":"))
    agreement = opened.agreement(Manifest(()))
    assert agreement.configuration == hashlib.sha256(written.encode()).hexdigest()
    for old, new in {"lend": "max_debt", "pause": "round_interval"}.items():
        path.write_text(f"{text}{old} = 1.0\n")
        with pytest.raises(QuiverError, match=f"{old} is now called {new}"):
            PeerFolder.read(folder.path)


# Processes of both editions


BEFORE = "2265180"
"""The last commit of the edition before."""
PAPER = '\nstep = "paper"'
"""What docs/reference/peers.md asks for before an async run of that edition goes on."""


def unpack_edition(commit: str, root: Path) -> Path:
    """Write the sources of an earlier commit below a folder."""
    repository = Path(__file__).parents[2]
    command = ["git", "-C", str(repository), "archive", commit, "src"]
    packed = subprocess.run(command, capture_output=True)
    if packed.returncode:
        pytest.skip(f"this copy has no commit {commit}: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(root, filter="data")
    return root / "src"


def run_edition(sources: Path, *words: object) -> str:
    """Run a command of an edition to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "quiverfl", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start_edition(sources: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "quiverfl", "peer", "run", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def count_rounds(folder: Path) -> int:
    path = folder / "run" / "history.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_rounds(folders: list[Path], more: int) -> None:
    before = {folder: count_rounds(folder) for folder in folders}
    end = time.monotonic() + 120
    while any(count_rounds(folder) < rounds + more for folder, rounds in before.items()):
        assert time.monotonic() < end, [(f.name, (f / "log").read_text()[-1500:]) for f in folders]
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_peers_are_upgraded_one_after_the_other(mode: str, tmp_path: Path) -> None:
    """From the edition before to this one while the run goes on, with one step back; error 0.

    Every second upgrade is a kill, not a stop. In sync mode the models are those of a run of the
    edition before alone, bit for bit.
    """
    old, new = unpack_edition(BEFORE, tmp_path / "edition"), Path(quiverfl.__file__).parents[1]
    text = RUN.format(rounds=40).replace("clients = 2", "clients = 3")
    text = text.replace('mode = "sync"', f'mode = "{mode}"')
    waits = "pause = 0.2\nstaleness = 3\n" if mode == "async" else ""
    (tmp_path / "run.toml").write_text(text + waits)

    def prepare_swarm(root: Path, run: Path) -> list[Path]:
        members = [f"ward-{n}=127.0.0.1:{port}" for n, port in enumerate(free_ports(3))]
        named = [word for member in members for word in ("--peer", member)]
        run_edition(old, "peer", "certs", "init", root / "ca", "--run", "trial", *named)
        folders = [root / f"ward-{number}" for number in range(3)]
        for folder in folders:
            keys, roster = root / "ca" / folder.name, root / "ca" / ROSTER
            common = ("--config", run, "--keys", keys, "--roster", roster)
            run_edition(old, "peer", "init", folder, *common)
        return folders

    folders = prepare_swarm(tmp_path / "a", tmp_path / "run.toml")
    processes = [start_edition(old, folder) for folder in folders]
    try:
        steps = [(0, new), (1, new), (0, old), (2, new), (0, new)]
        for number, (place, sources) in enumerate(steps):
            wait_for_rounds(folders, 3)
            process = processes[place]
            process.send_signal(signal.SIGKILL if number % 2 else signal.SIGTERM)
            process.wait(60)
            if mode == "async":  # a key was renamed since, and the step is to be named, as it says
                run = folders[place] / "run.toml"
                for change in (("pause", "round_interval"), ('"dfedpgp"', f'"dfedpgp"{PAPER}')):
                    before, after = change if sources is new else change[::-1]
                    run.write_text(run.read_text().replace(before, after))
            processes[place] = start_edition(sources, folders[place])
        codes = [process.wait(180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0, 0], [(folder / "log").read_text()[-1500:] for folder in folders]
    for sources in (old, new):
        report = json.loads(run_edition(sources, "peer", "audit", *folders, "--json"))
        assert (report["passed"], report["error"]) == (True, 0), report
    if mode == "async":
        return
    plain = prepare_swarm(tmp_path / "b", tmp_path / "run.toml")
    for process in [start_edition(old, folder) for folder in plain]:
        assert process.wait(180) == 0
    for mixed, alone in zip(folders, plain, strict=True):
        models = []
        for sources, folder in ((new, mixed), (old, alone)):
            out = folder / "model.safetensors"
            run_edition(sources, "peer", "export", folder, "--out", out)
            models.append(safetensors.numpy.load_file(out))
        assert models[0].keys() == models[1].keys()
        assert all(np.array_equal(models[0][name], models[1][name]) for name in models[0])
