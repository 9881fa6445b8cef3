"""The end of a peer's run: it waits for all other peers, or gives its mass away and leaves.

After its last round a peer keeps its mass: it is the μ of the model it ends with, and counts in the
audit. Without waiting, some peers are far behind by then. They push nothing to a peer that has had
its last round. A share that was under way when they learned of it goes back to its sender, which
needs it to train on. Two kinds stay, since nobody trains with them any more: shares of a sender's
last round, and shares of a sender that leaves.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import safetensors.numpy

from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.link.link import FINISHED

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

PERSONAL = "personal.safetensors"
FIRST_PAUSE = 0.25
"""Seconds until peers that are behind are asked again; the pause doubles up to linger / 4."""
END_TICK = 0.25
"""Seconds between a finished peer's checks for peers that it must still inform or ask."""
LEAVE_TICK = 0.1
"""The same for a leaving peer."""
LEAVE_RECEIVERS = 4
"""The most neighbours over which a leaving peer spreads its mass at a time."""


async def run_end(node: Node) -> None:
    """Stay until all other peers have finished too, or give all mass away and leave."""
    if not node.stopping and not node.leaving:
        await _wait_for_late_shares(node)
    if not node.stopping and node.leaving:
        await _leave(node)


async def _wait_for_late_shares(node: Node) -> None:
    """Take in late shares and answer, until all have finished or there is no news any more.

    Neighbours that are behind are asked for their round, as no share from them would show it.
    """
    node.state = "finished"
    neighbours, linger = node.neighbours, node.settings.linger
    informed: set[str] = set()
    ask_at, pause = 0.0, FIRST_PAUSE
    progress, last_news = _measure_progress(node), time.monotonic()
    while not node.stopping and not node.leaving:
        await node.apply_changes()
        if not node.is_over():  # all have agreed to go on
            return
        await _send_back_early(node)
        if node.receiver.staged or neighbours.refunding():
            await node.absorb(None, finish=False)
            last = node.settings.rounds - 1
            node.scores = await node.run_in_thread(node.learner.evaluate, last, "mixed")
        others = neighbours.list_staying()
        if node.finished:
            informed |= await neighbours.announce(others - informed)
        behind = others - neighbours.done
        if behind and time.monotonic() >= ask_at:
            await neighbours.announce(behind)
            ask_at = time.monotonic() + pause
            pause = max(FIRST_PAUSE, min(2 * pause, linger / 4))
        quiet = node.finished and not node.receiver.staged and not node.service.relay.in_use
        if quiet and others <= neighbours.done and not _find_uninformed(node, others - informed):
            return
        if _measure_progress(node) != progress:
            progress, last_news = _measure_progress(node), time.monotonic()
        # A round of a peer that is behind may wait for two deadlines.
        waits = 2 * node.settings.deadline if node.sync and others - neighbours.done else 0.0
        if time.monotonic() - last_news > linger + waits:
            return
        await node.wait_until(lambda: bool(node.receiver.staged), END_TICK)


async def _send_back_early(node: Node) -> None:
    """Send back shares of neighbours that train on.

    Copies stay, and so do shares in sync mode, where rounds are in step.
    """
    if node.sync or node.settings.copies:
        return
    last, past = node.settings.rounds - 1, node.past_last_round()
    for sender, staged in list(node.receiver.staged.items()):
        leaving = node.transactions.accounts.link(sender).closed
        if staged.transfer.round < last and sender not in past and not leaving:
            reason = f"{FINISHED}: {node.ctx.name} has had its last round"
            await node.receiver.send_back(staged.transfer, reason)


def _find_uninformed(node: Node, others: set[str]) -> set[str]:
    """The subset of `others` that may still wait to hear that this peer has finished.

    A peer whose address accepts no connection any more has ended. A peer that was only too busy
    to answer would stay for long after this one.
    """
    return {p for p in others if not node.neighbours.senders[p].link.vacant}


def _measure_progress(node: Node) -> tuple[int, int]:
    """A value that grows when other peers advance, and never falls.

    Neither shares nor a neighbour that ends again and again keep a peer up.
    """
    rounds = (min(round, node.settings.rounds) for round in node.receiver.rounds.values())
    return len(node.neighbours.ends), sum(rounds)


async def _leave(node: Node) -> None:
    """Announce the departure, then push all mass out until none is left here or under way."""
    neighbours, settings = node.neighbours, node.settings
    if not settings.copies:
        await node.ask_quorum()
    node.state = "leaving"
    if node.transactions.accounts.units:
        model = await node.run_in_thread(node.learner.model)
        write_durably(node.store.folder / PERSONAL, safetensors.numpy.save(model))
    informed: set[str] = set()
    last_news = time.monotonic()
    while not node.stopping and time.monotonic() - last_news < settings.linger:
        informed |= await neighbours.announce(neighbours.list_staying() - informed)
        before = node.transactions.accounts
        if node.receiver.staged or neighbours.refunding():
            await node.commit_receipts()
        waited = time.monotonic() - last_news > settings.linger / 2
        chosen = _choose_receivers(node, informed, anybody=waited)
        if not settings.copies and node.transactions.accounts.units and chosen:
            await _give_all(node, chosen)
        accounts = node.transactions.accounts
        empty = settings.copies or not accounts.units
        all_informed = neighbours.list_staying() <= informed
        if all_informed and empty and not accounts.outbox and not node.receiver.staged:
            return
        if accounts != before:
            last_news = time.monotonic()
        await node.wait_until(lambda: bool(node.receiver.staged), LEAVE_TICK)


def _choose_receivers(node: Node, informed: set[str], anybody: bool) -> list[str]:
    """Prefer neighbours that still train: to those that have finished, mass is of no more use."""
    training = informed - node.past_last_round()
    candidates = informed if anybody or not training else training
    free = [p for p in sorted(candidates) if node.neighbours.is_free(p)]
    return free[:LEAVE_RECEIVERS]


async def _give_all(node: Node, receivers: list[str]) -> None:
    """Push the whole message and mass to these, in equal parts."""
    memory, accounts = node.transactions.memory, node.transactions.accounts
    parts = dict.fromkeys(receivers, 1)
    for transfer in await node.transactions.push(
        accounts.round, memory.message, memory.rest, parts, 0, whole=True
    ):
        node.neighbours.senders[transfer.receiver].wake()
