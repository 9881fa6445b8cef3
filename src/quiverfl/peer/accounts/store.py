"""A peer's durable memory: tensors in files, accounts and ledger in SQLite.

Files are durable before the transaction that names them; the transaction is the commit. Every
method that changes something is one commit: it happened either entirely or not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors.numpy

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts import disk
from quiverfl.peer.accounts.audit import SignatureCheck, find_damage
from quiverfl.peer.accounts.disk import (
    StoreError,
    damage,
    file_size,
    read_checked,
    remove_all_but,
    write_durably,
    write_error,
)
from quiverfl.peer.accounts.ledger import PAST, Accounts, Entry, Transfer
from quiverfl.peer.link.messages import Leaves
from quiverfl.peer.link.wire import Receipt, Terms
from quiverfl.support.durable import remove_partial
from quiverfl.support.locks import AlreadyLocked, Lock

VERIFIED = 5000
"""The newest shares, sent and taken, whose signatures are verified at every start; an audit takes
all."""
Trace = Callable[[str], None]
"""A test hook, called at named points so that a test can crash there."""


@dataclass(frozen=True)
class Memory:
    """State that training needs after a restart: the own share, and all that is never sent."""

    message: Leaves
    rest: Leaves

    def to_bytes(self) -> bytes:
        tensors = {f"message.{name}": leaf for name, leaf in self.message.items()}
        tensors |= {f"rest.{name}": leaf for name, leaf in self.rest.items()}
        return bytes(safetensors.numpy.save(tensors))

    @classmethod
    def from_bytes(cls, content: bytes) -> Memory:
        parts: dict[str, Leaves] = {"message": {}, "rest": {}}
        for name, leaf in safetensors.numpy.load(content).items():
            part, _, leaf_name = name.partition(".")
            parts[part][leaf_name] = leaf
        return cls(parts["message"], parts["rest"])


class NoStore(QuiverError):
    """The folder holds no finished store. An unfinished one has made no promise to a peer."""


class Store:
    """One peer's folder. `Store.create` once, `Store.open` ever after."""

    def __init__(self, folder: Path, trace: Trace = lambda point: None) -> None:
        self.folder = folder
        self._trace = trace
        self._mutex = threading.Lock()
        self._lock = _lock_store(folder)
        remove_partial(folder)
        self._database = sqlite3.connect(
            folder / disk.FILE, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")

    @classmethod
    def create(
        cls,
        folder: Path,
        accounts: Accounts,
        memory: Memory,
        entry: Entry,
        agreement: str,
        trace: Trace = lambda point: None,
        incarnation: str = "",
    ) -> Store:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            store = cls(folder, trace)
        except (OSError, sqlite3.Error) as problem:
            raise write_error(folder, problem) from problem
        if disk.has_tables(store._database):
            raise QuiverError(f"{folder} already holds a peer's store; it is not overwritten.")
        changes: list[disk.Change] = [(disk.CREATE, None)]
        changes += [(statement, ()) for statement in disk.LATER]
        for key, value in {
            "incarnation": incarnation or secrets.token_hex(8),
            "agreement": agreement,
            "name": accounts.name,
        }.items():
            changes.append(("INSERT INTO meta VALUES (?, ?)", (key, value)))
        store._commit("start", accounts, changes, memory, entry=entry)
        return store

    @classmethod
    def open(cls, folder: Path, trace: Trace = lambda point: None) -> Store:
        if not (folder / disk.FILE).exists():
            raise NoStore(f"{folder} holds no peer's store yet.")
        try:
            store = cls(folder, trace)
            if not disk.has_tables(store._database):
                store.close()
                raise NoStore(f"{folder} was never finished: quiver peer run makes it again.")
            for statement in disk.LATER:
                store._database.execute(statement)
            committed = {name for name, _ in store._rows("SELECT name, digest FROM files")}
            remove_all_but(folder, committed.__contains__)
        except (sqlite3.OperationalError, OSError) as problem:  # such as a disk that is read-only
            raise write_error(folder, problem) from problem
        except sqlite3.Error as problem:
            raise damage(folder, f"{problem}.") from problem
        return store

    def verify(self, is_genuine: SignatureCheck | None) -> None:
        """Refuse records that were changed since they were committed, before any mass is spent."""
        try:
            answer = self._rows("PRAGMA integrity_check(1)")
            if answer != [("ok",)]:
                raise damage(self.folder, f"{answer[0][0].splitlines()[-1]}.")
            for name, digest in self._rows("SELECT name, digest FROM files WHERE role = 'share'"):
                read_checked(self.folder / name, digest)
            problems = find_damage(disk.read_statement(self.folder), is_genuine, VERIFIED)
        except sqlite3.Error as problem:
            raise damage(self.folder, f"{problem}.") from problem
        except StoreError:
            raise
        except QuiverError as problem:
            raise damage(self.folder, problem) from problem
        if problems:
            raise damage(self.folder, problems[0])

    def close(self) -> None:
        self._database.close()
        self._lock.release()

    # What is stored

    def _rows(self, query: str, *values: object) -> list[tuple[str, ...]]:
        return list(self._database.execute(query, values))

    def meta(self, key: str) -> str:
        rows = self._rows("SELECT value FROM meta WHERE key = ?", key)
        return rows[0][0] if rows else ""

    def accounts(self) -> Accounts:
        return disk.parse_accounts(self._rows("SELECT body FROM account")[0][0])

    def memory(self) -> Memory:
        name, digest = self._rows("SELECT name, digest FROM files WHERE role = 'state'")[0]
        return Memory.from_bytes(read_checked(self.folder / name, digest))

    def nbytes(self) -> int:
        """The size of the folder on disk."""
        size = 0
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # replaced in the meantime
                size += path.stat().st_size
        return size

    def payload(self, digest: str) -> bytes:
        return read_checked(self.folder / f"share-{digest}", digest)

    def payload_size(self, digest: str) -> int:
        return file_size(self.folder / f"share-{digest}")

    def proofs(self) -> dict[str, str]:
        return {row[0]: row[1] for row in self._rows("SELECT sender, body FROM shown")}

    def statements(self, table: str) -> list[str]:
        """The signed statements in the table of a log, in the order in which they came."""
        return [row[0] for row in self._rows(f"SELECT body FROM {table} ORDER BY rowid")]

    def terms(self) -> list[Terms]:
        """The changes of the run that all members have signed, in the order of their rounds."""
        return disk.parse_terms(self.meta("terms"))

    def vouchers(self, receiver: str, rows: int, most: int) -> list[Transfer]:
        """List shares taken from peers other than `receiver`, in order, after the first `rows`."""
        query = (
            "SELECT * FROM received WHERE refusal = '' AND sender != ? ORDER BY rowid "
            "LIMIT ? OFFSET ?"
        )
        with self._mutex:
            taken = self._database.execute(query, (receiver, most, rows)).fetchall()
        return [Transfer(*row[:8]) for row in taken]

    def last_receipt(self, receiver: str) -> Receipt:
        """The last receipt that a neighbour has signed for a share of this peer."""
        query = (
            "SELECT status, seq, round, units, digest, proof FROM sent WHERE receiver = ? "
            "AND status IN ('acknowledged', 'refunded') ORDER BY seq DESC LIMIT 1"
        )
        with self._mutex:
            rows = self._database.execute(query, (receiver,)).fetchall()
        if not rows:
            return Receipt()
        status, seq, round, units, digest, proof = rows[0]
        word: Literal["applied", "refused"] = "applied" if status == "acknowledged" else "refused"
        values = {"seq": seq, "round": round, "units": units, "digest": digest, "proof": proof}
        return Receipt(word=word, **values)

    def senders_since(self, round: int) -> set[str]:
        """Members whose shares of this round or a later one were taken or refused."""
        with self._mutex:
            rows = self._rows("SELECT DISTINCT sender FROM received WHERE round >= ?", round)
        return {row[0] for row in rows}

    # Commits

    def save_meta(self, key: str, value: str) -> None:
        self._commit(
            "save meta", None, [("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))]
        )

    def add_statement(self, table: str, body: str) -> None:
        """Remember a member's signed statement in the table of its log."""
        self._commit(f"add to {table}", None, [disk.insert_statement(table, body)])

    def save_terms(self, terms: Iterable[Terms]) -> None:
        self.save_meta("terms", json.dumps([one.model_dump() for one in terms]))

    def save_proofs(self, sender: str, body: str) -> None:
        self._commit("save proofs", None, [disk.save_proofs(sender, body)])

    def update(self, accounts: Accounts) -> None:
        """Commit accounts alone, as when a neighbour was met or is leaving."""
        self._commit("update", accounts, [])

    def push(
        self,
        accounts: Accounts,
        memory: Memory,
        transfers: Iterable[Transfer],
        payloads: Mapping[str, bytes],
        entry: Entry,
    ) -> None:
        """Commit a split: the own share, and the shares for other peers in the outbox."""
        changes = [disk.insert_sent(transfer, "outbox") for transfer in transfers]
        self._commit("push", accounts, changes, memory, payloads, entry)

    def absorb(
        self,
        accounts: Accounts,
        memory: Memory,
        receipts: Iterable[Transfer],
        refunds: Iterable[Transfer],
        entry: Entry,
    ) -> None:
        """Commit a merge: receipts applied, watermarks moved, refused shares taken back."""
        changes = [disk.insert_received(receipt, "") for receipt in receipts]
        changes += [disk.set_status(refund, "refunded") for refund in refunds]
        self._commit("absorb", accounts, changes, memory, entry=entry)

    def acknowledge(self, accounts: Accounts, transfer: Transfer) -> None:
        self._commit("acknowledge", accounts, [disk.set_status(transfer, "acknowledged")])

    def refuse(self, accounts: Accounts, transfer: Transfer, reason: str) -> None:
        self._commit("refuse", accounts, [disk.insert_received(transfer, reason)])

    def evict(self, accounts: Accounts, peer: str, outbox: Transfer | None) -> None:
        """Write off the outbox; rename the records so that a new store can use the name."""
        changes = [disk.set_status(outbox, "written off")] if outbox else []
        past = f"{peer}{PAST}{accounts.link(peer).incarnation or 'unmet'}"
        changes.append(("UPDATE sent SET receiver = ? WHERE receiver = ?", (past, peer)))
        changes.append(("UPDATE received SET sender = ? WHERE sender = ?", (past, peer)))
        changes.append(("DELETE FROM shown WHERE sender = ?", (peer,)))
        self._commit("evict", accounts, changes)

    def _commit(
        self,
        kind: str,
        accounts: Accounts | None,
        changes: list[disk.Change],
        memory: Memory | None = None,
        payloads: Mapping[str, bytes] | None = None,
        entry: Entry | None = None,
    ) -> None:
        with self._mutex:
            self._trace(f"before {kind} files")
            if entry is not None:
                changes.append(disk.insert_entry(entry))
            written = {f"share-{digest}": body for digest, body in (payloads or {}).items()}
            if memory is not None:
                written[f"state-{secrets.token_hex(8)}"] = memory.to_bytes()
                changes.append(("DELETE FROM files WHERE role = 'state'", ()))
            for name, body in written.items():
                digest = hashlib.sha256(body).hexdigest()
                write_durably(self.folder / name, body)
                role = name.partition("-")[0]
                change = "INSERT OR REPLACE INTO files VALUES (?, ?, ?)"
                changes.append((change, (role, name, digest)))
            if accounts is not None:
                changes.append(disk.save_accounts(accounts))
                changes += disk.FORGET_SHARES
            self._trace(f"before {kind} commit")
            self._transact(changes)
            self._trace(f"after {kind} commit")
            if accounts is not None:
                self._sweep()

    def _transact(self, changes: list[disk.Change]) -> None:
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, values in changes:
                if values is None:
                    for part in statement.split(";"):
                        self._database.execute(part)
                else:
                    self._database.execute(statement, values)
            self._database.execute("COMMIT")
        except sqlite3.Error as problem:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise write_error(self.folder, problem) from problem

    def _sweep(self) -> None:
        """Remove the files that this commit has replaced."""
        committed = {name for name, _ in self._rows("SELECT name, digest FROM files")}
        with contextlib.suppress(OSError):  # the commit stands; the next one tries again
            remove_all_but(self.folder, committed.__contains__)


def _lock_store(folder: Path) -> Lock:
    """One process per store: a second one would count the same mass again."""
    try:
        return Lock(folder / "lock")
    except AlreadyLocked as busy:
        raise QuiverError(
            f"{folder} is in use: this peer is running already, as {busy.holder}."
        ) from busy
