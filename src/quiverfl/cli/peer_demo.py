"""`quiver peer demo`: a swarm of processes on loopback, watched, killed, audited."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from quiverfl.errors import QuiverError
from quiverfl.peer import identity
from quiverfl.peer.audit import audit
from quiverfl.peer.audit_report import Report
from quiverfl.peer.control import NotRunning, order
from quiverfl.peer.ledger import UNIT
from quiverfl.peer.peer_folder import OwnSettings, PeerFolder, make_folder
from quiverfl.peer.peer_run import scores_of
from quiverfl.peer.roster import ROSTER, Member, Roster
from quiverfl.peer.schema import read_statement
from quiverfl.peer.signing import checked_by
from quiverfl.peer.statement import Statement
from quiverfl.peer.wire import Order

CONFIGURATION = """# Written by quiver peer demo.
[data]
name = "digits"
clients = {peers}
partition = "dirichlet"
alpha = 0.3

[model]
name = "mlp"
hidden = [64, 32]

[method]
name = "dfedpgp"
step_floor = 0.5    # kills and restarts make some masses small, and the step on z is lr / mass

[topology]
name = "random_push"
neighbors = {neighbors}

[training]
lr = 0.05
momentum = 0.9
batch_size = 16
clip_norm = 10.0

[run]
rounds = {rounds}

