"""For a long time: memory does not grow, and books and logs keep to the bound the docs give."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiverfl.peer.accounts import signing
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import read_statement, write_durably
from quiverfl.peer.accounts.ledger import UNIT
from quiverfl.peer.control import NotRunning, send_order
from quiverfl.peer.link.identity import CERTIFICATE, KEY, Identity, issue_certificate
from quiverfl.peer.link.roster import ROSTER, Roster
from quiverfl.peer.link.wire import Order
from quiverfl.peer.metrics import JsonLines, Log

from .malice import WAYS
from .swarm import CONTEXT, Options, Swarm, build, in_memory, make_folders

FIXED, A_ROUND, A_SHARE = 12_000_000, 300, 600
"""docs/how-to/operate-peers.md: bytes of the books in all, and for each round and each share."""


def bound(rounds: int, shares: int) -> int:
    return FIXED + A_ROUND * rounds + A_SHARE * shares


def books(folder: Path) -> tuple[int, int, int]:
    """(bytes without models, rounds, shares sent and taken) of a store."""
    store = folder / "store"
    statement = read_statement(store)
    files = [path for path in store.iterdir() if path.name.startswith("peer.sqlite")]
    shares = len(statement.sent) + len(statement.received)
    rounds = max(entry.round for entry in statement.entries)
    return sum(path.stat().st_size for path in files), rounds, shares


async def play(folders: list[Path], rounds: int) -> None:
    """So many rounds of the books alone: everybody pushes to everybody, signed, without a wire."""
    options = Options(size=4, rounds=rounds, mode="sync", neighbours=len(folders) - 1)
    nodes = {folder.name: build(folder, options) for folder in folders}
    papers = {folder.name: Identity.read(folder) for folder in folders}
    stores = {name: node.store.meta("incarnation") for name, node in nodes.items()}
    agreed = next(iter(nodes.values())).agreement.hash
    for t in range(rounds):
        for name, node in nodes.items():
            message = {"u": np.full(4, np.float32(t % 7))}
            parts = dict.fromkeys((peer for peer in nodes if peer != name), 1)
            await node.transactions.push(t, message, {"v": message["u"]}, parts, 1)
        for name, node in nodes.items():
            receipts = []
            for peer, other in nodes.items():
                if peer != name:
                    share = other.transactions.accounts.outbox[name]
                    pair = (stores[peer], stores[name])
                    proof = signing.sign_transfer(papers[peer], "share", share, agreed, pair)
                    body = node.agreement.manifest.unpack(other.store.payload(share.digest))
                    receipts.append((replace(share, proof=proof), body))
            await node.transactions.absorb(receipts, [], finish=True)
        for name, node in nodes.items():
            for peer, share in list(node.transactions.accounts.outbox.items()):
                pair = (stores[name], stores[peer])
                proof = signing.sign_transfer(papers[peer], "applied", share, agreed, pair)
                await node.transactions.acknowledge(replace(share, proof=proof))
    assert all(not node.transactions.accounts.outbox for node in nodes.values())
    for node in nodes.values():
        node.store.close()


def check_books(folders: list[Path], rounds: int) -> None:
    is_genuine = signing.signature_check(Roster.read(folders[0] / ROSTER))
    report = audit([read_statement(folder / "store") for folder in folders], is_genuine=is_genuine)
    assert report.passed, report.problems
    assert report.units == len(folders) * UNIT
    for folder in folders:
        nbytes, seen, shares = books(folder)
        assert shares == 2 * (len(folders) - 1) * rounds
        print(f"{nbytes} bytes, {rounds} rounds, {shares} shares: {nbytes / shares:.0f} a share")
        assert nbytes <= bound(seen, shares)
        models = [p for p in (folder / "store").iterdir() if p.name[:6] in ("state-", "share-")]
        assert len(models) == 1  # its state; every share was acknowledged


def test_the_books_keep_to_their_bound(tmp_path: Path) -> None:
    folders = make_folders(tmp_path, 2)
    asyncio.run(play(folders, 60))
    check_books(folders, 60)


@pytest.mark.slow
def test_the_books_keep_to_their_bound_over_ten_thousand_rounds() -> None:
    with in_memory() as root:
        folders = make_folders(root, 3)
        asyncio.run(play(folders, 10_000))
        check_books(folders, 10_000)


def test_others_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever they bring about ten thousand times is told a hundred times, and then counted."""
    log = Log("peer-0", logging.getLogger("quiverfl.peer.flood"))
    with caplog.at_level(logging.INFO, "quiverfl.peer.flood"):
        began = time.monotonic()
        for number in range(10_000):
            log.alarm("caller refused", number=number)
        log("started")
        for number in range(300):
            log("round", round=number)
        allowed = 101 + int(time.monotonic() - began)
        lines = [record.getMessage() for record in caplog.records]
        assert 100 <= lines.count("caller refused") <= allowed
        assert lines.count("round") == 300
        assert "started" in lines
        log._allowances["caller refused"].at -= 5.0  # five seconds later
        log.alarm("caller refused", number=10_000)
        last = JsonLines().format(caplog.records[-1])
        assert '"left_out": 9' in last


# The soak: processes, killed and restarted all the time


