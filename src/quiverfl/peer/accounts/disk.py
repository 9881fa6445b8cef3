"""The files of a peer: checked files, the tables of its store, a statement for the audit.

A file that the disk refuses, or gives back changed, stops the peer with a sentence.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any, TypeVar

import safetensors.numpy

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import (
    Accounts,
    Entry,
    LinkRecord,
    Received,
    Sent,
    Statement,
    Transfer,
)
from quiverfl.peer.link.messages import sum_message
from quiverfl.peer.link.wire import Terms
from quiverfl.support import durable

log = logging.getLogger("quiverfl.peer")
Result = TypeVar("Result")

SHORTAGE = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EINTR, errno.ENOMEM}
SHORTAGE_SECONDS = 30.0
"""Errors that pass by themselves, as when descriptors run out, and how long a write waits for
that."""


class StoreError(QuiverError):
    """The disk did not take a file, or did not give it back as it was."""


def write_durably(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file durably and atomically, readable by its owner alone; or raise StoreError."""
    end = time.monotonic() + SHORTAGE_SECONDS
    while True:
        try:
            return durable.replace_file(path, content, mode)
        except OSError as problem:
            if problem.errno not in SHORTAGE or time.monotonic() > end:
                raise write_error(path.parent, problem) from problem
        time.sleep(0.1)


def read_checked(path: Path, digest: str) -> bytes:
    """Read a file whose content must still be what was committed."""
    content = _read_file(path, path.read_bytes)
    if hashlib.sha256(content).hexdigest() != digest:
        raise StoreError(
            f"{path} is not what was committed: its checksum differs. The disk or somebody changed "
            "it; evict this peer on the others and let it join again."
        )
    return content


def file_size(path: Path) -> int:
    return _read_file(path, lambda: path.stat().st_size)


def _read_file(path: Path, read: Callable[[], Result]) -> Result:
    try:
        return read()
    except OSError as problem:
        raise StoreError(
            f"cannot read {path}: {problem.strerror}. It belongs to the last commit; if the file "
            "is lost, evict this peer on the others and let it join again."
        ) from problem


def write_error(folder: Path, problem: Exception) -> StoreError:
    reason = problem.strerror if isinstance(problem, OSError) else str(problem)
    return StoreError(
        f"cannot write to {folder}: {reason}. Nothing was lost: the last commit stands and nothing "
        "after it was sent or acknowledged. Make room or make it writable, then start again."
    )


def damage(folder: Path, what: object) -> StoreError:
    return StoreError(
        f"the records in {folder} are damaged: {what} Nothing is spent from them. Keep the folder, "
        "evict this peer on the others and let it join again."
    )


def remove_all_but(folder: Path, keep: Callable[[str], bool]) -> None:
    """Remove the state and share files that no commit names."""
    for path in folder.iterdir():
        if path.name.startswith(("state-", "share-")) and not keep(path.name):
            try:
                path.unlink(missing_ok=True)
            except OSError as problem:  # it does no harm, and goes with a later commit
                log.error("cannot remove %s: %s. Check the disk.", path, problem.strerror)


# The tables of a store

FILE = "peer.sqlite"

Change = tuple[str, tuple[object, ...] | None]
"""An SQL statement with its values; None marks a script of several statements."""

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
"""Additions that a store of an earlier edition lacks.

The index serves FORGET_SHARES, which is part of every commit. Without it each commit reads every
share that was ever sent.
"""

FORGET_SHARES: list[Change] = [
    (
        "DELETE FROM files WHERE role = 'share' AND name NOT IN "
        "(SELECT 'share-' || digest FROM sent WHERE status = 'outbox')",
        (),
    )
]


def has_tables(database: sqlite3.Connection) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'account'"
    return bool(database.execute(query).fetchone()[0])


def save_accounts(accounts: Accounts) -> Change:
    return ("INSERT OR REPLACE INTO account VALUES (1, ?)", (json.dumps(asdict(accounts)),))


def parse_accounts(body: str) -> Accounts:
    values = json.loads(body)
    links = {}
    for peer, link in values.pop("links").items():
        outbox = link.pop("outbox")
        links[peer] = LinkRecord(**link, outbox=Transfer(**outbox) if outbox else None)
    return Accounts(**values, links=links)


def parse_terms(body: str) -> list[Terms]:
    return [Terms.model_validate_json(json.dumps(terms)) for terms in json.loads(body or "[]")]


def insert_sent(transfer: Transfer, status: str) -> Change:
    return ("INSERT INTO sent VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*astuple(transfer), status))


def insert_received(transfer: Transfer, refusal: str) -> Change:
    statement = "INSERT INTO received VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
    return (statement, (*astuple(transfer), refusal))


def insert_statement(table: str, body: str) -> Change:
    return (f"INSERT OR IGNORE INTO {table} VALUES (?)", (body,))


def save_proofs(sender: str, body: str) -> Change:
    return ("INSERT OR REPLACE INTO shown VALUES (?, ?)", (sender, body))


def set_status(transfer: Transfer, word: str) -> Change:
    statement = "UPDATE sent SET status = ?, proof = ? WHERE receiver = ? AND seq = ?"
    return (statement, (word, transfer.proof, transfer.receiver, transfer.seq))


def insert_entry(line: Entry) -> Change:
    marks = ", ".join("?" * 10)
    return (f"INSERT INTO entries VALUES (NULL, {marks})", astuple(line))


def _restore_nan(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """SQLite stores NaN as NULL."""
    return tuple(math.nan if value is None else value for value in row)


def _parse_transfer(row: tuple[Any, ...]) -> Transfer:
    return Transfer(*_restore_nan(row[:8]))


def read_statement(folder: Path) -> Statement:
    """Read one peer's records as of one moment, also while it runs."""
    if not (folder / FILE).exists():
        raise QuiverError(f"{folder} holds no peer's store.")
    for _ in range(20):
        try:
            return _read_statement(folder)
        except StoreError:  # the running peer replaced its files in between
            time.sleep(0.05)
    return _read_statement(folder)


IN_USE = ("locked", "locking protocol")
"""SQLite's errors while another process has the database, such as one that was paused."""


def _read_statement(folder: Path) -> Statement:
    database = sqlite3.connect(folder / FILE, isolation_level=None, timeout=10)
    try:
        database.execute("BEGIN")
        accounts = parse_accounts(database.execute("SELECT body FROM account").fetchone()[0])
        rows = [_restore_nan(row) for row in database.execute("SELECT * FROM entries")]
        entries = [Entry(*row[1:]) for row in rows]
        outgoing = [Sent(_parse_transfer(r), r[8]) for r in database.execute("SELECT * FROM sent")]
        incoming = database.execute("SELECT * FROM received")
        taken = [Received(_parse_transfer(r), r[8]) for r in incoming]
        meta = dict(database.execute("SELECT key, value FROM meta"))
        query = "SELECT name, digest FROM files WHERE role = 'state'"
        name, digest = database.execute(query).fetchone()
    except (sqlite3.Error, IndexError, TypeError, ValueError) as problem:
        if any(word in str(problem) for word in IN_USE):
            raise QuiverError(
                f"{folder} is in use: its peer keeps it to itself for longer than usual "
                f"({problem}). Try again; if that peer was stopped in its tracks, let it go on."
            ) from problem
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
        total=sum_message(message),
        gone=gone,
        agreement=meta.get("agreement", ""),
        incarnation=meta.get("incarnation", ""),
        grants={name: t.grant for t in parse_terms(meta.get("terms", "")) for name in t.joins},
    )
