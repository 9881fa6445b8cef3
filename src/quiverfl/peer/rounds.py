"""The rounds of a peer, and its end.

    train → split → commit → send        (push)
    wait or not → merge → commit → ack   (absorb)

In sync mode a round waits for the shares that its graph promises, or for a deadline. In async mode
it takes what has come.

After its last round a peer keeps its mass: it is the μ of the model it ends with, and counts in the
audit. Without waiting, others may be far behind by then. They push nothing to a peer that has had
its last round. A share that was under way when they heard of it goes back to its sender, which
needs it to train on. Two kinds stay, since nobody trains with them any more: shares of a sender's
last round, and shares of a sender that leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import safetensors.numpy

from quiverfl.engine.checks.peers import check_message_split
from quiverfl.engine.history import Clock
from quiverfl.engine.settings import is_evaluated
from quiverfl.peer.accounts import ledger
from quiverfl.peer.accounts.disk import write_durably
from quiverfl.peer.learner import expected_senders, receivers
from quiverfl.peer.link.link import FINISHED
from quiverfl.peer.waiting import measured_deadline, wait_for_peers

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

PERSONAL = "personal.safetensors"
FIRST_PAUSE = 0.25
"""Seconds before those behind are asked again how far they are; it doubles up to linger / 4."""
END_TICK = 0.25
"""Seconds after which a finished peer looks again whom it must still tell or ask."""
LEAVE_TICK = 0.1
"""The same for a leaving peer."""
LEAVE_RECEIVERS = 4
"""The most neighbours over which a leaving peer spreads its mass at a time."""


async def run_rounds(node: Node) -> None:
    await node.apply_changes()
    await _wait_for_the_others(node)
    if not node.is_over():
        await node.ask_quorum()
    while not node.stopping and not node.leaving:
        await _wait_for_agreement(node)
        await node.apply_changes()
        if node.is_over():
            return
        await _run_round(node, node.transactions.accounts.round)


async def _wait_for_the_others(node: Node) -> None:
    """Let a member that joins in a later round wait until two of the others have come there.

    One alone could send it ahead of everybody.
    """
    pause, accounts = 0.1, node.transactions.accounts
    while node.number >= node.founders and not accounts.pushes and not node.stopping:
        others, rounds = node.neighbours.list_staying(), node.receiver.rounds
        arrived = {peer for peer in others if rounds.get(peer, -1) >= accounts.round}
        if arrived and len(arrived) >= min(2, len(others)):
            return
        node.state = "joining"
        await node.neighbours.announce(node.neighbours.list_staying())
        await node.wait_until(lambda: False, pause)
        pause = min(2 * pause, 2.0)


async def _wait_for_agreement(node: Node) -> None:
    """Before a round from which the run changes, wait until the others have signed as well.

    So all change in the same round. A member that lets the deadline pass has not agreed in time.
    """
    t = node.transactions.accounts.round
    end, pause = time.monotonic() + node.settings.deadline, 0.05
    while awaited := node.changes.list_missing_signers(t):
        if node.stopping or node.leaving:
            return
        if time.monotonic() > end:
            node.changes.stop_waiting(t)
            return
        node.state = "agreeing"
        await node.neighbours.announce(awaited)
        await node.neighbours.wait_for_news()
        await node.wait_until(lambda: not node.changes.list_missing_signers(t), pause)
        pause = min(2 * pause, 1.0)


async def _run_round(node: Node, t: int) -> None:
    graph, clock = node.graph(t), Clock()
    check_message_split("copies" if node.settings.copies else "shares", graph, t)
    active, active_fraction = bool(graph.active[node.number]), float(graph.active.mean())
    line: dict[str, Any] = {"round": t, "active": int(active)}
    resumed = node.transactions.accounts.pushed  # cut off before; it may have taken some already
    if not resumed:
        node.state = "training"
        rests_next = t + 1 < node.settings.rounds and not node.graph(t + 1).active[node.number]
        keep = active and bool(rests_next)
        await node.run_in_thread(node.learner.train, t, active, active_fraction, keep)
        clock.lap("train_seconds")
        line["local"] = await _evaluate(node, t, "local")
        clock.lap("evaluate_seconds")
        node.state = "pushing"
        if node.stopping or not await _push(node, t, receivers(graph, node.names, node.number)):
            return
    node.state = "waiting"
    expected: set[str] = set()  # unknown if each peer chooses its receivers from its own reports
    if not node.sync:
        await _pace(node, t)
    elif node.topology.reports is not None:
        await _wait_for_pushes(node, t)
    else:
        expected = set(expected_senders(graph, node.names, node.number))
        await _wait_for_shares(node, t, expected)
    if node.stopping:
        return
    in_step = node.sync and (resumed or not _is_left_behind(node, t, expected))
    up_to = t if in_step else None
    if node.sync and node.settings.rule is not None and not node.settings.copies:
        await _exchange_verdicts(node, up_to)
        if node.stopping:
            return
    await node.absorb(up_to, finish=True)
    clock.lap("mix_seconds")
    line["mixed"] = await _evaluate(node, t, "mixed")
    clock.lap("evaluate_seconds")
    node.scores = line["mixed"] or node.scores
    line |= {"mass": node.transactions.mass, **node.metrics.count_new_bytes(), **clock.record()}
    line |= node.learner.record()
    node.metrics.add("rounds")
    node.record(line)
    node.log("round", **line)


async def _evaluate(node: Node, t: int, stage: str) -> dict[str, float]:
    if not is_evaluated(t, node.settings.evaluate_every, node.settings.rounds):
        return {}
    return await node.run_in_thread(node.learner.evaluate, t, stage)


async def _push(node: Node, t: int, weights: dict[str, float]) -> bool:
    """Split and commit. Returns False if the peer was stopped before."""
    neighbours, others = node.neighbours, set(weights) - {node.ctx.name}

    def busy() -> set[str]:
        return {p for p in neighbours.worth_waiting_for(others) if not neighbours.is_free(p)}

    if node.sync:
        neighbours.clogged |= await wait_for_peers(node, others, busy)
        if node.stopping:
            return False
    cautious = not node.sync or node.settings.quorum < 1
    cautious |= bool(neighbours.absent | neighbours.clogged)
    may_push = not cautious or ledger.may_push(node.transactions.accounts)
    barred = node.debtors() | node.past_last_round()
    chosen = {
        p: w
        for p, w in weights.items()
        if p not in others or (may_push and neighbours.is_free(p) and p not in barred)
    }
    message = await node.run_in_thread(node.learner.message, t)
    numbers = [number for number, name in enumerate(node.names) if name in set(chosen) & others]
    report = await node.run_in_thread(node.learner.report_to, numbers)
    rest = {**await node.run_in_thread(node.learner.rest), **node.keep_pushed(message)}
    if node.settings.copies:
        copied = sorted(set(chosen) & others)
        transfers = await node.transactions.push_copies(t, message, rest, copied)
    else:
        parts = ledger.integer_weights(chosen)
        home = parts.pop(node.ctx.name, 0)
        transfers = await node.transactions.push(t, message, rest, parts, home, report=report)
    for transfer in transfers:
        neighbours.senders[transfer.receiver].wake()
    return True


async def _wait_for_shares(node: Node, t: int, expected: set[str]) -> None:
    """Wait until every promised share is here, or the deadline; late ones merge later."""
    neighbours = node.neighbours
    # A round that was cut off may have taken some, and sent others back.
    before = node.store.senders_since(t) if node.settings.rule is not None else set()
    waited_for = expected - before - neighbours.list_outside() - neighbours.absent - neighbours.done

    def missing() -> set[str]:
        arrived = {p for p, s in node.receiver.staged.items() if s.transfer.round >= t}
        if node.settings.quorum < 1:
            # A link carries one share: before this one is taken none comes.
            arrived = set(node.receiver.staged) | _find_silent(node, t)
        gone = neighbours.list_outside() | neighbours.absent | neighbours.done
        return waited_for - arrived - gone

    node.patience.begin(t)
    asking = None
    if node.settings.quorum < 1:
        asking = asyncio.create_task(_ask_missing(node, missing))
    late = await wait_for_peers(node, waited_for, missing, by_mass=True)
    if asking is not None:
        asking.cancel()
    _give_up_on(node, t, late)


async def _ask_missing(node: Node, missing: Callable[[], set[str]]) -> None:
    """With a quorum, ask late neighbours whether they have pushed without this peer."""
    pause = 0.25
    while True:
        await asyncio.sleep(pause)
        await node.neighbours.announce(missing())
        pause = min(1.5 * pause, 5.0)


def _find_silent(node: Node, t: int) -> set[str]:
    """Neighbours that have pushed in this round, and have nothing more for this peer."""
    neighbours, staged = node.neighbours, node.receiver.staged
    return {
        p
        for p, round in node.receiver.rounds.items()
        if round > t and neighbours.has_delivered(p, staged[p].transfer.seq if p in staged else 0)
    }


def _give_up_on(node: Node, t: int, late: set[str]) -> None:
    """Count neighbours that let the deadline pass as absent."""
    if late and not node.stopping:
        node.log("deadline", round=t, missing=sorted(late))
        node.neighbours.absent |= late


def _is_left_behind(node: Node, t: int, expected: set[str]) -> bool:
    """Whether the others have let a deadline pass, and are in later rounds than this one.

    Links keep their order, so a later share comes in place of one that this round was promised,
    unless that was refused. Then everything is taken at once: a lagging peer that kept later shares
    for later rounds would keep sending mass and receive none.
    """
    staged = node.receiver.staged
    later = {p for p in expected & set(staged) if staged[p].transfer.round > t}
    return bool(later - node.receiver.refused_senders())


async def _wait_for_pushes(node: Node, t: int) -> None:
    """With an adaptive topology, wait until all have said that they pushed, or the deadline.

    A peer that has pushed says so, with the number of its last share to this peer.
    """
    neighbours, rounds = node.neighbours, node.receiver.rounds
    neighbours.absent -= {p for p, round in rounds.items() if round > t}

    def missing() -> set[str]:
        staged = {p: s.transfer for p, s in node.receiver.staged.items()}
        arrived = {p for p, share in staged.items() if share.round >= t}
        arrived |= _find_silent(node, t)
        return neighbours.list_staying() - arrived - neighbours.absent - neighbours.done

    await neighbours.announce(neighbours.list_staying())
    # Everybody tells all the others; asking again is for what was lost on the way.
    node.patience.begin(t)
    node.waits_for = missing
    end, pause = time.monotonic() + measured_deadline(node), 0.5
    while missing() and time.monotonic() < end:
        await node.wait_until(lambda: not missing(), min(pause, end - time.monotonic()))
        if node.stopping or node.leaving:
            return
        await neighbours.announce(missing())
        pause = min(1.5 * pause, 5.0)
    node.waits_for = set
    _give_up_on(node, t, missing())


async def _exchange_verdicts(node: Node, up_to: int | None) -> None:
    """Say which shares the robust rule takes, and wait for what others say of this peer's.

    So a share that is sent back still counts in this round. This is a commit of its own: nobody
    waits for another's answer before it gives its own.
    """
    await node.absorb(up_to, finish=False, refunds=False)
    neighbours = node.neighbours

    def find_unanswered() -> set[str]:
        outbox = node.transactions.accounts.outbox
        waiting = {p for p in outbox if neighbours.senders[p].refund is None}
        return neighbours.worth_waiting_for(waiting)

    neighbours.clogged |= await wait_for_peers(node, (), find_unanswered)


async def _pace(node: Node, t: int) -> None:
    """In async mode, keep the interval between rounds and the bound on staleness."""
    if node.settings.round_interval:
        await node.wait_until(lambda: False, node.settings.round_interval)
    if node.settings.staleness is not None:
        await _wait_for_slowest(node, t - node.settings.staleness)


async def _wait_for_slowest(node: Node, least: int) -> None:
    """Wait until nobody is in an earlier round than this, or the deadline.

    Neighbours are asked: the graph or its back-pressure may delay a share from each. One that lets
    the deadline pass is waited for again once it has caught up.
    """
    neighbours, rounds = node.neighbours, node.receiver.rounds
    neighbours.absent -= {p for p, round in rounds.items() if round >= least}

    def behind() -> set[str]:
        late = {p for p, round in rounds.items() if round < least}
        return late - neighbours.done - neighbours.list_outside() - neighbours.absent

    end, pause = time.monotonic() + node.settings.deadline, 0.02
    while behind() and time.monotonic() < end:
        await neighbours.announce(behind())
        await node.wait_until(lambda: not behind(), min(pause, end - time.monotonic()))
        if node.stopping or node.leaving:
            return
        pause = min(1.5 * pause, 1.0)
    neighbours.absent |= behind()


# The end


async def run_end(node: Node) -> None:
    """Stay until the others have finished too, or give all mass away and leave."""
    if not node.stopping and not node.leaving:
        await _wait_for_late_shares(node)
    if not node.stopping and node.leaving:
        await _leave(node)


async def _wait_for_late_shares(node: Node) -> None:
    """Take in late shares and answer, until all have finished or there is no news any more.

    Neighbours that are behind are asked how far they are: they push nothing here that would tell.
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
        # A round of those behind may wait for two deadlines.
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

    Where nobody listens any more, a peer has ended. A peer that was only too busy to answer would
    stay for long after this one.
    """
    return {p for p in others if not node.neighbours.senders[p].link.vacant}


def _measure_progress(node: Node) -> tuple[int, int]:
    """A value that changes when others come on, and never goes back.

    Neither shares nor a neighbour that ends again and again keep a peer up.
    """
    rounds = (min(round, node.settings.rounds) for round in node.receiver.rounds.values())
    return len(node.neighbours.ends), sum(rounds)


async def _leave(node: Node) -> None:
    """Tell everybody, then push everything out until nothing is left here or under way."""
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
