"""Peers, each in a throw-away environment of its own, in turns with Quiver on the same work."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import environment
from benchmarks.figures import Figure, ratio

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".peers"
REPEATS, ROUNDS = 2, 2
PATIENCE = 600.0
"""Seconds after which a peer's process is given up."""


@dataclass(frozen=True)
class Peer:
    name: str
    requirement: str
    script: str

    @property
    def folder(self) -> Path:
        return ENVIRONMENTS / self.name

    @property
    def ready(self) -> Path:
        """Written when the installation is complete."""
        return self.folder / "installed"

    @property
    def refusal(self) -> Path:
        """Written with the reason when the package index does not give it."""
        return ENVIRONMENTS / f"{self.name}.reason"


PEERS = (
    Peer("pfl-research", "pfl", "pfl_research.py"),
    Peer("Flower", "flwr[simulation]", "flower.py"),
    Peer("FedLab", "fedlab", "fedlab_work.py"),
)


def install() -> None:
    """Make the environments that are missing. The same torch as here, so that only they differ."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    pins = ENVIRONMENTS / "constraints.txt"
    pins.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    for peer in PEERS:
        if peer.ready.exists():
            continue
        print(f"installing {peer.requirement} …", flush=True)
        shutil.rmtree(peer.folder, ignore_errors=True)
        peer.refusal.unlink(missing_ok=True)
        pip = [str(peer.folder / "bin" / "pip"), "install", "--quiet", "--constraint", str(pins)]
        # torch first and alone: its own index entry decides which build fits the machine.
        steps = [[sys.executable, "-m", "venv", str(peer.folder)], [*pip, "torch", "numpy"]]
        for step in [*steps, [*pip, peer.requirement]]:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                peer.refusal.write_text(_last_words(done.stderr))
                shutil.rmtree(peer.folder, ignore_errors=True)
                break
        else:
            peer.ready.touch()


def figures(threads: int, quick: bool) -> list[Figure]:
    """peer / ours, training and aggregation of a round, for every peer and both works."""
    ready = [peer for peer in PEERS if peer.ready.exists()]
    found = [
        Figure("peers", _name(peer, work), None, ">", 1.0, note=_reason(peer))
        for peer in PEERS
        if peer not in ready
        for work in ("A", "B")
    ]
    for work in ("A", "B"):
        found += _in_turns(ready, work, threads, quick)
    return sorted(found, key=lambda figure: figure.name)


def _in_turns(peers: list[Peer], work: str, threads: int, quick: bool) -> list[Figure]:
    seconds: dict[str, list[float]] = {"ours": []}
    trouble: dict[str, str] = {}
    versions: dict[str, str] = {}
    for _ in range(1 if quick else REPEATS):
        seconds["ours"] += _play(Path(sys.executable), "ours.py", work, threads)["seconds"]
        for peer in peers:
            if peer.name in trouble:
                continue
            try:
                found = _play(peer.folder / "bin" / "python", peer.script, work, threads)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                trouble[peer.name] = str(error)
                continue
            versions[peer.name] = found["version"]
            seconds.setdefault(peer.name, []).extend(found["seconds"])
    return [
        Figure(
            "peers",
            _name(peer, work),
            None if peer.name in trouble else ratio(seconds[peer.name], seconds["ours"]),
            ">",
            1.0,
            note=trouble.get(peer.name, f"version {versions.get(peer.name)}"),
            details={"over": peer.name, "under": "ours", "seconds": seconds},
        )
        for peer in peers
    ]


def _play(python: Path, script: str, work: str, threads: int) -> dict[str, Any]:
    command = [str(python), str(HERE / script), work, "--rounds", str(ROUNDS)]
    done = subprocess.run(
        [*command, "--threads", str(threads)],
        capture_output=True,
        text=True,
        env=environment(threads),
        timeout=PATIENCE,
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed: {_last_words(done.stderr)}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _name(peer: Peer, work: str) -> str:
    return f"{work}: {peer.name} / ours"


def _reason(peer: Peer) -> str:
    if peer.refusal.exists():
        return f"does not install: {peer.refusal.read_text()}"
    return "not installed: make bench-peers"


def _last_words(text: str) -> str:
    return (text.strip() or "no message").splitlines()[-1]
