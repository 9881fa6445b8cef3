"""A peer's rounds: train, split and commit, wait or not, merge.

In sync mode a round waits for the shares its graph promises, or for a deadline; in async mode it
takes what has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quiverfl.peer import ledger
from quiverfl.peer.learner import column, expected_senders

if TYPE_CHECKING:
    from quiverfl.peer.node import Node


async def rounds(node: Node) -> None:
    while node.books.accounts.round < node.settings.rounds:
        if node.stopping or node.condition.leaving:
            return
        await _round(node, node.books.accounts.round)


async def _round(node: Node, t: int) -> None:
    graph, sync = node.topology(t), _sync(node)
    line: dict[str, Any] = {"round": t}
    if not node.books.accounts.pushed:
        node.state = "training"
        await node.off_loop(node.learner.train, t, bool(graph.active[node.number]))
        line["local"] = await _evaluated(node, t, "local")
        node.state = "pushing"
        if node.stopping or not await _push(node, t, column(graph, node.names, node.number)):
            return
    node.state = "waiting"
    if sync:
        await _gather(node, t, expected_senders(graph, node.names, node.number))
    else:
        await _breathe(node, t)
    if node.stopping:
        return
    await node.absorb(t if sync else None, finish=True)
    line["mixed"] = await _evaluated(node, t, "mixed")
    node.metrics = line["mixed"] or node.metrics
    line |= {"mass": node.books.mass, "sent_bytes": node.tally.counts["sent_bytes"]}
    node.tally.add("rounds")
    node.record(line)
    node.log("round", **line)


def _sync(node: Node) -> bool:
    return node.settings.mode == "sync"


async def _evaluated(node: Node, t: int, stage: str) -> dict[str, float]:
    last = t + 1 >= node.settings.rounds
    if (t + 1) % node.settings.evaluate_every and not last:
        return {}
    return await node.off_loop(node.learner.evaluate, t, stage)


async def _push(node: Node, t: int, weights: dict[str, float]) -> bool:
    """Split and commit; False if there was no time for it before the end."""
    neighbours, others = node.neighbours, set(weights) - {node.terms.name}
    if _sync(node):
        ready = others - neighbours.outside()
        await node.until(lambda: all(neighbours.free(p) for p in ready - neighbours.absent), None)
        neighbours.absent |= {peer for peer in ready if not neighbours.free(peer)}
        if node.stopping:
            return False
    cautious = not _sync(node) or bool(neighbours.absent)
    may = not cautious or ledger.may_push(node.books.accounts)
    chosen = {p: w for p, w in weights.items() if p not in others or (may and neighbours.free(p))}
    parts = ledger.as_parts(chosen)
    home = parts.pop(node.terms.name, 0)
    message = await node.off_loop(node.learner.message)
    rest = await node.off_loop(node.learner.rest)
    for transfer in await node.books.push(t, message, rest, parts, home):
        neighbours.couriers[transfer.receiver].wake()
    return True


async def _gather(node: Node, t: int, expected: set[str]) -> None:
    """Until every promised share is here, or the deadline: late ones merge in a later round."""
    neighbours = node.neighbours

    def missing() -> set[str]:
        here = {p for p, s in node.reception.staged.items() if s.transfer.round >= t}
        return expected - here - neighbours.outside() - neighbours.absent - neighbours.done

    await node.until(lambda: not missing(), None)
    late = missing()
    if late and not node.stopping:
        node.log("deadline", round=t, missing=sorted(late))
        neighbours.absent |= late


async def _breathe(node: Node, t: int) -> None:
    """Async: go on at once, unless asked to pause or too far ahead of the slowest heard."""
    if node.settings.pause:
        await node.until(lambda: False, node.settings.pause)
    bound, heard = node.settings.staleness, node.reception.heard
    if bound is not None:
        away = node.neighbours.done | node.neighbours.outside()
        await node.until(lambda: all(heard[peer] >= t - bound for peer in set(heard) - away), None)
