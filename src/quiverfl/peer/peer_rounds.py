"""A peer's rounds.

    train → split → commit → send        (push)
    wait or not → merge → commit → ack   (absorb)

In sync mode a round waits for the shares its graph promises, or for a deadline; in async mode it
takes what has come.
"""

from __future__ import annotations

import time
from typing import Any

from quiverfl.engine.accounting import Clock
from quiverfl.engine.history import evaluates
from quiverfl.engine.splitting import check_split
from quiverfl.peer import ledger
from quiverfl.peer.learner import expected_senders, receivers
from quiverfl.peer.participant import Participant


async def run_rounds(peer: Participant) -> None:
    await peer.follow()
    if not peer.over():
        await peer.ask()
    while not peer.stopping and not peer.condition.leaving:
        await _agreed(peer)
        await peer.follow()
        if peer.over():
            return
        await _round(peer, peer.transactions.accounts.round)


async def _agreed(peer: Participant) -> None:
    """Before a round from which something is to change: until the others have agreed as well.

    So all change in the same round. Whoever lets the deadline pass has not agreed in time.
    """
    end, pause = time.monotonic() + peer.settings.deadline, 0.05
    while awaited := peer.course.awaited(peer.transactions.accounts.round):
        if peer.stopping or peer.condition.leaving:
            return
        if time.monotonic() > end:
            peer.course.give_up(peer.transactions.accounts.round)
            return
        peer.state = "agreeing"
        await peer.neighbours.tell(awaited)
        await peer.neighbours.settled()
        await peer.until(lambda: False, pause)
        pause = min(2 * pause, 1.0)


async def _round(peer: Participant, t: int) -> None:
    graph, sync, clock = peer.graph(t), peer.sync(), Clock()
    check_split("copies" if peer.settings.copies else "shares", graph, t)
    active, share = bool(graph.active[peer.number]), float(graph.active.mean())
    line: dict[str, Any] = {"round": t, "active": int(active)}
    resumed = peer.transactions.accounts.pushed  # cut off before; it may have taken some already
    if not resumed:
        peer.state = "training"
        keep = t + 1 < peer.settings.rounds and not peer.graph(t + 1).active[peer.number]
        await peer.off_loop(peer.learner.train, t, active, share, active and bool(keep))
        clock.lap("train_seconds")
        line["local"] = await _evaluated(peer, t, "local")
        clock.lap("evaluate_seconds")
        peer.state = "pushing"
        if peer.stopping or not await _push(peer, t, receivers(graph, peer.names, peer.number)):
            return
    peer.state = "waiting"
    expected: set[str] = set()  # known to the graph, unless everybody chooses for itself
    if sync and peer.topology.looks is not None:
        await _listen(peer, t)
    elif sync:
        expected = set(expected_senders(graph, peer.names, peer.number))
        await _gather(peer, t, expected)
    else:
        await _breathe(peer, t)
    if peer.stopping:
        return
    in_step = sync and (resumed or not _left_behind(peer, t, expected))
    up_to = t if in_step else None
    if sync and peer.settings.rule is not None and not peer.settings.copies:
        await _settle(peer, up_to)
        if peer.stopping:
            return
    await peer.absorb(up_to, finish=True)
    clock.lap("mix_seconds")
    line["mixed"] = await _evaluated(peer, t, "mixed")
    clock.lap("evaluate_seconds")
    peer.scores = line["mixed"] or peer.scores
    line |= {"mass": peer.transactions.mass, **peer.metrics.moved(), **clock.record()}
    line |= peer.learner.record()
    peer.metrics.add("rounds")
    peer.record(line)
    peer.log("round", **line)


async def _evaluated(peer: Participant, t: int, stage: str) -> dict[str, float]:
    if not evaluates(t, peer.settings.evaluate_every, peer.settings.rounds):
        return {}
    return await peer.off_loop(peer.learner.evaluate, t, stage)


async def _push(peer: Participant, t: int, weights: dict[str, float]) -> bool:
    """Split and commit; False if there was no time for it before the end."""
    neighbours, others = peer.neighbours, set(weights) - {peer.agreement.name}
    if peer.sync():
        await peer.until(
            lambda: all(neighbours.free(p) for p in neighbours.waited_for(others)), None
        )
        late = {p for p in neighbours.waited_for(others) if not neighbours.free(p)}
        neighbours.clogged |= late
        if peer.stopping:
            return False
    cautious = not peer.sync() or bool(neighbours.absent | neighbours.clogged)
    may = not cautious or ledger.may_push(peer.transactions.accounts)
    barred = peer.overdrawn()
    if peer.sync():  # the others have finished without this one, and give nothing back any more
        barred |= neighbours.done
    chosen = {
        p: w
        for p, w in weights.items()
        if p not in others or (may and neighbours.free(p) and p not in barred)
    }
    message = await peer.off_loop(peer.learner.message, t)
    numbers = [number for number, name in enumerate(peer.names) if name in set(chosen) & others]
    told = await peer.off_loop(peer.learner.tell, numbers)
    rest = {**await peer.off_loop(peer.learner.rest), **peer.remembered(message)}
    if peer.settings.copies:
        to = set(chosen) & others
        transfers = await peer.transactions.push_copies(t, message, rest, sorted(to))
    else:
        parts = ledger.as_parts(chosen)
        home = parts.pop(peer.agreement.name, 0)
        transfers = await peer.transactions.push(t, message, rest, parts, home, told=told)
    for transfer in transfers:
        neighbours.senders[transfer.receiver].wake()
    return True


