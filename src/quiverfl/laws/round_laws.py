"""Laws about single rounds. Each function says how a method breaks its law, or returns None.

A sentence has what was expected and what was found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.engine.exchange.exchange import Exchange
from quiverfl.engine.exchange.matrix import MatrixProduct
from quiverfl.engine.local.context import ClientGroup, PhaseIndex
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.engine.rounds import exchange_messages
from quiverfl.engine.shard import Shard
from quiverfl.laws.problem import CLIENTS, Case, Difference, fields, models, tiny_task
from quiverfl.methods.contract import Method, Train
from quiverfl.methods.optional import SizesMessages
from quiverfl.methods.state import field_roles, replicated_fields, select_fields
from quiverfl.peer.link.messages import TYPES, Manifest
from quiverfl.topologies import Graph, full, isolated, random_regular
from quiverfl.topologies.topology import find_offline

ALL = np.ones(CLIENTS, dtype=bool)
SOME = np.array([True, False, True, False, False, True])
ORDER = (3, 0, 5, 1, 4, 2)
"""A permutation of the clients: one stays, the others move."""


def identity_mixing(case: Case, tolerance: float = 1e-12, whole: bool | None = None) -> str | None:
    """Law 1. The message of a method with `payload` may carry a mask that merge applies: its
    model may change once. `whole`: the second merge leaves all fields as they are; without server
    state, which may move by itself, unless it is said."""
    shard, exchange = case.shard(), Exchange(MatrixProduct(case.method.delay))
    shard.train(0, ALL)
    trained = models(shard)
    alone = isolated(clients=CLIENTS)(0)
    exchange_messages(shard, exchange, alone, 0)
    change = Difference.between(trained._asdict(), models(shard)._asdict())
    if change.size > tolerance and not isinstance(case.method, SizesMessages):
        return (
            "where every client receives its own message and no other, personal(state) should "
            "give the same model after merge as right after training; its "
            f"{change.name} part differs by {change.size:.2g} (client {change.client}). personal "
            "is called at both moments and must be right at both."
        )
    once = fields(shard)
    exchange_messages(shard, exchange, alone, 1)
    change = Difference.between(once, fields(shard))
    whole = not replicated_fields(type(shard.state)) if whole is None else whole
    if whole and change.size > tolerance:
        return (
            "where a client merges its own message and no other a second time, without training, "
            f"its state should stay as it is; field {change}."
        )
    return None


def agreement(case: Case, tolerance: float = 1e-12) -> str | None:
    """Law 2."""
    shard = case.shard()
    for role in ("shared", "personal", "any"):
        for leaf in select_fields(shard.state, role).values():
            leaf[:] = leaf[0].clone()
    before = models(shard)
    exchange = Exchange(MatrixProduct(case.method.delay))
    for t in range(4):
        exchange_messages(shard, exchange, case.topology(t), t)
        change = Difference.between(before._asdict(), models(shard)._asdict())
        if change.size > tolerance:
            return (
                "where all clients have the same model and nobody trains, mixing should leave "
                f"every model as it is; after round {t + 1} the {change.name} part of client "
                f"{change.client} differs by {change.size:.2g}."
            )
    return None


def permutation(case: Case, tolerance: float = 1e-12) -> str | None:
    """Law 3."""
    order = list(ORDER)
    plain, permuted = case.shard(), case.shard(order)
    first, second = (Exchange(MatrixProduct(case.method.delay)) for _ in range(2))
    for t in range(2):
        graph = case.topology(t)
        relabelled = Graph(graph.sparse[order][:, order], graph.active[order], graph.hub)
        plain.train(t, graph.active)
        permuted.train(t, relabelled.active)
        exchange_messages(plain, first, graph, t)
        exchange_messages(permuted, second, relabelled, t)
    back = np.argsort(order)
    restored = {name: leaf[back] for name, leaf in fields(permuted).items()}
    apart = Difference.between(fields(plain), restored)
    if apart.size > tolerance:
        return (
            "a client's state should not depend on where the client stands in the list; with the "
            f"clients in another order, after two rounds, field {apart}."
        )
    return None


def conservation(case: Case, tolerance: float = 1e-12) -> str | None:
    """Law 4: where columns sum to 1, what arrives and is in flight was sent. What push-sum carries
    stays what it was in sum, and its mass stays 1 where rows sum to 1."""
    regular = random_regular(clients=CLIENTS, neighbors=2, seed=0)
    method, topology = case.method, case.topology
    topology = topology if topology(0).column_stochastic else regular
    shard, exchange = case.shard(), Exchange(MatrixProduct(method.delay))
    one = not method.delay
    for t in range(4):  # a delay of 2 has arrivals in two of them
        graph = topology(t)
        one = one and graph.row_stochastic  # in every round so far
        shard.train(t, graph.active)
        outbox = {name: leaf.clone() for name, leaf in shard.outbox().items()}
        flying = exchange.tensors()
        sent = {name: _total(leaf, flying, name) for name, leaf in outbox.items()}
        exchange.push(t, graph, outbox)
        mixed = exchange.collect(t)
        for name, total in sent.items():
            arrived = _total(mixed[name], exchange.tensors(), name)
            broken = _describe_difference(
                f"the leaf {name!r} that arrives and is in flight", total, arrived
            )
            if broken is not None:
                return broken
        shard.merge(mixed, find_offline(graph))
        broken = _mass_lost(shard, exchange, sent, tolerance, one)
        if broken is not None:
            return broken
    return _mass_is_one(case, tolerance)


def _mass_lost(
    shard: Shard, exchange: Exchange, sent: dict[str, Tensor], tolerance: float, one: bool
) -> str | None:
    """What a push-sum method would send next, with what is in flight, is what was sent."""
    method = shard.method
    if method.mass is None:
        return None
    mass = getattr(shard.state, method.mass)
    total = _total(mass, exchange.tensors(), method.mass)
    if abs(float(total) - CLIENTS) > tolerance:
        return (
            f"the mass {method.mass!r} of all clients and in flight should stay {CLIENTS} in sum; "
            f"after merge it is {float(total):.6g}. merge must return the mass that arrived."
        )
    if one and float((mass - 1).abs().max()) > tolerance:
        return _not_one(method, mass)
    carried = set(select_fields(shard.state, "shared")) & set(sent)
    again = {name: leaf.clone() for name, leaf in shard.outbox().items() if name in carried}
    for name, leaf in again.items():
        now = _total(leaf, exchange.tensors(), name)
        what = f"the leaf {name!r}, summed over clients and what is in flight, after merge,"
        broken = _describe_difference(what, sent[name], now)
        if broken is not None:
            return f"{broken} merge must keep what push-sum carries, and not the de-biased model."
    return None


def _mass_is_one(case: Case, tolerance: float) -> str | None:
    """On the case's own graph, where that is one whose rows sum to 1 and columns do not."""
    method, first = case.method, case.topology(0)
    if method.mass is None or method.delay or not first.row_stochastic:
        return None
    shard, exchange = case.shard(), Exchange(MatrixProduct())
    for t in range(2):
        graph = case.topology(t)
        shard.train(t, graph.active)
        exchange_messages(shard, exchange, graph, t)
        mass = getattr(shard.state, method.mass)
        if graph.row_stochastic and float((mass - 1).abs().max()) > tolerance:
            return _not_one(method, mass)
    return None


