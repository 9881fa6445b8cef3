"""The model that a newcomer is given: z = u/μ, from one snapshot on disk, however many ask."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import check_join
from quiverfl.peer.context import PeerContext
from quiverfl.peer.link.limits import AdmissionQueue
from quiverfl.peer.link.messages import Leaf
from quiverfl.peer.link.wire import (
    CHUNK,
    Join,
    Model,
    WireError,
    encode,
    make_frame,
    model_text,
)
from quiverfl.types import AnyArray

SNAPSHOT = "offer-"
FRESH_SECONDS = 60.0
"""A younger snapshot is sent again to the next newcomer."""
QUEUE = 16

Send = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class _Snapshot:
    path: Path
    made: float
    round: int
    digest: str
    nbytes: int


class ModelServer:
    """Sends z = u / μ to newcomers from one snapshot on disk.

    So the cost in memory is bounded, however many ask.
    """

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._admission = AdmissionQueue(ctx.limits.pulls, ctx.limits)
        self._writing = asyncio.Lock()
        self._snapshot: _Snapshot | None = None
        for leftover in ctx.store.folder.glob(f"{SNAPSHOT}*"):
            leftover.unlink(missing_ok=True)

    async def serve(self, member: str, join: Join, send: Send) -> None:
        self._check(member, join)
        if self._admission.waiting >= QUEUE:
            raise WireError("busy", "too many peers are joining at the same time; try again later.")
        async with self._admission.place(member) as seconds_left:
            self._check(member, join)  # it may have been evicted while it waited
            snapshot = await self._fresh_snapshot()
            with snapshot.path.open("rb") as file:  # readable from now on, even if it is replaced
                await send(encode(self._header(snapshot, join)))
                sent = 0
                while body := await asyncio.to_thread(file.read, CHUNK):
                    async with asyncio.timeout(max(seconds_left(sent), 0.0)):
                        await send(make_frame(body, sent))
                    sent += len(body)

    def _header(self, snapshot: _Snapshot, join: Join) -> Model:
        identity = self._ctx.identity.refresh()
        header = Model(
            round=snapshot.round,
            nbytes=snapshot.nbytes,
            digest=snapshot.digest,
            manifest=self._ctx.agreement.manifest.hash,
            certificate=identity.certificate.decode(),
        )
        return header.model_copy(update={"signature": identity.sign(model_text(join, header))})

    def _check(self, member: str, join: Join) -> None:
        name, accounts = self._ctx.name, self._ctx.transactions.accounts
        if (join.sender, join.receiver, join.agreement) != (member, name, self._ctx.agreement.hash):
            raise QuiverError(
                f"{member!r} asks for another run, configuration or manifest than that of "
                f"{name!r}, or in another's name."
            )
        check_join(accounts, member, join.incarnation)
        if not accounts.units:
            raise QuiverError(f"{name!r} has left the run: ask another peer.")

    async def _fresh_snapshot(self) -> _Snapshot:
        async with self._writing:
            old = self._snapshot
            if old is not None and time.monotonic() - old.made <= FRESH_SECONDS:
                return old
            try:
                self._snapshot = await asyncio.to_thread(self._write_snapshot)
            except OSError as problem:
                raise WireError("disk", f"no room for a copy: {problem.strerror}.") from None
            if old is not None:  # a caller that reads it keeps it until the end
                old.path.unlink(missing_ok=True)
            return self._snapshot

    def _write_snapshot(self) -> _Snapshot:
        transactions = self._ctx.transactions
        accounts, memory = transactions.accounts, transactions.memory
        path = self._ctx.store.folder / f"{SNAPSHOT}{secrets.token_hex(8)}"
        digest, nbytes = hashlib.sha256(), 0
        with path.open("xb") as file:
            path.chmod(0o600)
            for leaf in self._ctx.agreement.manifest.leaves:
                for part in _divide(leaf, memory.message[leaf.name], transactions.mass):
                    digest.update(part)
                    nbytes += file.write(part)
        return _Snapshot(path, time.monotonic(), accounts.round, digest.hexdigest(), nbytes)


def _divide(leaf: Leaf, values: AnyArray, mass: float) -> Iterator[bytes]:
    """Divide a leaf by the mass, a little at a time."""
    flat = values.reshape(-1)
    for start in range(0, leaf.size, CHUNK // 8):
        part = flat[start : start + CHUNK // 8]
        yield (part / part.dtype.type(mass)).astype(leaf.type).tobytes()
