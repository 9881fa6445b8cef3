"""Members that join a run under way, and members that leave it for good.

A round's graph is drawn for the members of that round. All other clients keep their state: they
neither send nor receive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.seeds import stream
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology, build_graph
from quiverfl.types import Flags, Floats, Integers

Changes = tuple[tuple[int, int], ...]
"""Pairs of a round and the number of members that change in it."""


@dataclass(frozen=True)
class Membership:
    """The members of each round.

    The last of the clients join, in the order of their numbers, each in its round with the mass
    `grant`. Members that leave are drawn among those of the round before; none comes back.
    """

    clients: int
    joins: Changes = ()
    leaves: Changes = ()
    grant: float = 1.0
    seed: int = 0
    _present: dict[int, Flags] = field(
        init=False, repr=False, compare=False, hash=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for name in ("joins", "leaves"):
            object.__setattr__(self, name, check_changes(name, getattr(self, name)))
        if not 0 < self.grant <= 1:
            raise QuiverError(
                f"join_mass = {self.grant!r}: a member joins with a mass above 0, at most 1."
            )
        if self.founders < 1:
            raise QuiverError(
                f"joins: {self.clients - self.founders} of {self.clients} clients join later, so "
                "nobody begins the run: give more clients."
            )
        members = self.founders
        for since in self.rounds:
            members -= dict(self.leaves).get(since, 0)
            if members < 1:
                raise QuiverError(f"leaves: in round {since} nobody would be left.")
            members += dict(self.joins).get(since, 0)

    @property
    def founders(self) -> int:
        """Number of clients that begin the run: the first ones."""
        return self.clients - sum(count for _, count in self.joins)

    @cached_property
    def rounds(self) -> list[int]:
        """The rounds in which members join or leave."""
        return sorted({since for since, _ in (*self.joins, *self.leaves)})

    def find_present(self, round: int) -> Flags:
        """Flags of the members in this round."""
        since = max((change for change in self.rounds if change <= round), default=0)
        if since not in self._present:
            self._present[since] = self._draw_present(since)
        return self._present[since]

    def _draw_present(self, since: int) -> Flags:
        present = np.arange(self.clients) < self.founders
        joined = self.founders
        for change in self.rounds:
            if change > since:
                break
            going = dict(self.leaves).get(change, 0)
            drawn = stream(self.seed, "leaves", change).permutation(np.flatnonzero(present))
            present[drawn[:going]] = False
            coming = dict(self.joins).get(change, 0)
            present[joined : joined + coming] = True
            joined += coming
        return present

    def find_joining(self, round: int) -> Integers:
        """Clients that become members in this round."""
        if not round:
            return np.array([], dtype=np.int64)
        return np.flatnonzero(self.find_present(round) & ~self.find_present(round - 1))

    def find_leaving(self, round: int) -> Integers:
        """Clients whose last round this is."""
        return np.flatnonzero(self.find_present(round) & ~self.find_present(round + 1))

    def choose_sponsors(self, round: int) -> Integers:
        """Choose a staying member for each newcomer, which starts from that member's model."""
        staying = np.flatnonzero(self.find_present(round) & self.find_present(max(0, round - 1)))
        drawn = stream(self.seed, "sponsors", round)
        return drawn.choice(staying, len(self.find_joining(round)))


def check_changes(name: str, changes: Sequence[Sequence[int]]) -> Changes:
    """Refuse what are no pairs of a round and a number of members."""
    pairs = []
    for change in changes:
        whole = all(isinstance(value, int) and not isinstance(value, bool) for value in change)
        if len(change) != 2 or not whole or min(change) < 1:
            raise QuiverError(
                f"{name} has {list(change)!r}: each entry is a round from 1 on and a number of "
                "members, such as [10, 3]."
            )
        pairs.append((int(change[0]), int(change[1])))
    rounds = [since for since, _ in pairs]
    if len(set(rounds)) < len(rounds):
        raise QuiverError(f"{name} names round {max(rounds, key=rounds.count)} twice.")
    return tuple(sorted(pairs))


def with_members(
    make: Callable[[int], Topology], membership: Membership, gives_mass: bool = True
) -> Topology:
    """The topology of a run whose members change; `make` gives it for a number of clients.

    A leaving member gives all its mass to the receivers of its last round. Without `gives_mass`,
    for methods that average models and carry none, it is only gone afterwards.
    """
    first = make(membership.founders)
    if first.reports is not None:
        raise QuiverError(
            f"members cannot join or leave on {first.name}, on which clients choose by what others "
            "report: choose another topology."
        )
    if first(0).hub:
        raise QuiverError(
            f"members cannot join or leave on {first.name}, where a server chooses who takes part "
            "in a round: choose a topology without a server."
        )
    topologies = {membership.founders: first}
    for since in membership.rounds:
        members = int(membership.find_present(since).sum())
        topologies[members] = make(members)  # refuses a number that it has no graph for
    options = {**first.options, "joins": membership.joins, "leaves": membership.leaves}
    draw = partial(_draw_members, topologies, membership, gives_mass)
    return Topology(first.name, membership.clients, draw, options, membership=membership)


def _draw_members(
    topologies: Mapping[int, Topology], membership: Membership, gives_mass: bool, round: int
) -> Graph:
    """The graph of a round's members among all clients."""
    present = membership.find_present(round)
    ids, others = np.flatnonzero(present), np.flatnonzero(~present)
    graph = topologies[len(ids)](round)
    links = graph.sparse.tocoo()
    receivers, senders, weights = ids[links.row], ids[links.col], links.data
    leaving = membership.find_leaving(round)
    if gives_mass and len(leaving) and graph.column_stochastic:
        given = _give_away(membership, round, receivers, senders, weights)
        receivers, senders, weights = given
    active = present.copy()
    active[ids] = graph.active
    return build_graph(
        membership.clients,
        np.concatenate([receivers, others]),
        np.concatenate([senders, others]),
        np.concatenate([weights, np.ones(len(others))]),
        active=active,
    )


Links = tuple[Integers, Integers, Floats]


def _give_away(
    membership: Membership, round: int, receivers: Integers, senders: Integers, weights: Floats
) -> Links:
    """Leaving members give all they have to members that stay, and receive nothing."""
    leaves = np.zeros(membership.clients, dtype=bool)
    leaves[membership.find_leaving(round)] = True
    # The weight meant for a leaving member stays with its sender.
    home = leaves[receivers] & ~leaves[senders]
    receivers = np.where(home, senders, receivers)
    used = ~leaves[receivers]
    receivers, senders, weights = receivers[used], senders[used], weights[used]
    sums = np.bincount(senders, weights, minlength=membership.clients)
    weights = np.where(leaves[senders], weights / np.maximum(sums[senders], 1e-300), weights)
    alone = np.flatnonzero(leaves & (sums == 0))  # it has no receiver that stays
    staying = np.flatnonzero(membership.find_present(round) & ~leaves)
    heirs = stream(membership.seed, "heirs", round).choice(staying, len(alone))
    return (
        np.concatenate([receivers, heirs]),
        np.concatenate([senders, alone]),
        np.concatenate([weights, np.ones(len(alone))]),
    )