def _not_one(method: Method, mass: Tensor) -> str:
    return (
        f"where rows sum to 1 the mass {method.mass!r} should stay 1 at every client; it is "
        f"{float(mass.min()):.6g} … {float(mass.max()):.6g}."
    )


def _total(leaf: Tensor, flying: dict[str, Tensor], name: str) -> Tensor:
    """Over clients, with what is in flight."""
    away = [tensor.sum(dim=0) for key, tensor in flying.items() if key.endswith("/" + name)]
    return sum(away, start=leaf.sum(dim=0))


def _describe_difference(
    what: str, expected: Tensor, actual: Tensor, tolerance: float = 1e-12
) -> str | None:
    apart = (expected - actual).abs()
    if apart.numel() and not float(apart.max()) <= tolerance:
        place = int(apart.reshape(-1).argmax())
        pair = [float(total.reshape(-1)[place]) for total in (expected, actual)]
        return f"{what} should be {pair[0]:.6g} as it was sent; it is {pair[1]:.6g}."
    return None


def untrained_parts(case: Case) -> str | None:
    """Law 5."""
    shard = _mixed_once(case)
    for number, phase in enumerate(shard.method.phases(tiny_task())):
        if not isinstance(phase, Train) or phase.part == "whole":
            continue
        changed, point_moved = changed_by(shard, phase, number)
        other = "personal" if phase.part == "shared" else "shared"
        kinds = field_roles(type(shard.state))
        wrong = [repr(name) for name in changed if kinds[name] == other]
        start = f"phase {number} trains the {phase.part} part"
        if wrong:
            return (
                f"{start}, so fields of the {other} part should be bit-identical after it; "
                f"{', '.join(wrong)} changed. See what its update replaces."
            )
        if point_moved:
            return (
                f"{start}, so the {other} part of its point should be bit-identical after it; it "
                "changed."
            )
        if not changed:
            return f"{start}, so update should keep what was trained; no field changed."
    return None


def _mixed_once(case: Case) -> Shard:
    """All clients after a round on the complete graph."""
    shard = case.shard()
    shard.train(0, ALL)
    exchange_messages(
        shard, Exchange(MatrixProduct(case.method.delay)), full(clients=CLIENTS)(0), 0
    )
    return shard


