"""This peer's model as a newcomer gets it: one snapshot on disk for all who ask, in turn."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quiverfl.errors import QuiverError
from quiverfl.peer.agreement import Agreement, Limits
from quiverfl.peer.identity import Identity
from quiverfl.peer.intake import Intake
from quiverfl.peer.ledger import may_join
from quiverfl.peer.manifest import Array, Leaf
from quiverfl.peer.transactions import Transactions
from quiverfl.peer.wire import CHUNK, Join, Model, WireError, encode, framed, model_text

SNAPSHOT = "offer-"
FRESH_SECONDS = 60.0
"""A snapshot younger than this serves whoever asks next."""
QUEUE = 16

Send = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class _Snapshot:
    path: Path
    made: float
    round: int
    digest: str
    nbytes: int


class Offering:
    """Whoever may join gets z = u / μ, at a bounded cost of memory however many ask."""

    def __init__(
        self, transactions: Transactions, agreement: Agreement, limits: Limits, folder: Path
    ) -> None:
        self._transactions, self._agreement, self._folder = transactions, agreement, folder
        self._intake = Intake(limits.pulls, limits)
        self._making = asyncio.Lock()
        self._snapshot: _Snapshot | None = None
        for left in folder.glob(f"{SNAPSHOT}*"):
            left.unlink(missing_ok=True)

    async def serve(self, member: str, join: Join, papers: Identity, send: Send) -> None:
        self._check(member, join)
        if self._intake.waiting >= QUEUE:
            raise WireError("busy", "too many peers are joining at the same time; try again later.")
        async with self._intake.place(member) as left:
            self._check(member, join)  # it may have been evicted while it waited
            snapshot = await self._fresh()
            with snapshot.path.open("rb") as file:  # from now on it stays, though it be replaced
                await send(encode(self._header(snapshot, join, papers)))
                sent = 0
                while body := await asyncio.to_thread(file.read, CHUNK):
                    async with asyncio.timeout(max(left(sent), 0.0)):
                        await send(framed(body, sent))
                    sent += len(body)

    def _header(self, snapshot: _Snapshot, join: Join, papers: Identity) -> Model:
        header = Model(
            round=snapshot.round,
            nbytes=snapshot.nbytes,
            digest=snapshot.digest,
            manifest=self._agreement.manifest.hash,
            certificate=papers.certificate.decode(),
        )
        return header.model_copy(update={"signature": papers.sign(model_text(join, header))})

    def _check(self, member: str, join: Join) -> None:
        mine = (member, self._agreement.name, self._agreement.hash)
        if (join.sender, join.receiver, join.agreement) != mine:
            raise QuiverError(
                f"{member!r} asks for another run, configuration or manifest than that of "
                f"{self._agreement.name!r}, or in another's name."
            )
        may_join(self._transactions.accounts, member, join.incarnation)
        if not self._transactions.accounts.units:
            raise QuiverError(f"{self._agreement.name!r} has left the run: ask another peer.")

    async def _fresh(self) -> _Snapshot:
        async with self._making:
            snapshot = self._snapshot
            if snapshot is None or time.monotonic() - snapshot.made > FRESH_SECONDS:
                try:
                    self._snapshot = await asyncio.to_thread(self._written)
                except OSError as problem:
                    raise WireError("disk", f"no room for a copy: {problem.strerror}.") from None
                if snapshot is not None:  # whoever reads it keeps it until he has done
                    snapshot.path.unlink(missing_ok=True)
            assert self._snapshot is not None
            return self._snapshot

    def _written(self) -> _Snapshot:
        accounts, memory = self._transactions.accounts, self._transactions.memory
        path = self._folder / f"{SNAPSHOT}{secrets.token_hex(8)}"
        digest, nbytes = hashlib.sha256(), 0
        with path.open("xb") as file:
            path.chmod(0o600)
            for leaf in self._agreement.manifest.leaves:
                for part in _parts(leaf, memory.message[leaf.name], self._transactions.mass):
                    digest.update(part)
                    nbytes += file.write(part)
        return _Snapshot(path, time.monotonic(), accounts.round, digest.hexdigest(), nbytes)


def _parts(leaf: Leaf, values: Array, mass: float) -> Iterator[bytes]:
    """A leaf divided by the mass, a little at a time."""
    flat = values.reshape(-1)
    for start in range(0, leaf.size, CHUNK // 8):
        part = flat[start : start + CHUNK // 8]
        yield (part / part.dtype.type(mass)).astype(leaf.type).tobytes()
