"""Real peers for tests: a quadratic to train, folders with keys, processes to kill."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.audit import AuditReport, audit
from quiverfl.peer.accounts.disk import read_statement
from quiverfl.peer.link import identity
from quiverfl.peer.link.messages import Leaves, Manifest
from quiverfl.peer.link.roster import ROSTER, Member, Roster
from quiverfl.peer.link.wire import PROTOCOL
from quiverfl.peer.metrics import JsonLines
from quiverfl.support.environment import keep_freed_memory
from quiverfl.transforms.codec import MessageCodec

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["quiverfl.peer.setup", "sklearn.datasets"])


class Quadratic:
    """A client that pulls z towards its own target; the personal part is a counter."""

    def __init__(
        self,
        number: int,
        size: int,
        seconds: float = 0.0,
        rate: float = 0.3,
        coding: MessageCodec | None = None,
    ) -> None:
        chance = np.random.default_rng(number)
        self._target = chance.normal(size=size).astype(np.float32)
        self._seconds, self._rate = seconds, np.float32(rate)
        self._u = np.zeros(size, dtype=np.float32)
        self._v = np.full(4, 1234.5 + number, dtype=np.float32)
        self._mass = np.float32(1.0)
        self.manifest = Manifest.of({"u": self._u}, coding=coding)

    def train(self, round: int, active: bool, share: float = 1.0, keep: bool = False) -> None:
        time.sleep(self._seconds)
        z = self._u / self._mass
        self._u = self._u - self._rate * self._mass * (z - self._target)
        self._v = self._v + np.float32(1.0)

    def message(self, round: int | None = None) -> Leaves:
        return {"u": self._u.copy()}

    def rest(self) -> Leaves:
        return {"v": self._v.copy()}

    def merge(self, message: Mapping[str, np.ndarray], mass: float) -> None:
        self._u, self._mass = np.array(message["u"]), np.float32(mass)

    def restore(self, rest: Mapping[str, np.ndarray]) -> None:
        self._v = np.array(rest["v"])

    def change_run(self, lr: float | None, rounds: int) -> None:
        self._rate = np.float32(self._rate if lr is None else lr)

    def evaluate(self, round: int, stage: str) -> dict[str, float]:
        z = self._u / self._mass
        return {"loss": float(np.square(z - self._target).mean())}

    view = None

    def report_to(self, clients: list[int]) -> None:
        """Nothing: no topology of these tests looks."""

    def record(self) -> dict[str, int]:
        return {"steps": 1}

    def model(self) -> Leaves:
        return {"body": self._u / self._mass, "head": self._v.copy()}


@dataclass
class Options:
    """Of one peer process."""

    size: int = 1000
    rounds: int = 1_000_000
    neighbours: int = 2  # of random_push
    ring: bool = False  # everybody gives to the next one, instead of random_push
    mode: Literal["sync", "async"] = "async"
    seconds: float = 0.01
    rate: float = 0.3
    deadline: float = 60.0
    linger: float = 10.0
    files: int = 0  # the limit on open files, where one is set
    crash_at: str = ""  # a point of the runtime's trace
    crash_after: int = 0  # the how-many-th passage
    newest: int = PROTOCOL  # version of the protocol that it speaks
    coding: MessageCodec | None = None
    dishonest: bool = False  # it goes on with records that do not add up
    settings: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)


WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
PORTS = itertools.cycle(range(20_000 + 1_000 * WORKER, 21_000 + 1_000 * WORKER))
"""Below the ports that the system gives away, and of this test process alone: a port that is free
now must still be free when a peer binds it."""


def free_ports(count: int) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        port = next(PORTS)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            ports.append(port)
    return ports


def make_folders(root: Path, count: int, run: str = "test") -> list[Path]:
    """An authority, and a folder with keys and roster for each peer."""
    identity.create_authority(root / "authority", run)
    members = []
    for number, port in enumerate(free_ports(count)):
        name = f"peer-{number}"
        key = identity.issue_certificate(root / "authority", name, root / name)
        members.append(Member(name, f"127.0.0.1:{port}", (key,)))
    roster = Roster(run, tuple(members))
    for member in members:
        roster.write(root / member.name / ROSTER)
    return [root / member.name for member in members]


def build(folder: Path, options: Options, trace: Callable[[str], None] = lambda p: None) -> Any:
    """A node on a folder; must be called inside a running event loop."""
    from quiverfl.peer.accounts.store import NoStore, Store
    from quiverfl.peer.context import Agreement, Limits, PeerContext
    from quiverfl.peer.folder import Settings
    from quiverfl.peer.node import Node
    from quiverfl.peer.setup import create_store
    from quiverfl.topologies import directed_ring, random_push

    name = folder.name
    roster = Roster.read(folder / ROSTER)
    number = roster.number(name)
    learner = Quadratic(number, options.size, options.seconds, options.rate, options.coding)
    agreement = Agreement(roster.run, name, "c" * 64, learner.manifest, options.newest)
    member = roster.member(name)
    try:
        store = Store.open(folder / "store", trace)
        if not options.dishonest:
            store.verify(None)
    except NoStore:
        store = create_store(folder / "store", learner, agreement, trace)
    settings = Settings(
        rounds=options.rounds,
        mode=options.mode,
        deadline=options.deadline,
        linger=options.linger,
        bind="127.0.0.1:0" if member.dials_out else member.address,
        **options.settings,
    )
    lines = open(folder / "history.jsonl", "a", buffering=1)  # noqa: SIM115

    def record(line: dict[str, Any]) -> None:
        lines.write(json.dumps({**line, "at": time.time()}) + "\n")

    clients = settings.founders or len(roster.members)
    topology = random_push(clients=clients, neighbors=options.neighbours, seed=7)
    if options.ring:
        topology = directed_ring(clients)
    limits = Limits(**{"retry_cap": 2.0, **options.limits})
    ctx = PeerContext.open(folder, store, agreement, limits, trace)

    def grow(members: int) -> Any:
        return random_push(clients=members, neighbors=options.neighbours, seed=7)

    return Node(ctx, learner, topology, settings, record, grow)


def process_main(folder: Path, options: Options) -> None:
    """What a peer's process runs."""
    keep_freed_memory()  # as the command does
    if options.files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (options.files, options.files))
    passages: Counter[str] = Counter()

    def trace(point: str) -> None:
        passages[point] += 1
        if point == options.crash_at and passages[point] > options.crash_after:
            os._exit(137)

    async def run() -> None:
        node = build(folder, options, trace)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, node.stop)
        outcome = await node.run()
        (folder / "outcome.json").write_text(json.dumps(vars(outcome)))

    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    asyncio.run(run())


