"""The tables of a peer's store, and reading a statement for the audit from them."""

from __future__ import annotations

import json
import math
import sqlite3
import time
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import safetensors.numpy

from quiverfl.errors import QuiverError
from quiverfl.peer.files import StoreError, read_checked
from quiverfl.peer.ledger import Accounts, Link, Transfer
from quiverfl.peer.manifest import total
from quiverfl.peer.statement import Entry, Received, Sent, Statement

FILE = "peer.sqlite"

Change = tuple[str, tuple[object, ...] | None]
"""A statement with its values; None for a script of several statements."""

CREATE = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE account (one INTEGER PRIMARY KEY CHECK (one = 1), body TEXT NOT NULL);
CREATE TABLE files (role TEXT NOT NULL, name TEXT PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE sent (sender TEXT, receiver TEXT, seq INTEGER, round INTEGER, units INTEGER,
  digest TEXT, total REAL, proof TEXT, status TEXT NOT NULL, PRIMARY KEY (receiver, seq));
CREATE TABLE received (sender TEXT, receiver TEXT, seq INTEGER, round INTEGER, units INTEGER,
  digest TEXT, total REAL, proof TEXT, refusal TEXT NOT NULL, PRIMARY KEY (sender, seq));
CREATE TABLE notices (body TEXT PRIMARY KEY);
CREATE TABLE shown (sender TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE entries (number INTEGER PRIMARY KEY, kind TEXT, round INTEGER, units INTEGER,
  units_in INTEGER, units_out INTEGER, total REAL, total_in REAL, total_out REAL, trained REAL,
  scale REAL)
"""

LATER = (
    "CREATE TABLE IF NOT EXISTS amendments (body TEXT PRIMARY KEY)",
    "CREATE INDEX IF NOT EXISTS waiting ON sent (digest) WHERE status = 'outbox'",
)
"""What a store of an older version does not have yet.

The index is for FORGET_SHARES, in every commit: without it each looks at all that was ever sent.
"""

FORGET_SHARES: list[Change] = [
    (
        "DELETE FROM files WHERE role = 'share' AND name NOT IN "
        "(SELECT 'share-' || digest FROM sent WHERE status = 'outbox')",
        (),
    )
]


def exists(database: sqlite3.Connection) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'account'"
    return bool(database.execute(query).fetchone()[0])


def account(accounts: Accounts) -> Change:
    return ("INSERT OR REPLACE INTO account VALUES (1, ?)", (json.dumps(asdict(accounts)),))


def accounts_from(body: str) -> Accounts:
    values = json.loads(body)
    links = {}
    for peer, link in values.pop("links").items():
        outbox = link.pop("outbox")
        links[peer] = Link(**link, outbox=Transfer(**outbox) if outbox else None)
    return Accounts(**values, links=links)


def sent(transfer: Transfer, status: str) -> Change:
    return ("INSERT INTO sent VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*astuple(transfer), status))


def received(transfer: Transfer, refusal: str) -> Change:
    statement = "INSERT INTO received VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
    return (statement, (*astuple(transfer), refusal))


def notice(body: str) -> Change:
    return ("INSERT OR IGNORE INTO notices VALUES (?)", (body,))


def amendment(body: str) -> Change:
    return ("INSERT OR IGNORE INTO amendments VALUES (?)", (body,))


def shown(sender: str, body: str) -> Change:
    return ("INSERT OR REPLACE INTO shown VALUES (?, ?)", (sender, body))


def status(transfer: Transfer, word: str) -> Change:
    statement = "UPDATE sent SET status = ?, proof = ? WHERE receiver = ? AND seq = ?"
    return (statement, (word, transfer.proof, transfer.receiver, transfer.seq))


def entry(line: Entry) -> Change:
    marks = ", ".join("?" * 10)
    return (f"INSERT INTO entries VALUES (NULL, {marks})", astuple(line))


def _numbers(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """SQLite keeps what is not a number as nothing."""
    return tuple(math.nan if value is None else value for value in row)


def _transfer(row: tuple[Any, ...]) -> Transfer:
    return Transfer(*_numbers(row[:8]))


def read_statement(folder: Path) -> Statement:
    """One peer's records as of one moment, also while it runs."""
    if not (folder / FILE).exists():
        raise QuiverError(f"{folder} holds no peer's store.")
    for _ in range(20):
        try:
            return _read(folder)
        except StoreError:  # the running peer replaced its files in between
            time.sleep(0.05)
    return _read(folder)


def _read(folder: Path) -> Statement:
    database = sqlite3.connect(folder / FILE, isolation_level=None, timeout=10)
    try:
        database.execute("BEGIN")
        accounts = accounts_from(database.execute("SELECT body FROM account").fetchone()[0])
        rows = [_numbers(row) for row in database.execute("SELECT * FROM entries")]
        entries = [Entry(*row[1:]) for row in rows]
        outgoing = [Sent(_transfer(r), r[8]) for r in database.execute("SELECT * FROM sent")]
        incoming = database.execute("SELECT * FROM received")
        taken = [Received(_transfer(r), r[8]) for r in incoming]
        meta = dict(database.execute("SELECT key, value FROM meta"))
        query = "SELECT name, digest FROM files WHERE role = 'state'"
        name, digest = database.execute(query).fetchone()
    except (sqlite3.Error, IndexError) as problem:
        raise QuiverError(
            f"{folder} cannot be read as a peer's store, or is of another version of quiverfl: "
            f"{problem}."
        ) from problem
    finally:
        database.close()
    tensors = safetensors.numpy.load(read_checked(folder / name, digest))
    message = {key: leaf for key, leaf in tensors.items() if key.startswith("message.")}
    gone = frozenset(peer for peer, link in accounts.links.items() if link.gone)
    return Statement(
        name=accounts.name,
        units=accounts.units,
        written_off=accounts.written_off,
        entries=entries,
        sent=outgoing,
        received=taken,
        total=total(message),
        gone=gone,
        agreement=meta.get("agreement", ""),
        incarnation=meta.get("incarnation", ""),
    )