def changed_by(shard: Shard, phase: Train, number: int) -> tuple[list[str], bool]:
    """The fields that two epochs of a phase change, and whether they move the part of its point
    that it does not train."""
    group = ClientGroup(np.arange(CLIENTS), shard.ids)
    before = type(shard.state)(*fields(shard).values())
    epochs = np.full(CLIENTS, 2)
    after, *_ = shard.trainer.train(phase, shard.state, group, PhaseIndex(1, number), epochs)
    names = type(before)._fields
    changed = [
        name
        for name, old, new in zip(names, before, after, strict=True)
        if not torch.equal(old, new)
    ]
    old, new = (vmap_clients(phase.params)(state) for state in (before, after))
    still = "personal" if phase.part == "shared" else "shared"
    return changed, not torch.equal(getattr(old, still), getattr(new, still))


def inactive_clients(case: Case) -> str | None:
    """Law 8."""
    shard = case.shard()
    before, used = fields(shard), models(shard)
    shard.train(0, SOME)
    away = np.flatnonzero(~SOME)
    for name, old in before.items():
        if not torch.equal(old[away], getattr(shard.state, name)[away]):
            return (
                "clients that do not train in a round should keep their state; their field "
                f"{name!r} changed while others trained."
            )
    for part, old in used._asdict().items():
        if not torch.equal(old[away], getattr(models(shard), part)[away]):
            return (
                "clients that do not train in a round should keep their model; the "
                f"{part} part that personal gives them changed while others trained. A method "
                "remembers things in its state and nowhere else."
            )
    if shard.steps[away].any():
        return f"clients that do not train should take no steps; they took {shard.steps[away]}."
    return None


def wire_format(case: Case) -> str | None:
    """Law 9: what peers pack and unpack."""
    shard = case.shard()
    shard.train(0, ALL)
    outbox = shard.outbox()
    for name, leaf in outbox.items():
        if leaf.dtype not in (torch.float32, torch.float64):
            return (
                f"peers send numbers of 4 or 8 bytes ({', '.join(TYPES)}); the message's leaf "
                f"{name!r} is {leaf.dtype}. `[compression]` sends fewer bits."
            )
    leaves = {name: leaf[0].numpy() for name, leaf in outbox.items()}
    if not leaves:
        return None
    parameters = [(name, leaf.shape) for name, leaf in sorted(leaves.items())]
    manifest = Manifest.of(leaves, parameters, sparse=isinstance(case.method, SizesMessages))
    payload = manifest.pack(leaves)
    counted = int(shard.payload(outbox)[0])
    if len(payload) > counted + 8 * len(leaves):
        return (
            f"a message should travel in the bytes that payload counts, {counted}, and at most 8 "
            f"more for each leaf; it takes {len(payload)}."
        )
    again = manifest.unpack(payload)
    for name, sent in leaves.items():
        same = name in again and again[name].dtype == sent.dtype
        if not same or not np.array_equal(again[name], sent):
            return (
                "a message should be the same after it has been packed and unpacked; its leaf "
                f"{name!r} is another."
            )
    return None


def several_shards(case: Case, tolerance: float = 1e-12) -> str | None:
    """Law 12: three rounds in one place, in two, and with every client alone."""
    whole = in_parts(case, [list(range(CLIENTS))])
    for parts in ([[0, 1, 2], [3, 4, 5]], [[client] for client in range(CLIENTS)]):
        apart = Difference.between(whole, in_parts(case, parts))
        if apart.size > tolerance:
            return (
                f"clients in {len(parts)} places should reach the states they reach in one; after "
                f"three rounds field {apart}. A method remembers things in its state and nowhere "
                "else."
            )
    return None


def in_parts(case: Case, parts: list[list[int]]) -> dict[str, Tensor]:
    """The fields of all clients' states after three rounds on shards of these clients."""
    shards = [case.shard(part) for part in parts]
    exchange = Exchange(MatrixProduct(case.method.delay))
    for t in range(3):
        graph = case.topology(t)
        for part, shard in zip(parts, shards, strict=True):
            shard.train(t, graph.active[part], active_fraction=float(graph.active.mean()))
        outboxes = [shard.outbox() for shard in shards]
        joined = {name: torch.cat([box[name] for box in outboxes]) for name in outboxes[0]}
        exchange.push(t, graph, joined)
        mixed = exchange.collect(t)
        for part, shard in zip(parts, shards, strict=True):
            local = {name: leaf[part] for name, leaf in mixed.items()}
            shard.merge(local, find_offline(graph)[part])
    every: list[dict[str, Any]] = [fields(shard) for shard in shards]
    return {name: torch.cat([part[name] for part in every]) for name in every[0]}
