"""The store: a commit happened entirely or not at all, and says so when the disk does not help."""

from __future__ import annotations

import asyncio
import hashlib
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import disk, ledger
from quiverfl.peer.accounts.audit import audit
from quiverfl.peer.accounts.disk import StoreError, read_statement
from quiverfl.peer.accounts.ledger import UNIT, Accounts, Entry, Share, Transfer
from quiverfl.peer.accounts.store import Memory, Store
from quiverfl.peer.accounts.transactions import Transactions
from quiverfl.peer.link.messages import Manifest, scale_message, sum_magnitudes, sum_message
from quiverfl.peer.link.wire import Clock

U = {"u": np.arange(1, 9, dtype=np.float32)}
V = {"v": np.full(3, 7.0, dtype=np.float32)}


class Crash(Exception):
    """Raised in place of a kill: what follows never happens."""


def create(folder: Path, trace=lambda point: None) -> Store:
    entry = Entry("start", 0, UNIT, UNIT, 0, sum_message(U), 0.0, 0.0, 0.0, sum_magnitudes(U))
    return Store.create(folder, Accounts("a", UNIT), Memory(U, V), entry, "agreed", trace)


def push(store: Store) -> None:
    """Half to b, as the runtime does it."""
    accounts = store.accounts()
    message = store.memory().message
    share = scale_message(message, 1, 2)
    payload = Manifest.of(share).pack(share)
    digest = hashlib.sha256(payload).hexdigest()
    units = ledger.divide_units(accounts.units, {"b": 1}, 1)["b"]
    after = ledger.push(accounts, accounts.round, {"b": Share(units, digest, sum_message(share))})
    entry = Entry(
        "push",
        0,
        after.units,
        0,
        units,
        sum_message(share),
        0.0,
        sum_message(share),
        0.0,
        sum_magnitudes(share),
    )
    store.push(after, Memory(share, V), [after.outbox["b"]], {digest: payload}, entry)