def resident(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


TURNS = ("slow", "silent", "replaying", "flooding", "huge norm", "not a number", "wrong shape")
"""The ways of malice that the culprit takes one after the other, each on a new store."""


def misbehave(way: str, folder: Path, options: Options) -> None:
    """What the culprit's process runs."""
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    asyncio.run(WAYS[way](folder, options, lambda: 0))  # type: ignore[arg-type]


class Month:
    """A month in the life of seven peers: all that happens to them, in an order drawn at random.

    Three are steady, three are killed, stopped and renewed, and one is malicious.
    """

    def __init__(self, root: Path, chance: random.Random) -> None:
        options = Options(size=100_000, seconds=0.05, settings={"round_interval": 0.05})
        self.swarm, self.chance, self.root = Swarm(root, 7, options), chance, root
        names = list(self.swarm.folders)
        self.steady, self.unsteady, self.culprit = names[:3], names[3:6], names[6]
        self.happened: Counter[str] = Counter()
        self._turn = -1

    def start(self) -> None:
        for name in (*self.steady, *self.unsteady):
            self.swarm.start(name)
        self.swarm.wait_for_round(20, 120, (*self.steady, *self.unsteady))

    def event(self) -> None:
        events = {"kill": 10, "pause": 3, "renew": 1, "leave alone": 2, "culprit": 1}
        (name,) = self.chance.choices(list(events), list(events.values()))
        self.happened[name] += 1
        getattr(self, f"_{name.replace(' ', '_')}")(self.chance.choice(self.unsteady))

    def _kill(self, victim: str) -> None:
        self.swarm.kill(victim)
        time.sleep(self.chance.uniform(0.0, 1.0))
        self.swarm.start(victim)

    def _pause(self, victim: str) -> None:
        """The others hear nothing of it, as in a partition."""
        _pause(self.swarm.processes[victim], self.chance.uniform(0.5, 8.0))

    def _renew(self, victim: str) -> None:
        """Another key, in mid-run; the old one is let in until all have the roster."""
        folder, fresh = self.swarm.folders[victim], self.root / f"fresh-{time.monotonic_ns()}"
        key = issue_certificate(self.root / "authority", victim, fresh)
        roster = Roster.read(folder / ROSTER).with_key(victim, key)
        for other in self.swarm.folders.values():
            roster.write(other / ROSTER)
        for name in (KEY, CERTIFICATE):
            write_durably(folder / name, (fresh / name).read_bytes())

    def _leave_alone(self, victim: str) -> None:
        """Down for a while; the others go on."""
        self.swarm.kill(victim)
        time.sleep(self.chance.uniform(3.0, 10.0))
        self.swarm.start(victim)

    def _culprit(self, _: str) -> None:
        """The malicious member is evicted by all, and comes back with a new store and way."""
        process = self.swarm.processes.pop(self.culprit, None)
        folder = self.swarm.folders[self.culprit]
        if process is not None:
            process.kill()
            process.join()
            for name in (*self.steady, *self.unsteady):
                order = Order(action="evict", peer=self.culprit)
                with contextlib.suppress(NotRunning):  # it hears of it from the others
                    send_order(self.swarm.folders[name], order)
        shutil.rmtree(folder / "store", ignore_errors=True)
        self._turn += 1
        way = TURNS[self._turn % len(TURNS)]
        self.happened[f"culprit: {way}"] += 1
        process = CONTEXT.Process(
            target=misbehave, args=(way, folder, self.swarm.options), daemon=True
        )
        process.start()
        self.swarm.processes[self.culprit] = process

    def end(self) -> None:
        if self.culprit in self.swarm.processes:
            self.swarm.processes[self.culprit].kill()
            self.swarm.processes.pop(self.culprit).join()
        self.swarm.stop_all(60.0)


@pytest.mark.slow
def test_a_month_in_the_life(tmp_path: Path) -> None:
    """Memory, books and logs stay bounded, and the books are exact; `make soak` runs an hour.

    QUIVER_SOAK_SECONDS says how long; ten minutes otherwise.
    """
    seconds = float(os.environ.get("QUIVER_SOAK_SECONDS", "600"))
    month = Month(tmp_path, random.Random(1))
    swarm, memory = month.swarm, {name: list[int]() for name in month.steady}
    try:
        month.start()
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            month.event()
            time.sleep(2.0)
            for name in month.steady:
                process = swarm.processes[name]
                assert process.exitcode is None, swarm.log(name)[-2000:]
                memory[name].append(resident(int(process.pid or 0)))
        reached = {name: len(swarm.history(name)) for name in month.steady}
        swarm.wait_for_round(min(reached.values()) + 5, 60, month.steady)
        month.end()
    finally:
        swarm.close()
    honest = [swarm.folders[name] for name in (*month.steady, *month.unsteady)]
    is_genuine = signing.signature_check(Roster.read(honest[0] / ROSTER))
    report = audit([read_statement(folder / "store") for folder in honest], is_genuine=is_genuine)
    assert report.passed, report.problems
    print(dict(month.happened), f"{report.transfers} shares, error {report.error}")
    for name in month.steady:
        quarter = max(1, len(memory[name]) // 4)
        before = statistics.median(memory[name][quarter : 2 * quarter])
        after = statistics.median(memory[name][-quarter:])
        nbytes, rounds, shares = books(swarm.folders[name])
        log = (swarm.folders[name] / "log.txt").stat().st_size
        print(
            f"{name}: {before / 1e6:.1f} MB, later {after / 1e6:.1f} MB "
            f"({after / before - 1:+.1%}); {rounds} rounds, {shares} shares, books "
            f"{nbytes / 1e6:.2f} MB, log {log / 1e6:.2f} MB"
        )
        assert after < 1.05 * before
        assert nbytes <= bound(rounds, shares)


def _pause(process: Any, seconds: float) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGCONT)
