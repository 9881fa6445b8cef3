"""The rounds of a peer, and how long they wait.

    train → split → commit → send        (push)
    wait or not → merge → commit → ack   (absorb)

In async mode a round takes what has come. In sync mode it waits for the shares that its graph
promises:

    quorum   deadline_floor   a round goes on
    none     none             when all are here, or after `deadline`
    none     set              … or after the deadline that follows what was measured
    q        none             … or as soon as q of them are here
    q        set              … or when q are here and that deadline has passed

After `deadline` it goes on in any case.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from quiverfl.engine.checks.peers import check_message_split
from quiverfl.engine.history import Clock
from quiverfl.engine.settings import is_evaluated
from quiverfl.peer.accounts import ledger
from quiverfl.peer.learner import expected_senders, receivers

if TYPE_CHECKING:
    from quiverfl.peer.node import Node

REMEMBERED = 256
"""The number of past arrivals that the deadline follows."""
ROUNDS = 64
"""The number of past rounds whose late shares still count."""
FEWEST = 8
"""With fewer arrivals the deadline is `deadline`."""


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
    """Let a member that joins in a later round wait until two other peers have reached it.

    One peer alone could send it ahead of all other peers.
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
    """Before a round from which the run changes, wait until all other members have signed.

    All members then change in the same round. A member that lets the deadline pass has not
    agreed in time.
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
    """Whether other peers have let a deadline pass, and are in later rounds than this one.

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
    # Each peer announces it to all other peers; asking again is for lost announcements.
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
    """Send the robust rule's verdicts on shares, and wait for the verdicts on this peer's shares.

    A share that is sent back still counts in this round. This is a separate commit: no peer waits
    for another's answer before it gives its own.
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
    """Wait until no peer is in an earlier round than this, or until the deadline.

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


# How long a round waits


class Patience:
    """Measures when shares arrive, counted from when their round began to wait."""

    def __init__(self) -> None:
        self._delays: deque[float] = deque(maxlen=REMEMBERED)
        self._began: dict[int, float] = {}

    def begin(self, round: int, now: float | None = None) -> None:
        self._began.setdefault(round, time.monotonic() if now is None else now)
        while len(self._began) > ROUNDS:
            del self._began[next(iter(self._began))]

    def note_arrival(self, round: int, now: float | None = None) -> None:
        """Measure a share, also a late one: a slower network makes the deadline longer."""
        began = self._began.get(round)
        if began is not None:
            self._delays.append((time.monotonic() if now is None else now) - began)
        elif not self._began or round > max(self._began):
            self._delays.append(0.0)  # here before this peer waited

    def deadline(self, percentile: float, factor: float, floor: float, ceiling: float) -> float:
        """A percentile of the delays times a factor, within bounds."""
        if len(self._delays) < FEWEST:
            return ceiling
        ordered = sorted(self._delays)
        place = min(len(ordered) - 1, math.ceil(percentile * len(ordered)) - 1)
        return min(ceiling, max(floor, factor * ordered[max(0, place)]))


def measured_deadline(node: Node) -> float:
    """The deadline that follows measured delays; `deadline` until there are enough."""
    settings = node.settings
    if settings.deadline_floor is None:
        return settings.deadline
    return node.patience.deadline(
        settings.deadline_percentile,
        settings.deadline_factor,
        settings.deadline_floor,
        settings.deadline,
    )


async def wait_for_peers(
    node: Node, promised: Collection[str], missing: Callable[[], set[str]], by_mass: bool = False
) -> set[str]:
    """Wait for promised shares. Returns the neighbours that missed their deadline.

    A neighbour without which a quorum is complete before then is only late: it is waited for again
    in the next round.
    """
    settings, began, soft = node.settings, time.monotonic(), measured_deadline(node)

    def is_complete() -> bool:
        late = missing()
        if not late or settings.quorum == 1:
            return not late
        weigh = node.receiver.last_mass if by_mass and settings.quorum_by == "mass" else len
        all_of_them = set(promised) | late
        return weigh(all_of_them - late) >= settings.quorum * weigh(all_of_them) - 1e-9

    node.waits_for = missing
    try:
        if settings.deadline_floor is None:
            await node.wait_until(is_complete)
        else:
            await node.wait_until(lambda: not missing(), soft)
            if settings.quorum < 1 and missing():
                seconds = settings.deadline - (time.monotonic() - began)
                await node.wait_until(is_complete, max(0.0, seconds))
    finally:
        node.waits_for = set
    return missing() if time.monotonic() - began >= soft else set()