[peers]
mode = "{mode}"
deadline = {deadline}
staleness = 3
"""
START_SECONDS = 120.0


class Demo:
    """The processes of a swarm, by name."""

    def __init__(self, root: Path, peers: int, rounds: int, mode: str) -> None:
        self.folders = make_swarm(root, peers, rounds, mode)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kills: dict[str, int] = dict.fromkeys(self.folders, 0)
        self.seen: dict[str, dict[str, Any]] = {name: {} for name in self.folders}

    def start(self, name: str) -> None:
        if self.running(name):
            return
        folder = self.folders[name].path
        with (folder / "log.jsonl").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "quiverfl.cli.main", "peer", "run", str(folder)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def kill(self, name: str) -> None:
        """SIGKILL: no chance to tidy up."""
        if self.running(name):
            self.processes[name].kill()
            self.processes[name].wait()
            self.kills[name] += 1

    def running(self, name: str) -> bool:
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def stop(self, seconds: float = 20.0) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        end = time.monotonic() + seconds
        for process in self.processes.values():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    async def look(self) -> None:
        """Ask every running peer how it is."""

        async def one(name: str) -> None:
            if not self.running(name):
                code = self.processes[name].returncode if name in self.processes else None
                ended = {0: "done", -9: "killed"}.get(code or 0, f"exit {code}")
                self.seen[name] = {**self.seen[name], "state": ended}
                return
            try:
                self.seen[name] = await order(
                    self.folders[name], Order(action="status"), timeout=1.0
                )
            except NotRunning:
                self.seen[name] = {**self.seen[name], "state": "starting"}

        await asyncio.gather(*(one(name) for name in self.folders))

    def table(self) -> Table:
        table = Table(title="k NAME kills, r NAME restarts, q stops (then Enter)")
        for column in ("peer", "state", "round", "μ", "accuracy", "sent", "retries", "kills"):
            table.add_column(column, justify="left" if column in ("peer", "state") else "right")
        for name, seen in self.seen.items():
            counts, metrics = seen.get("counts", {}), seen.get("metrics", {})
            table.add_row(
                name,
                seen.get("state", "starting"),
                str(seen.get("round", "")),
                f"{seen['mass']:.4f}" if "mass" in seen else "",
                f"{metrics['accuracy']:.3f}" if "accuracy" in metrics else "",
                f"{counts.get('sent_bytes', 0) / 1e6:.1f} MB",
                str(counts.get("retries", 0)),
                str(self.kills[name]),
            )
        return table


def make_swarm(root: Path, peers: int, rounds: int, mode: str) -> dict[str, PeerFolder]:
    """Certificates, roster and a folder for each."""
    if root.exists() and any(root.iterdir()):
        raise QuiverError(f"{root} is not empty: name a new folder with --out.")
    authority = root / "authority"
    identity.create_authority(authority, "demo")
    members = []
    for number, port in enumerate(_free_ports(peers)):
        name = f"peer-{number}"
        key = identity.issue(authority, name, authority / name)
        members.append(Member(name, f"127.0.0.1:{port}", (key,)))
    Roster("demo", tuple(members)).write(authority / ROSTER)
    text = CONFIGURATION.format(
        peers=peers,
        rounds=rounds,
        mode=mode,
        neighbors=min(3, peers - 1),
        deadline=60.0 if mode == "sync" else 10.0,
    )
    (root / "run.toml").write_text(text)
    return {
        member.name: make_folder(
            root / member.name,
            root / "run.toml",
            authority / ROSTER,
            authority / member.name,
            OwnSettings(name=member.name, bind=member.address),
        )
        for member in members
    }


def _free_ports(count: int) -> Iterator[int]:
    """Ports that are free now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        yield from [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def run_demo(root: Path, peers: int, rounds: int, mode: str, kills: int) -> bool:
    """The whole show; whether the audit passed."""
    console = Console()
    demo = Demo(root, peers, rounds, mode)
    started = time.monotonic()
    try:
        for name in demo.folders:
            demo.start(name)
        with Live(demo.table(), console=console, refresh_per_second=4, transient=False) as live:
            _watch(demo, live, kills)
    finally:
        demo.stop()
    statements = [read_statement(folder.store) for folder in demo.folders.values()]
    genuine = checked_by(Roster.read(root / "authority" / ROSTER))
    report = audit(statements, genuine=genuine)
    path = write_report(root, demo, statements, report, time.monotonic() - started)
    console.print()
    console.print("\n".join(report.lines()))
    console.print(f"report: {path}")
    return report.passed


def _watch(demo: Demo, live: Live, kills: int) -> None:
    """Until all have ended; kills what it is asked to, and restarts it."""
    chance = random.Random()
    next_kill = time.monotonic() + 1.0
    while any(demo.running(name) for name in demo.folders):
        asyncio.run(demo.look())
        live.update(demo.table())
        for command in _typed():
            if not _obey(demo, command):
                return
        started = [n for n in demo.folders if demo.running(n) and demo.seen[n].get("round")]
        if kills and started and time.monotonic() > next_kill:
            name = chance.choice(started)
            demo.kill(name)
            demo.start(name)
            kills, next_kill = kills - 1, time.monotonic() + 2.0
        time.sleep(0.25)
    asyncio.run(demo.look())
    live.update(demo.table())


def _typed() -> Iterator[str]:
    """Lines typed by the person, if there is one."""
    if not sys.stdin.isatty():
        return
    while select.select([sys.stdin], [], [], 0)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _obey(demo: Demo, command: str) -> bool:
    word, _, name = command.partition(" ")
    name = name if name in demo.folders else f"peer-{name}"
    if word == "q":
        return False
    if word in ("k", "r") and name in demo.folders:
        demo.kill(name)
        if word == "r":
            demo.start(name)
    return True


def write_report(
    root: Path, demo: Demo, statements: Sequence[Statement], report: Report, seconds: float
) -> Path:
    """What happened, for people and for machines."""
    masses = {statement.name: statement.units / UNIT for statement in statements}
    lines = ["# Peer demo", "", f"{len(demo.folders)} processes, {seconds:.0f} s.", ""]
    lines += ["| peer | rounds | μ | accuracy, first → last | kills | state |", "|---" * 6 + "|"]
    for name, folder in demo.folders.items():
        scores = scores_of(folder.path, "accuracy")
        accuracy = list(scores.values())
        change = f"{accuracy[0]:.3f} → {accuracy[-1]:.3f}" if accuracy else "–"
        mass = f"{masses[name]:.4f}"
        state = demo.seen[name].get("state", "–")
        rounds = max(scores, default=-1) + 1
        lines.append(f"| {name} | {rounds} | {mass} | {change} | {demo.kills[name]} | {state} |")
    lines.append(f"| in flight | | {report.in_flight / UNIT:.4f} | | | |")
    lines += ["", "## Audit", "", "```", *report.lines(), "```", ""]
    names = " ".join(demo.folders)
    lines.append(f"Again, in this folder: `quiver peer audit {names}`, and for learning curves")
    lines.append(f"`quiver report {names}`.")
    (root / "report.md").write_text("\n".join(lines) + "\n")
    (root / "audit.json").write_text(json.dumps(report.values(), indent=1) + "\n")
    return root / "report.md"
