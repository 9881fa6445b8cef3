"""`quiver peer demo`: a swarm of processes on loopback, watched, killed, audited."""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from quiverfl.cli.peer_owner import show_peers
from quiverfl.peer.accounts.audit import AuditReport, audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.accounts.ledger import UNIT, Statement
from quiverfl.peer.accounts.signing import signature_check
from quiverfl.peer.api import read_scores
from quiverfl.peer.control import NotRunning, make_order
from quiverfl.peer.folder import PeerFolder
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import Order
from quiverfl.peer.metrics import PeerReading, read_status

START_SECONDS = 120.0


class Demo:
    """Runs the processes of a swarm, by name."""

    def __init__(self, folders: Mapping[str, PeerFolder]) -> None:
        self.folders = folders
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kills: dict[str, int] = dict.fromkeys(self.folders, 0)
        self.readings = {name: PeerReading("", name, state="starting") for name in self.folders}

    def start(self, name: str) -> None:
        if self.running(name):
            return
        folder = self.folders[name].path
        with (folder / "log.jsonl").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "quiverfl", "peer", "run", str(folder)],
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

    async def read(self) -> None:
        """Ask every running peer for its status."""

        async def read_one(name: str) -> None:
            if not self.running(name):
                code = self.processes[name].returncode if name in self.processes else None
                ended = {0: "done", -9: "killed"}.get(code or 0, f"exit {code}")
                self.readings[name].state = ended
                return
            try:
                order = Order(action="status")
                status = await make_order(self.folders[name].path, order, timeout=1.0)
                self.readings[name] = read_status(status)
            except NotRunning:
                self.readings[name].state = "starting"

        await asyncio.gather(*(read_one(name) for name in self.folders))

    def table(self) -> Group:
        title = "k NAME kills, r NAME restarts, q stops (then Enter)"
        return show_peers(list(self.readings.values()), title, self.kills)


def run_demo(root: Path, folders: Mapping[str, PeerFolder], kills: int) -> bool:
    """Run the whole demo on a swarm below a folder. Returns whether the audit passed."""
    console = Console(emoji=False)
    demo = Demo(folders)
    started = time.monotonic()
    try:
        for name in demo.folders:
            demo.start(name)
        with Live(demo.table(), console=console, refresh_per_second=4, transient=False) as live:
            _watch(demo, live, kills)
    finally:
        demo.stop()
    statements = [read_statement(folder.store) for folder in demo.folders.values()]
    is_genuine = signature_check(Roster.read(root / "authority" / ROSTER))
    report = audit(statements, is_genuine=is_genuine)
    path = write_report(root, demo, statements, report, time.monotonic() - started)
    console.print()
    console.print("\n".join(report.lines()))
    console.print(f"report: {path}")
    return report.passed


def _watch(demo: Demo, live: Live, kills: int) -> None:
    """Watch until all have ended; kill and restart peers as asked."""
    chance = random.Random()
    next_kill = time.monotonic() + 1.0
    while any(demo.running(name) for name in demo.folders):
        asyncio.run(demo.read())
        live.update(demo.table())
        for command in _read_commands():
            if not _run_command(demo, command):
                return
        started = [
            n for n in demo.folders if demo.running(n) and demo.readings[n].values.get("round")
        ]
        if kills and started and time.monotonic() > next_kill:
            name = chance.choice(started)
            demo.kill(name)
            demo.start(name)
            kills, next_kill = kills - 1, time.monotonic() + 2.0
        time.sleep(0.25)
    asyncio.run(demo.read())
    live.update(demo.table())


def _read_commands() -> Iterator[str]:
    """Read the lines that were typed since the last call."""
    if not sys.stdin.isatty():
        return
    while select.select([sys.stdin], [], [], 0)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _run_command(demo: Demo, command: str) -> bool:
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
    root: Path, demo: Demo, statements: Sequence[Statement], report: AuditReport, seconds: float
) -> Path:
    """Write what happened as report.md and audit.json."""
    masses = {statement.name: statement.units / UNIT for statement in statements}
    lines = ["# Peer demo", "", f"{len(demo.folders)} processes, {seconds:.0f} s.", ""]
    lines += ["| peer | rounds | μ | accuracy, first → last | kills | state |", "|---" * 6 + "|"]
    for name, folder in demo.folders.items():
        scores = read_scores(folder.path, "accuracy")
        accuracy = list(scores.values())
        change = f"{accuracy[0]:.3f} → {accuracy[-1]:.3f}" if accuracy else "–"
        mass = f"{masses[name]:.4f}"
        state = demo.readings[name].state
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
