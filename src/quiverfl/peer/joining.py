"""Joining a run that is under way: z from a neighbour, μ = 1, on the record."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer.agreement import Agreement
from quiverfl.peer.identity import Identity
from quiverfl.peer.learner import Learner
from quiverfl.peer.ledger import UNIT, Accounts
from quiverfl.peer.manifest import Leaves, Manifest, finite
from quiverfl.peer.roster import Roster
from quiverfl.peer.sender import open_channel
from quiverfl.peer.store import Memory, Store, Trace
from quiverfl.peer.transactions import Transactions, first_entry
from quiverfl.peer.wire import SERVICE, Assembly, Model, WireError, decode, encode, frames

PULL_SECONDS = 600.0


async def model_frames(transactions: Transactions, manifest: Manifest) -> AsyncIterator[bytes]:
    """z = u / μ of this peer as a neighbour gets it who joins."""
    accounts, mass = transactions.accounts, transactions.mass
    if not accounts.units:
        return
    message = {
        name: (leaf / leaf.dtype.type(mass)) for name, leaf in transactions.memory.message.items()
    }
    payload = manifest.pack(message)
    digest = hashlib.sha256(payload).hexdigest()
    header = Model(round=accounts.round, nbytes=len(payload), digest=digest, manifest=manifest.hash)
    yield encode(header)
    for frame in frames(payload):
        yield frame


def create_store(
    folder: Path, learner: Learner, agreement: Agreement, trace: Trace = lambda point: None
) -> Store:
    """A founder's store: the initial model, μ = 1."""
    message = learner.message()
    memory = Memory(message, learner.rest())
    accounts = Accounts(agreement.name, UNIT)
    entry = first_entry("start", message)
    return Store.create(folder, accounts, memory, entry, agreement.hash, trace)


async def join_store(
    folder: Path, learner: Learner, agreement: Agreement, roster: Roster, keys: Path
) -> Store:
    """A newcomer's store: a neighbour's z with a mass of its own, recorded as a join."""
    identity = Identity.read(keys)
    problems = []
    for member in roster.members:
        if member.name == agreement.name:
            continue
        try:
            async with asyncio.timeout(PULL_SECONDS):
                round, message = await _pull(
                    member.address, member.name, identity, agreement.manifest
                )
        except (grpc.aio.AioRpcError, WireError, TimeoutError) as problem:
            problems.append(f"{member.name}: {_text(problem)}")
            continue
        memory = Memory(message, learner.rest())
        accounts = Accounts(agreement.name, UNIT, round=round)
        entry = first_entry("join", message, round)
        return Store.create(folder, accounts, memory, entry, agreement.hash)
    raise QuiverError(f"nobody could be joined: {'; '.join(problems)}.")


async def _pull(
    address: str, name: str, identity: Identity, manifest: Manifest
) -> tuple[int, Leaves]:
    channel = open_channel(address, name, identity)
    try:
        call = channel.unary_stream(f"/{SERVICE}/Pull")(b"")
        header = decode(Model, await _frame(call))
        if header.manifest != manifest.hash or header.nbytes != manifest.nbytes:
            raise WireError("manifest", "its model is another one.")
        assembly = Assembly(manifest.nbytes, header.digest)
        while not assembly.complete:
            assembly.add(await _frame(call))
        message = manifest.unpack(assembly.payload())
        if not finite(message):
            raise WireError("not finite", "its model is not finite.")
        return header.round, {leaf: values.copy() for leaf, values in message.items()}
    finally:
        await channel.close()


async def _frame(call: Any) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise WireError("truncated", "it closed the stream early.")
    return frame


def _text(problem: Exception) -> str:
    if isinstance(problem, grpc.aio.AioRpcError):
        return f"{problem.code().name} {problem.details()}"
    return str(problem) or type(problem).__name__
