"""A newcomer's store: what several members offer is compared, so that none alone decides."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.peer.accounts.ledger import UNIT, Accounts
from quiverfl.peer.accounts.store import Memory, Store
from quiverfl.peer.accounts.transactions import make_first_entry
from quiverfl.peer.changes import granted_terms
from quiverfl.peer.context import Agreement
from quiverfl.peer.learner import Learner
from quiverfl.peer.link.identity import Identity, parse_certificate, verify_signature
from quiverfl.peer.link.link import open_channel
from quiverfl.peer.link.messages import Leaves, Manifest, check_numbers, l2_norm, scale_message
from quiverfl.peer.link.roster import Roster
from quiverfl.peer.link.wire import (
    SERVICE,
    Amendment,
    Assembly,
    Join,
    Model,
    Terms,
    WireError,
    decode,
    decode_statements,
    encode,
    model_text,
)

PULL_SECONDS = 600.0
"""Time that a newcomer may take to pull a model from one member."""
VOUCHING, MOST_OFFERS, SLOW_OFFER = 3, 5, 10.0
"""Members that must offer a newcomer their model, if there are so many; members that are asked at
a time and compared at most; seconds to wait for another offer once there are enough."""


@dataclass(frozen=True)
class Offer:
    """A member's round and model, offered to a newcomer."""

    member: str
    round: int
    message: Leaves
    amendments: Sequence[Amendment] = ()


async def join_store(
    folder: Path,
    learner: Learner,
    agreement: Agreement,
    roster: Roster,
    keys: Path,
    believe: bool = False,
    founders: int | None = None,
) -> Store:
    """Make a newcomer's store: a neighbour's z with a new mass, recorded as a join.

    Several members are asked, so that none alone decides what the newcomer begins with. With
    `believe` one answer is enough. A peer that is not among the `founders` needs the others'
    agreement, which says from which round it takes part, and with how much mass.
    """
    incarnation = secrets.token_hex(8)
    others = [m.name for m in roster.members if m.name != agreement.name and not m.dials_out]
    offers, problems = await _gather_offers(others, incarnation, agreement, roster, keys)
    needed = 1 if believe else enough_offers(len(others))
    if len(offers) < needed:
        raise QuiverError(
            f"no peer could be joined: {len(offers)} of {len(others)} members have offered a "
            f"model, and {needed} are needed, so that none alone decides: "
            f"{'; '.join(problems) or 'nobody can be called'}. Start them, or believe whoever "
            "answers with --trust-store."
        )
    round, message = choose_offer(offers)
    units, terms = UNIT, list[Terms]()
    if founders is not None and roster.number(agreement.name) >= founders:
        amendments = [one for offer in offers for one in offer.amendments]
        terms = granted_terms(amendments, agreement.name, agreement.hash, roster, founders)
        own = next(one for one in terms if agreement.name in one.joins)
        round, units = max(round, own.since), own.grant
        message = scale_message(message, units, UNIT)
    memory = Memory(message, learner.rest())
    accounts = Accounts(agreement.name, units, round=round)
    entry = make_first_entry("join", message, round, units)
    store = Store.create(folder, accounts, memory, entry, agreement.hash, incarnation=incarnation)
    store.save_terms(terms)
    return store


def enough_offers(others: int) -> int:
    """Number of members that must offer their model: most of the other ones, but at most three."""
    return min(VOUCHING, others // 2 + 1)


def choose_offer(offers: Sequence[Offer]) -> tuple[int, Leaves]:
    """Choose the round in the middle, and the model that is nearest to most others.

    A minority can move neither beyond what honest members have. Of two, the lower round and the
    smaller model are taken.
    """
    ordered = sorted(offer.round for offer in offers)
    round = ordered[(len(ordered) - 1) // 2]

    def median_distance(offer: Offer) -> float:
        distances = sorted(_distance(offer.message, other.message) for other in offers)
        return distances[len(distances) // 2]

    best = min(offers, key=lambda offer: (median_distance(offer), l2_norm(offer.message)))
    return round, best.message


def _distance(one: Leaves, other: Leaves) -> float:
    return l2_norm({name: leaf.astype(np.float64) - other[name] for name, leaf in one.items()})


async def _gather_offers(
    others: Sequence[str], incarnation: str, agreement: Agreement, roster: Roster, keys: Path
) -> tuple[list[Offer], list[str]]:
    """Ask members in a random order, a few at a time, until enough have answered."""
    identity, offers, problems = Identity.read(keys), list[Offer](), list[str]()
    places = asyncio.Semaphore(MOST_OFFERS)

    async def ask(member: str) -> None:
        join = Join(
            agreement=agreement.hash,
            sender=agreement.name,
            receiver=member,
            incarnation=incarnation,
            nonce=secrets.token_hex(32),
        )
        async with places:
            try:
                async with asyncio.timeout(PULL_SECONDS):
                    offers.append(await _pull_model(join, roster, identity, agreement.manifest))
            except (grpc.aio.AioRpcError, WireError, TimeoutError) as problem:
                problems.append(f"{member}: {_describe(problem)}")

    shuffled = random.sample(others, len(others))
    tasks = {asyncio.create_task(ask(member)) for member in shuffled}
    while tasks and len(offers) < MOST_OFFERS:
        enough = len(offers) >= enough_offers(len(others))
        patience = SLOW_OFFER if enough else None
        done, tasks = await asyncio.wait(
            tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        if not done:
            break
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return offers[:MOST_OFFERS], sorted(problems)


async def _pull_model(join: Join, roster: Roster, identity: Identity, manifest: Manifest) -> Offer:
    member = roster.member(join.receiver)
    channel = open_channel(member.address, member.name, identity)
    try:
        call = channel.unary_stream(f"/{SERVICE}/Pull")(encode(join))
        header = decode(Model, await _read_frame(call))
        _check_source(join, header, roster)
        if header.manifest != manifest.hash or header.nbytes != manifest.nbytes:
            raise WireError("manifest", "its model is another one.")
        assembly = Assembly(manifest.nbytes, header.digest)
        while not assembly.complete:
            assembly.add(await _read_frame(call))
        message = manifest.unpack_whole(assembly.payload())
        if problem := check_numbers(message):
            raise WireError("numbers", f"its model is refused as a share would be: {problem}.")
        return Offer(
            join.receiver,
            header.round,
            {leaf: values.copy() for leaf, values in message.items()},
            await _fetch_amendments(channel),
        )
    finally:
        await channel.close()


async def _fetch_amendments(channel: Any) -> list[Amendment]:
    """Ask for the changes of the run that a member knows of."""
    answer = await channel.unary_unary(f"/{SERVICE}/{Amendment.method}")(b"")
    return decode_statements(Amendment, answer)


def _check_source(join: Join, header: Model, roster: Roster) -> None:
    """Refuse a model that is not signed with the key that the roster has of the member asked."""
    pem = header.certificate.encode()
    try:
        genuine = roster.identify(pem) == join.receiver
    except QuiverError as problem:
        raise WireError("identity", str(problem)) from None
    if not genuine or not verify_signature(
        parse_certificate(pem), header.signature, model_text(join, header)
    ):
        raise WireError("identity", "its signature does not fit its key in the roster.")


async def _read_frame(call: Any) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):
        raise WireError("truncated", "it closed the stream early.")
    return frame


def _describe(problem: Exception) -> str:
    if isinstance(problem, grpc.aio.AioRpcError):
        return f"{problem.code().name} {problem.details()}"
    return str(problem) or type(problem).__name__