def test_everything_comes_back(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    push(store)
    accounts, incarnation = store.accounts(), store.meta("incarnation")
    store.close()
    again = Store.open(tmp_path / "s")
    assert again.accounts() == accounts
    assert again.meta("incarnation") == incarnation
    assert np.array_equal(again.memory().message["u"], U["u"] / 2)
    assert np.array_equal(again.memory().rest["v"], V["v"])
    transfer = accounts.outbox["b"]
    assert again.payload(transfer.digest) == (U["u"] / 2).tobytes()
    assert audit([read_statement(tmp_path / "s")]).passed


def test_an_acknowledged_share_is_forgotten(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    push(store)
    transfer = store.accounts().outbox["b"]
    assert list((tmp_path / "s").glob("share-*"))
    store.acknowledge(ledger.acknowledge(store.accounts(), transfer), transfer)
    assert not list((tmp_path / "s").glob("share-*"))
    assert len(list((tmp_path / "s").glob("state-*"))) == 1


def work_of_a_commit(store: Store, past: int) -> int:
    """Steps of the database's machine to commit a share, after so many that have arrived."""
    shares = [("a", "c", seq, seq, 1, "d" * 64, 0.0, "p", "acknowledged") for seq in range(past)]
    store._database.executemany("INSERT INTO sent VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", shares)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    store._database.set_progress_handler(step, 1)
    push(store)
    store._database.set_progress_handler(None, 0)
    return steps


def test_a_commit_costs_the_same_after_a_long_past(tmp_path: Path) -> None:
    fresh, old = create(tmp_path / "fresh"), create(tmp_path / "old")
    old._database.execute("DROP INDEX waiting")  # as an older version has left it
    old.close()
    old = Store.open(tmp_path / "old")
    few, many = work_of_a_commit(fresh, 10), work_of_a_commit(old, 2000)
    assert many < 1.2 * few, (few, many)
    fresh.close()
    old.close()


@pytest.mark.parametrize(
    ("point", "units"),
    [
        ("before push files", UNIT),
        ("before push commit", UNIT),
        ("after push commit", UNIT // 2),
    ],
)
def test_a_crash_at_any_point_leaves_the_state_before_or_after(
    tmp_path: Path, point: str, units: int
) -> None:
    def trace(at: str) -> None:
        if at == point:
            raise Crash

    store = create(tmp_path / "s", trace)
    with pytest.raises(Crash):
        push(store)
    store.close()
    again = Store.open(tmp_path / "s")
    assert again.accounts().units == units
    assert len(list((tmp_path / "s").glob("state-*"))) == 1
    assert bool(list((tmp_path / "s").glob("share-*"))) == (units < UNIT)
    assert audit([read_statement(tmp_path / "s")]).passed


def test_one_process_per_store(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    with pytest.raises(QuiverError, match="in use"):
        Store.open(tmp_path / "s")
    store.close()
    Store.open(tmp_path / "s").close()


def test_a_store_is_never_overwritten(tmp_path: Path) -> None:
    create(tmp_path / "s").close()
    with pytest.raises(QuiverError, match="not overwritten"):
        create(tmp_path / "s")


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    file = next((tmp_path / "s").glob("state-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match="checksum differs"):
        store.memory()


def test_a_full_disk_stops_the_commit_and_loses_nothing(tmp_path: Path) -> None:
    """The file size limit makes the kernel refuse the write, as a full disk does."""
    store = create(tmp_path / "s")
    before = store.accounts()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        with pytest.raises(StoreError, match="Nothing was lost"):
            push(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert store.accounts() == before
    assert not list((tmp_path / "s").glob("*.part"))
    push(store)  # there is room again
    assert store.accounts().units == UNIT // 2
    assert audit([read_statement(tmp_path / "s")]).passed


def test_a_read_only_store_is_refused_with_a_sentence(tmp_path: Path) -> None:
    """In a user namespace of its own, so that root is held to the permissions as well."""
    create(tmp_path / "s").close()
    folder = tmp_path / "s"
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
    script = tmp_path / "open.py"
    script.write_text(
        "from pathlib import Path\n"
        "from quiverfl.errors import QuiverError\n"
        "from quiverfl.peer.accounts.store import Store\n"
        f"try: Store.open(Path({str(tmp_path / 's')!r}))\n"
        "except QuiverError as problem: print(problem)\n"
    )
    if not shutil.which("unshare"):
        pytest.skip("unshare is not installed: cannot mount a folder read-only")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"{mount} && exec {sys.executable} {script}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode and "mount" in done.stderr + done.stdout:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert "cannot write to" in done.stdout, done.stderr
    assert "Read-only file system" in done.stdout


def test_the_same_transfer_cannot_be_booked_twice(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    transfer = Transfer("b", "a", 1, 0, 5, "d", 0.0)
    store.refuse(ledger.refuse(store.accounts(), transfer, "not finite"), transfer, "not finite")
    with pytest.raises(StoreError):
        store.refuse(store.accounts(), transfer, "not finite")


def test_a_restored_backup_is_caught_by_the_audit(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    store.close()
    shutil.copytree(tmp_path / "s", tmp_path / "backup")
    store = Store.open(tmp_path / "s")
    push(store)
    transfer = store.accounts().outbox["b"]
    store.close()
    b = create(tmp_path / "b")
    taken = ledger.absorb(Accounts("b", UNIT), [transfer])
    entry = Entry("absorb", 0, taken.units, transfer.units, 0, 54.0, transfer.total, 0.0, 0.0, 54.0)
    b.absorb(taken, Memory({"u": U["u"] * np.float32(1.5)}, V), [transfer], [], entry)
    b.close()
    assert audit([read_statement(tmp_path / "s"), read_statement(tmp_path / "b")]).passed
    report = audit([read_statement(tmp_path / "backup"), read_statement(tmp_path / "b")])
    assert report.error == transfer.units
    assert any("backup was restored" in problem for problem in report.problems)


def test_eviction_files_the_past_under_another_name(tmp_path: Path) -> None:
    store = create(tmp_path / "s")
    store.update(ledger.register_store(store.accounts(), "b", "first"))
    push(store)
    outbox = store.accounts().outbox["b"]
    store.evict(ledger.evict(store.accounts(), "b"), "b", outbox)
    report = audit([read_statement(tmp_path / "s")])
    assert report.passed
    assert report.written_off == UNIT // 2
    store.update(ledger.register_store(store.accounts(), "b", "second"))
    push(store)  # number 1 again, to the new store
    assert store.accounts().outbox["b"].seq == 1
    assert audit([read_statement(tmp_path / "s")]).passed


def test_a_share_of_a_peer_evicted_meanwhile_is_not_merged(tmp_path: Path) -> None:
    """The eviction comes between choosing what to merge and merging it."""
    store = create(tmp_path / "s")
    transactions = Transactions(store, Manifest.of(U))
    payload = Manifest.of(U).pack(U)
    share = Transfer("b", "a", 1, 0, UNIT // 2, hashlib.sha256(payload).hexdigest(), sum_message(U))

    async def scenario() -> None:
        await transactions.register_store("b", "first store")
        await transactions.evict("b")
        await transactions.absorb([(share, U)], [], finish=True)

    asyncio.run(scenario())
    assert (transactions.accounts.units, transactions.accounts.round) == (UNIT, 1)
    store.close()
    report = audit([read_statement(tmp_path / "s")])
    assert report.passed, report.problems
    assert report.units == UNIT


def test_news_that_comes_in_the_middle_of_a_commit_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits run in a thread of their own; greetings with others' clocks come in meanwhile."""
    store = create(tmp_path / "s")
    transactions = Transactions(store, Manifest.of(U))
    honest = ledger.record_clocks

    def hear(peer: str, pushes: int) -> None:
        clock = Clock(peer=peer, store="5" * 16, pushes=pushes, proof=f"{'0' * 66} 0")
        transactions.record_clocks([clock], lambda _: True)

    def interrupted(accounts: Accounts, known: Mapping[str, tuple[str, int, str]]) -> Accounts:
        for peer in known:
            if peer == "b":
                hear("c", 3)
        return honest(accounts, known)

    async def scenario() -> None:
        for peer in ("b", "c"):
            await transactions.register_store(peer, "5" * 16)
        hear("b", 2)
        monkeypatch.setattr(ledger, "record_clocks", interrupted)
        await transactions.push(0, U, V, {"b": 1}, 1)
        await transactions.absorb([], [], finish=True)

    asyncio.run(scenario())
    assert [store.accounts().link(peer).pushes for peer in ("b", "c")] == [2, 3]
    store.close()


@pytest.mark.parametrize("words", ["database is locked", "locking protocol"])
def test_a_store_that_its_peer_keeps_to_itself_is_said_to_be_in_use(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that it was damaged, as other errors of the database say."""
    create(tmp_path / "s").close()

    class Busy:
        def execute(self, query: str) -> None:
            raise sqlite3.OperationalError(words)

        def close(self) -> None:
            pass

    monkeypatch.setattr(disk.sqlite3, "connect", lambda *given, **options: Busy())
    with pytest.raises(QuiverError, match=r"is in use: .*Try again"):
        read_statement(tmp_path / "s")