async def _gather(peer: Participant, t: int, expected: set[str]) -> None:
    """Until every promised share is here, or the deadline: late ones merge in a later round."""
    neighbours = peer.neighbours
    # A round that was cut off may have taken some, and sent others back.
    before = peer.store.senders_since(t) if peer.settings.rule is not None else set()

    def missing() -> set[str]:
        here = {p for p, s in peer.receiver.staged.items() if s.transfer.round >= t}
        return expected - before - here - neighbours.outside() - neighbours.absent - neighbours.done

    await peer.until(lambda: not missing(), None)
    late = missing()
    if late and not peer.stopping:
        peer.log("deadline", round=t, missing=sorted(late))
        neighbours.absent |= late


def _left_behind(peer: Participant, t: int, expected: set[str]) -> bool:
    """Whether the others have let a deadline pass, and are in later rounds than this one.

    Links keep their order, so a later share comes in place of one that this round was promised,
    unless that was refused. Then everything is taken at once: who kept later shares for later
    rounds would go on giving mass away and get none until it has caught up.
    """
    staged = peer.receiver.staged
    later = {p for p in expected & set(staged) if staged[p].transfer.round > t}
    return bool(later - peer.receiver.refused_senders())


async def _listen(peer: Participant, t: int) -> None:
    """Where everybody chooses whom to send to: until all have said that they have, or the deadline.

    Whoever has pushed says so, and which number its last share to this peer has.
    """
    neighbours, heard = peer.neighbours, peer.receiver.heard
    neighbours.absent -= {p for p, round in heard.items() if round > t}

    def missing() -> set[str]:
        staged = {p: s.transfer for p, s in peer.receiver.staged.items()}
        here = {p for p, share in staged.items() if share.round >= t}
        silent = {
            p
            for p, round in heard.items()
            if round > t and neighbours.delivered(p, staged[p].seq if p in staged else 0)
        }
        return neighbours.staying() - here - silent - neighbours.absent - neighbours.done

    await neighbours.tell(neighbours.staying())
    # Everybody tells all the others: asking is for what was lost on the way.
    end, pause = time.monotonic() + peer.settings.deadline, 0.5
    while missing() and time.monotonic() < end:
        await peer.until(lambda: not missing(), min(pause, end - time.monotonic()))
        if peer.stopping or peer.condition.leaving:
            return
        await neighbours.tell(missing())
        pause = min(1.5 * pause, 5.0)
    if late := missing():
        peer.log("deadline", round=t, missing=sorted(late))
        neighbours.absent |= late


async def _settle(peer: Participant, up_to: int | None) -> None:
    """Say what is taken, and wait for what others have taken: what is sent back is of this round.

    A commit of its own: nobody waits for another's answer before it gives its own.
    """
    await peer.absorb(up_to, finish=False, returned=False)
    neighbours = peer.neighbours

    def unsaid() -> set[str]:
        outbox = peer.transactions.accounts.outbox
        return neighbours.waited_for({p for p in outbox if neighbours.senders[p].refund is None})

    await peer.until(lambda: not unsaid(), None)
    neighbours.clogged |= unsaid()


async def _breathe(peer: Participant, t: int) -> None:
    """Async: continue at once, unless asked to pause or too far ahead of the slowest heard."""
    if peer.settings.pause:
        await peer.until(lambda: False, peer.settings.pause)
    if peer.settings.staleness is not None:
        await _stay_close(peer, t - peer.settings.staleness)


async def _stay_close(peer: Participant, least: int) -> None:
    """Until nobody is in an earlier round than this, or the deadline.

    They are asked: a share from each may be long in coming, as the graph or its back-pressure
    has it. Who lets the deadline pass is waited for again once it has caught up.
    """
    neighbours, heard = peer.neighbours, peer.receiver.heard
    neighbours.absent -= {p for p, round in heard.items() if round >= least}

    def behind() -> set[str]:
        late = {p for p, round in heard.items() if round < least}
        return late - neighbours.done - neighbours.outside() - neighbours.absent

    end, pause = time.monotonic() + peer.settings.deadline, 0.02
    while behind() and time.monotonic() < end:
        await neighbours.tell(behind())
        await peer.until(lambda: not behind(), min(pause, end - time.monotonic()))
        if peer.stopping or peer.condition.leaving:
            return
        pause = min(1.5 * pause, 1.0)
    neighbours.absent |= behind()
