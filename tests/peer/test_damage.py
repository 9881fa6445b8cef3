"""Records that were changed at rest are refused before any mass is spent, with exit code 4."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quiverfl.peer.accounts.disk import StoreError
from quiverfl.peer.accounts.signing import signature_check
from quiverfl.peer.accounts.store import Store
from quiverfl.peer.link.roster import ROSTER, Roster

from .swarm import Options, build, make_folders
from .test_life import finish, until

OPTIONS = Options(size=50, rounds=1_000_000, neighbours=1, seconds=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A peer that has traded for some rounds, and has a share in its outbox."""
    folders = make_folders(tmp_path_factory.mktemp("run"), 2)

    async def scenario() -> None:
        nodes = [build(folder, OPTIONS) for folder in folders]
        tasks = [asyncio.create_task(node.run()) for node in nodes]
        await until(lambda: all(node.metrics.counts["transfers"] > 8 for node in nodes))
        await finish(nodes[1], tasks=tasks[1:])
        await until(lambda: bool(nodes[0].transactions.accounts.outbox))
        await finish(nodes[0], tasks=tasks[:1])

    asyncio.run(scenario())
    return folders[0]


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder / "store", tmp_path / "store"))


def execute(store: Path, *statements: str) -> None:
    database = sqlite3.connect(store / "peer.sqlite")
    for statement in statements:
        database.execute(statement)
    database.commit()
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()


def verify(store: Path, folder: Path) -> None:
    opened = Store.open(store)
    try:
        opened.verify(signature_check(Roster.read(folder / ROSTER)))
    finally:
        opened.close()


def change_account(store: Path) -> None:
    database = sqlite3.connect(store / "peer.sqlite")
    body = json.loads(database.execute("SELECT body FROM account").fetchone()[0])
    body["units"] += 10**12
    database.execute("UPDATE account SET body = ?", (json.dumps(body),))
    database.commit()
    database.close()


def overwrite_page(store: Path) -> None:
    execute(store)  # everything is in the file now
    path = store / "peer.sqlite"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[16:18], "big")
    for page in range(2, len(content) // size):
        content[page * size : page * size + 64] = b"\xff" * 64
    path.write_bytes(content)


def flip_share(store: Path) -> None:
    path = next(store.glob("share-*"))
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "balance": (change_account, "account does not match its last entry"),
    "entry": (
        lambda store: execute(store, "UPDATE entries SET units = units + 1 WHERE number = 4"),
        "does not add up in mass",
    ),
    "share taken": (
        lambda store: execute(store, "UPDATE received SET units = units + 1 WHERE seq = 2"),
        "transfers do not explain its account",
    ),
    "share forgotten": (
        lambda store: execute(store, "DELETE FROM sent WHERE seq = 2"),
        "transfers do not explain its account",
    ),
    "two that make up for each other": (
        lambda store: execute(
            store,
            "UPDATE received SET units = units + 1 WHERE seq = 2",
            "UPDATE received SET units = units - 1 WHERE seq = 3",
        ),
        "not signed by its sender",
    ),
    "receipt": (
        lambda store: execute(store, "UPDATE sent SET digest = proof WHERE seq = 2"),
        "no receipt for it",
    ),
    "page": (overwrite_page, "are damaged"),
    "deleted share": (lambda store: next(store.glob("share-*")).unlink(), "cannot read"),
    "share": (flip_share, "not what was committed"),
    "deleted state": (
        lambda store: next(store.glob("state-*")).unlink(),
        "are damaged|cannot read",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_changed_records_are_refused(kind: str, store: Path, folder: Path) -> None:
    change, words = DAMAGE[kind]
    verify(store, folder)
    change(store)
    with pytest.raises(StoreError, match=words):
        verify(store, folder)


def test_a_peer_does_not_start_on_changed_records(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    change_account(copy / "store")

    async def scenario() -> None:
        with pytest.raises(StoreError, match="Nothing is spent from them"):
            build(copy, replace(OPTIONS, rounds=3))

    asyncio.run(scenario())