@contextmanager
def in_memory() -> Iterator[Path]:
    """A folder that need not wait for a disk, where the system has one: for all but power cuts."""
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


class Swarm:
    """Processes of peers, started and killed by name."""

    def __init__(self, root: Path, count: int, options: Options) -> None:
        self.folders = {folder.name: folder for folder in make_folders(root, count)}
        self.options = options
        self.processes: dict[str, BaseProcess] = {}

    def start(self, name: str, options: Options | None = None) -> None:
        process = CONTEXT.Process(
            target=process_main, args=(self.folders[name], options or self.options), daemon=True
        )
        process.start()
        self.processes[name] = process

    def start_all(self) -> None:
        for name in self.folders:
            self.start(name)

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.kill()
        process.join()

    def stop_all(self, seconds: float = 20.0) -> None:
        for process in self.processes.values():
            process.terminate()
        self.join_all(seconds)

    def join_all(self, seconds: float) -> None:
        """Until all have ended; one that ended with a traceback is told at once."""
        end = time.monotonic() + seconds
        while True:
            codes = {name: process.exitcode for name, process in self.processes.items()}
            for name, code in codes.items():
                assert code != 1, f"{name} failed; {self.log(name)[-2000:]}"
            running = [name for name, code in codes.items() if code is None]
            if not running:
                return
            late = f"{running} do not end; {running[0]}: {self.log(running[0])[-2000:]}"
            assert time.monotonic() < end, late
            self.processes[running[0]].join(0.5)

    def close(self) -> None:
        for process in self.processes.values():
            if process.exitcode is None:
                process.kill()
                process.join()

    def log(self, name: str) -> str:
        path = self.folders[name] / "log.txt"
        return path.read_text() if path.exists() else ""

    def history(self, name: str) -> list[dict[str, Any]]:
        path = self.folders[name] / "history.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def freeze(self, frozen: bool) -> None:
        """Stop the clocks of all processes for an audit in mid-flight."""
        for process in self.processes.values():
            if process.exitcode is None and process.pid:
                os.kill(process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def audit(self, live: bool = False) -> AuditReport:
        return audit([read_statement(f / "store") for f in self.folders.values()], live=live)

    def frozen_audit(self) -> AuditReport:
        """A clock may stop while its process has the database to itself: then try again."""
        for last in (False, False, False, True):
            self.freeze(True)
            try:
                return self.audit()
            except QuiverError as problem:
                if last or "is in use" not in str(problem):
                    raise
            finally:
                self.freeze(False)
            time.sleep(0.5)
        raise AssertionError("unreachable")

    def wait_for_round(self, round: int, seconds: float = 60.0, names: Any = None) -> None:
        names = list(names or self.folders)
        end = time.monotonic() + seconds
        while True:
            rounds = {n: len(self.history(n)) for n in names}
            if all(count >= round for count in rounds.values()):
                return
            assert time.monotonic() < end, f"rounds after {seconds} s: {rounds}"
            time.sleep(0.05)
