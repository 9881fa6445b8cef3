"""How a peer ends: it stays until the others have finished, or it gives all its mass away."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import safetensors.numpy

from quiverfl.peer.files import write_durably

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

PERSONAL = "personal.safetensors"
HEIRS = 4
"""Over how many neighbours a leaving peer spreads what it has."""


async def end(node: Node) -> None:
    if not node.stopping and not node.condition.leaving:
        await linger(node)
    if not node.stopping and node.condition.leaving:
        await leave(node)


async def linger(node: Node) -> None:
    """Take in what is late and answer, until all have finished or nothing is heard any more."""
    node.state = "finished"
    told: set[str] = set()
    last_news = time.monotonic()
    while not node.stopping and not node.condition.leaving:
        if node.reception.staged or node.neighbours.refunding():
            await node.absorb(None, finish=False)
            last = node.settings.rounds - 1
            node.metrics = await node.off_loop(node.learner.evaluate, last, "mixed")
            last_news = time.monotonic()
        others = node.neighbours.staying()
        if node.finished:
            told |= await node.neighbours.tell(others - told)
        over = node.finished and not node.reception.staged
        if over and others <= node.neighbours.done:
            return  # whoever was not reached just now had finished, and may have ended before us
        if time.monotonic() - last_news > node.settings.linger:
            return
        known = set(node.neighbours.done)
        await node.until(lambda: bool(node.reception.staged), 0.25)
        if node.neighbours.done != known:
            last_news = time.monotonic()


async def leave(node: Node) -> None:
    """Tell everybody, then push everything out until nothing is left here or on its way."""
    node.state = "leaving"
    if node.books.accounts.units:
        model = await node.off_loop(node.learner.model)
        write_durably(node.store.folder / PERSONAL, safetensors.numpy.save(model))
    told: set[str] = set()
    last_news = time.monotonic()
    while not node.stopping and time.monotonic() - last_news < node.settings.linger:
        told |= await node.neighbours.tell(node.neighbours.staying() - told)
        before = node.books.accounts
        if node.reception.staged or node.neighbours.refunding():
            await _take_in(node)
        heirs = [p for p in sorted(told) if node.neighbours.free(p)][:HEIRS]
        if node.books.accounts.units and heirs:
            await _give_away(node, heirs)
        accounts = node.books.accounts
        everybody = node.neighbours.staying() <= told
        if everybody and not accounts.units and not accounts.outbox and not node.reception.staged:
            return
        if accounts != before:
            last_news = time.monotonic()
        await node.until(lambda: bool(node.reception.staged), 0.1)


async def _take_in(node: Node) -> None:
    receipts = node.reception.take()
    refunding = node.neighbours.refunding()
    refunds = [courier.refund for courier in refunding if courier.refund]
    await node.books.absorb(receipts, refunds, node.books.memory.rest, finish=False)
    node.reception.committed([transfer for transfer, _ in receipts])
    for courier in refunding:
        courier.refund = None


async def _give_away(node: Node, heirs: list[str]) -> None:
    memory, accounts = node.books.memory, node.books.accounts
    parts = dict.fromkeys(heirs, 1)
    for transfer in await node.books.push(accounts.round, memory.message, memory.rest, parts, 0):
        node.neighbours.couriers[transfer.receiver].wake()
