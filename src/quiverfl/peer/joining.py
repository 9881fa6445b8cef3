"""Joining a run that is under way: z from a neighbour, μ = 1, on the record."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import grpc.aio

from quiverfl.errors import QuiverError
from quiverfl.peer import identity
from quiverfl.peer.agreement import Agreement
from quiverfl.peer.connection import open_channel
from quiverfl.peer.identity import Identity
from quiverfl.peer.learner import Learner
from quiverfl.peer.ledger import UNIT, Accounts
from quiverfl.peer.manifest import Leaves, Manifest, finite
from quiverfl.peer.roster import Roster
from quiverfl.peer.store import Memory, Store, Trace
from quiverfl.peer.transactions import first_entry
from quiverfl.peer.wire import (
    SERVICE,
    Assembly,
    Join,
    Model,
    WireError,
    decode,
    encode,
    model_text,
)

PULL_SECONDS = 600.0


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
    papers, incarnation = Identity.read(keys), secrets.token_hex(8)
    problems = []
    for member in roster.members:
        if member.name == agreement.name or member.dials_out:
            continue
        try:
            async with asyncio.timeout(PULL_SECONDS):
                join = Join(
                    agreement=agreement.hash,
                    sender=agreement.name,
                    receiver=member.name,
                    incarnation=incarnation,
                    nonce=secrets.token_hex(32),
                )
                round, message = await _pull(join, roster, papers, agreement.manifest)
        except (grpc.aio.AioRpcError, WireError, TimeoutError) as problem:
            problems.append(f"{member.name}: {_text(problem)}")
            continue
        memory = Memory(message, learner.rest())
        accounts = Accounts(agreement.name, UNIT, round=round)
        entry = first_entry("join", message, round)
        return Store.create(
            folder, accounts, memory, entry, agreement.hash, incarnation=incarnation
        )
    raise QuiverError(f"no peer could be joined: {'; '.join(problems)}.")


async def _pull(
    join: Join, roster: Roster, papers: Identity, manifest: Manifest
) -> tuple[int, Leaves]:
    member = roster.member(join.receiver)
    channel = open_channel(member.address, member.name, papers)
    try:
        call = channel.unary_stream(f"/{SERVICE}/Pull")(encode(join))
        header = decode(Model, await _frame(call))
        _check_source(join, header, roster)
        if header.manifest != manifest.hash or header.nbytes != manifest.nbytes:
            raise WireError("manifest", "its model is another one.")
        assembly = Assembly(manifest.nbytes, header.digest)
        while not assembly.complete:
            assembly.add(await _frame(call))
        message = manifest.unpack_whole(assembly.payload())
        if not finite(message):
            raise WireError("not finite", "its model is not finite.")
        return header.round, {leaf: values.copy() for leaf, values in message.items()}
    finally:
        await channel.close()


def _check_source(join: Join, header: Model, roster: Roster) -> None:
    """The model is from the member that was asked: by its key in the roster, not its name alone."""
    pem = header.certificate.encode()
    try:
        genuine = roster.identify(pem) == join.receiver
    except QuiverError as problem:
        raise WireError("identity", str(problem)) from None
    if not genuine or not identity.signed_by(
        identity.parse(pem), header.signature, model_text(join, header)
    ):
        raise WireError("identity", "its signature does not fit its key in the roster.")


async def _frame(call: Any) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise WireError("truncated", "it closed the stream early.")
    return frame


def _text(problem: Exception) -> str:
    if isinstance(problem, grpc.aio.AioRpcError):
        return f"{problem.code().name} {problem.details()}"
    return str(problem) or type(problem).__name__
