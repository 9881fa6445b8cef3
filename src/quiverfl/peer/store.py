"""A peer's durable memory: tensors in files, accounts and ledger in SQLite.

Files are durable before the transaction that names them; the transaction is the commit. Every
method that changes something is one commit: it either happened entirely or not at all.
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

import safetensors.numpy

from quiverfl.durable import remove_partial
from quiverfl.errors import QuiverError
from quiverfl.locks import Busy, Lock
from quiverfl.peer import schema
from quiverfl.peer.files import (
    cannot_write,
    file_size,
    read_checked,
    remove_all_but,
    write_durably,
)
from quiverfl.peer.ledger import PAST, Accounts, Transfer
from quiverfl.peer.manifest import Leaves
from quiverfl.peer.statement import Entry
from quiverfl.peer.wire import Terms

Trace = Callable[[str], None]
"""Called at named points, so that a test can crash there."""


@dataclass(frozen=True)
class Memory:
    """What training needs back after a restart: the own share, and all that is never sent."""

    message: Leaves
    rest: Leaves

    def packed(self) -> bytes:
        tensors = {f"message.{name}": leaf for name, leaf in self.message.items()}
        tensors |= {f"rest.{name}": leaf for name, leaf in self.rest.items()}
        return bytes(safetensors.numpy.save(tensors))

    @classmethod
    def unpacked(cls, content: bytes) -> Memory:
        parts: dict[str, Leaves] = {"message": {}, "rest": {}}
        for name, leaf in safetensors.numpy.load(content).items():
            part, _, leaf_name = name.partition(".")
            parts[part][leaf_name] = leaf
        return cls(parts["message"], parts["rest"])


class NoStore(QuiverError):
    """Nothing was made here to the end; half a store has promised nothing to anybody."""


class Store:
    """One peer's folder. `Store.create` once, `Store.open` ever after."""

    def __init__(self, folder: Path, trace: Trace = lambda point: None) -> None:
        self.folder = folder
        self._trace = trace
        self._one_at_a_time = threading.Lock()
        self._lock = _locked(folder)
        remove_partial(folder)
        self._database = sqlite3.connect(
            folder / schema.FILE, isolation_level=None, check_same_thread=False
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
            raise cannot_write(folder, problem) from problem
        if schema.exists(store._database):
            raise QuiverError(f"{folder} already holds a peer's store; it is not overwritten.")
        changes: list[schema.Change] = [(schema.CREATE, None)]
        changes += [(statement, ()) for statement in schema.LATER]
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
        if not (folder / schema.FILE).exists():
            raise NoStore(f"{folder} holds no peer's store yet.")
        try:
            store = cls(folder, trace)
            if not schema.exists(store._database):
                store.close()
                raise NoStore(f"{folder} was never finished: quiver peer run makes it again.")
            for statement in schema.LATER:
                store._database.execute(statement)
            named = {name for name, _ in store._rows("SELECT name, digest FROM files")}
            remove_all_but(folder, named.__contains__)
        except (OSError, sqlite3.Error) as problem:
            raise cannot_write(folder, problem) from problem
        return store

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
        return schema.accounts_from(self._rows("SELECT body FROM account")[0][0])

    def memory(self) -> Memory:
        name, digest = self._rows("SELECT name, digest FROM files WHERE role = 'state'")[0]
        return Memory.unpacked(read_checked(self.folder / name, digest))

    def nbytes(self) -> int:
        """What the folder takes on disk."""
        found = 0
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # replaced in the meantime
                found += path.stat().st_size
        return found

    def payload(self, digest: str) -> bytes:
        return read_checked(self.folder / f"share-{digest}", digest)

    def payload_size(self, digest: str) -> int:
        return file_size(self.folder / f"share-{digest}")

    def shown(self) -> dict[str, str]:
        return {row[0]: row[1] for row in self._rows("SELECT sender, body FROM shown")}

    def notices(self) -> list[str]:
        return [row[0] for row in self._rows("SELECT body FROM notices ORDER BY rowid")]

    def amendments(self) -> list[str]:
        return [row[0] for row in self._rows("SELECT body FROM amendments ORDER BY rowid")]

    def terms(self) -> list[Terms]:
        """The amendments that all have agreed to, in the order of their rounds."""
        return [Terms.model_validate(terms) for terms in json.loads(self.meta("terms") or "[]")]

    def vouchers(self, receiver: str, rows: int, most: int) -> list[Transfer]:
        """Shares taken from others than `receiver`, in the order they came, from `rows` on."""
        query = (
            "SELECT * FROM received WHERE refusal = '' AND sender != ? ORDER BY rowid "
            "LIMIT ? OFFSET ?"
        )
        with self._one_at_a_time:
            found = self._database.execute(query, (receiver, most, rows)).fetchall()
        return [Transfer(*row[:8]) for row in found]

    def senders_since(self, round: int) -> set[str]:
        """Whose shares of this round or a later one were taken or refused."""
        with self._one_at_a_time:
            found = self._rows("SELECT DISTINCT sender FROM received WHERE round >= ?", round)
        return {row[0] for row in found}

    # Commits

    def note(self, key: str, value: str) -> None:
        """Remember one fact, durably."""
        self._commit("note", None, [("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))])

    def note_notice(self, body: str) -> None:
        self._commit("notice", None, [schema.notice(body)])

    def note_amendment(self, body: str) -> None:
        self._commit("amendment", None, [schema.amendment(body)])

    def note_terms(self, terms: Iterable[Terms]) -> None:
        self.note("terms", json.dumps([one.model_dump() for one in terms]))

    def note_shown(self, sender: str, body: str) -> None:
        self._commit("shown", None, [schema.shown(sender, body)])

    def update(self, accounts: Accounts) -> None:
        """Accounts alone: a neighbour met, a neighbour leaving."""
        self._commit("update", accounts, [])

    def push(
        self,
        accounts: Accounts,
        memory: Memory,
        transfers: Iterable[Transfer],
        payloads: Mapping[str, bytes],
        entry: Entry,
    ) -> None:
        """The split: own share, and the others' in the outbox."""
        changes = [schema.sent(transfer, "outbox") for transfer in transfers]
        self._commit("push", accounts, changes, memory, payloads, entry)

    def absorb(
        self,
        accounts: Accounts,
        memory: Memory,
        receipts: Iterable[Transfer],
        refunds: Iterable[Transfer],
        entry: Entry,
    ) -> None:
        """The merge: receipts applied, watermarks moved, refused shares taken back."""
        changes = [schema.received(receipt, "") for receipt in receipts]
        changes += [schema.status(refund, "refunded") for refund in refunds]
        self._commit("absorb", accounts, changes, memory, entry=entry)

    def acknowledge(self, accounts: Accounts, transfer: Transfer) -> None:
        self._commit("acknowledge", accounts, [schema.status(transfer, "acknowledged")])

    def bury(self, accounts: Accounts, transfer: Transfer, reason: str) -> None:
        self._commit("bury", accounts, [schema.received(transfer, reason)])

    def evict(self, accounts: Accounts, peer: str, outbox: Transfer | None) -> None:
        """Write off, and file the links' past under another name: a new store may take this one."""
        changes = [schema.status(outbox, "written off")] if outbox else []
        past = f"{peer}{PAST}{accounts.link(peer).incarnation or 'unmet'}"
        changes.append(("UPDATE sent SET receiver = ? WHERE receiver = ?", (past, peer)))
        changes.append(("UPDATE received SET sender = ? WHERE sender = ?", (past, peer)))
        changes.append(("DELETE FROM shown WHERE sender = ?", (peer,)))
        self._commit("evict", accounts, changes)

    def _commit(
        self,
        kind: str,
        accounts: Accounts | None,
        changes: list[schema.Change],
        memory: Memory | None = None,
        payloads: Mapping[str, bytes] | None = None,
        entry: Entry | None = None,
    ) -> None:
        with self._one_at_a_time:
            self._commit_alone(kind, accounts, changes, memory, payloads, entry)

    def _commit_alone(
        self,
        kind: str,
        accounts: Accounts | None,
        changes: list[schema.Change],
        memory: Memory | None,
        payloads: Mapping[str, bytes] | None,
        entry: Entry | None,
    ) -> None:
        self._trace(f"before {kind} files")
        if entry is not None:
            changes.append(schema.entry(entry))
        written = {f"share-{digest}": body for digest, body in (payloads or {}).items()}
        if memory is not None:
            written[f"state-{secrets.token_hex(8)}"] = memory.packed()
            changes.append(("DELETE FROM files WHERE role = 'state'", ()))
        for name, body in written.items():
            digest = hashlib.sha256(body).hexdigest()
            write_durably(self.folder / name, body)
            role = name.partition("-")[0]
            changes.append(("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", (role, name, digest)))
        if accounts is not None:
            changes.append(schema.account(accounts))
            changes += schema.FORGET_SHARES
        self._trace(f"before {kind} commit")
        self._transact(changes)
        self._trace(f"after {kind} commit")
        if accounts is not None:
            self._sweep()

    def _transact(self, changes: list[schema.Change]) -> None:
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
            raise cannot_write(self.folder, problem) from problem

    def _sweep(self) -> None:
        """Remove the files that this commit has replaced."""
        named = {name for name, _ in self._rows("SELECT name, digest FROM files")}
        with contextlib.suppress(OSError):  # the commit stands; the next one tries again
            remove_all_but(self.folder, named.__contains__)


def _locked(folder: Path) -> Lock:
    """One process per store: a second one would count the same mass again."""
    try:
        return Lock(folder / "lock")
    except Busy as busy:
        raise QuiverError(
            f"{folder} is in use: this peer is running already, as {busy.holder}."
        ) from busy
