"""A peer's end: it stays until the others have finished, or it gives all its mass away."""

from __future__ import annotations

import time

import safetensors.numpy

from quiverfl.peer.files import write_durably
from quiverfl.peer.participant import Participant

PERSONAL = "personal.safetensors"
HEIRS = 4
"""Over how many neighbours a leaving peer spreads what it has."""


async def end(peer: Participant) -> None:
    if not peer.stopping and not peer.condition.leaving:
        await _linger(peer)
    if not peer.stopping and peer.condition.leaving:
        await _give_everything_away(peer)


async def _linger(peer: Participant) -> None:
    """Take in what is late and answer, until all have finished or nothing is heard any more."""
    peer.state = "finished"
    told: set[str] = set()
    news, last_news = _news(peer), time.monotonic()
    while not peer.stopping and not peer.condition.leaving:
        await peer.follow()
        if not peer.over():  # it was agreed to go on
            return
        if peer.receiver.staged or peer.neighbours.refunding():
            await peer.absorb(None, finish=False)
            last = peer.settings.rounds - 1
            peer.scores = await peer.off_loop(peer.learner.evaluate, last, "mixed")
        others = peer.neighbours.staying()
        if peer.finished:
            told |= await peer.neighbours.tell(others - told)
        over = peer.finished and not peer.receiver.staged
        if over and others <= peer.neighbours.done and not _to_be_told(peer, others - told):
            return
        if _news(peer) != news:
            news, last_news = _news(peer), time.monotonic()
        if time.monotonic() - last_news > _patience(peer, others - peer.neighbours.done):
            return
        await peer.until(lambda: bool(peer.receiver.staged), 0.25)


def _to_be_told(peer: Participant, others: set[str]) -> set[str]:
    """Of those who do not know that this peer has finished: who may still wait for its word.

    They have finished themselves. Where nobody listens any more somebody has ended before us; who
    was only too busy to answer would stay for long after us.
    """
    return {p for p in others if not peer.neighbours.senders[p].contact.vacant}


def _patience(peer: Participant, behind: set[str]) -> float:
    """How long to stay without news of those behind: a round may wait for two deadlines."""
    waits = 2 * peer.settings.deadline if peer.sync() and behind else 0.0
    return peer.settings.linger + waits


def _news(peer: Participant) -> tuple[int, int]:
    """It changes when others come on; shares alone would keep a peer up for ever."""
    rounds = (min(round, peer.settings.rounds) for round in peer.receiver.heard.values())
    return len(peer.neighbours.done), sum(rounds)


async def _give_everything_away(peer: Participant) -> None:
    """Tell everybody, then push everything out until nothing is left here or on its way."""
    if not peer.settings.copies:
        await peer.ask()
    peer.state = "leaving"
    if peer.transactions.accounts.units:
        model = await peer.off_loop(peer.learner.model)
        write_durably(peer.store.folder / PERSONAL, safetensors.numpy.save(model))
    told: set[str] = set()
    last_news = time.monotonic()
    while not peer.stopping and time.monotonic() - last_news < peer.settings.linger:
        told |= await peer.neighbours.tell(peer.neighbours.staying() - told)
        before = peer.transactions.accounts
        if peer.receiver.staged or peer.neighbours.refunding():
            await peer.take_in()
        heirs = [p for p in sorted(told) if peer.neighbours.free(p)][:HEIRS]
        if not peer.settings.copies and peer.transactions.accounts.units and heirs:
            await _give_away(peer, heirs)
        accounts = peer.transactions.accounts
        everybody = peer.neighbours.staying() <= told
        left = peer.settings.copies or not accounts.units
        if everybody and left and not accounts.outbox and not peer.receiver.staged:
            return
        if accounts != before:
            last_news = time.monotonic()
        await peer.until(lambda: bool(peer.receiver.staged), 0.1)


async def _give_away(peer: Participant, heirs: list[str]) -> None:
    memory, accounts = peer.transactions.memory, peer.transactions.accounts
    parts = dict.fromkeys(heirs, 1)
    for transfer in await peer.transactions.push(
        accounts.round, memory.message, memory.rest, parts, 0, whole=True
    ):
        peer.neighbours.senders[transfer.receiver].wake()
