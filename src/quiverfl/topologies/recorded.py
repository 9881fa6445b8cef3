"""Graphs as a run writes them down, where they depend on how it went, and whether they held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quiverfl.errors import QuiverError
from quiverfl.topologies.analysis import connected_by, smallest_window
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import from_entries

WATCHED = 10
"""Rounds that should be strongly connected together, unless somebody says otherwise."""
FAMOUS = 3
"""Windows that are named one by one."""


def as_text(graph: Graph) -> str:
    """Whom each client sends to: "1 4;0 2;…"; weights and who trains are left out."""
    links = graph.sparse.tocoo()
    across = (links.row != links.col) & (links.data != 0)
    receivers: list[list[str]] = [[] for _ in range(graph.clients)]
    for sender, receiver in sorted(zip(links.col[across], links.row[across], strict=True)):
        receivers[sender].append(str(receiver))
    return ";".join(map(" ".join, receivers))


def from_text(text: str) -> Graph:
    """The links of `as_text`, each client's mass split evenly over itself and its receivers."""
    try:
        chosen = [[int(name) for name in names.split()] for names in text.split(";")]
        counts = np.array([1 + len(names) for names in chosen])
        everyone = np.arange(len(chosen))
        receivers = np.concatenate([[me, *names] for me, names in enumerate(chosen)])
        senders = np.repeat(everyone, counts)
        return from_entries(len(chosen), receivers, senders, 1 / counts[senders])
    except ValueError:
        raise QuiverError(
            f"{text[:40]!r} are no links of a graph: the record is damaged."
        ) from None


@dataclass(frozen=True)
class Watch:
    """Whether the unions of consecutive graphs stayed strongly connected."""

    rounds: int
    watched: int
    """How many consecutive rounds were looked at together."""
    window: int | None
    """B: every B consecutive graphs together are strongly connected; None: not even all are."""
    apart: tuple[int, ...]
    """The first rounds, from 0, of the watched windows that fall apart."""

    def words(self) -> str:
        if self.window is None:
            return f"falls apart: all {self.rounds} rounds together are not strongly connected."
        if not self.apart:
            of = "every round" if self.window == 1 else f"any {self.window} consecutive rounds"
            return f"{of} strongly connected (B = {self.window}) in {self.rounds} rounds."
        named = ", ".join(f"{t + 1}–{t + self.watched}" for t in self.apart[:FAMOUS])
        more = len(self.apart) - FAMOUS
        return (
            f"falls apart: of {self.rounds - self.watched + 1} windows of {self.watched} rounds "
            f"{len(self.apart)} are not strongly connected (rounds {named}"
            f"{f' and {more} more' if more > 0 else ''}); "
            f"any {self.window} consecutive rounds are (B = {self.window})."
        )


def watch(graphs: Sequence[Graph], watched: int = WATCHED) -> Watch:
    """Look at every window of so many rounds, fewer if there are fewer."""
    watched = min(watched, len(graphs))
    ends = connected_by(graphs)
    starts = range(len(graphs) - watched + 1)
    last = [len(graphs) if end is None else end for end in ends]
    apart = tuple(t for t in starts if last[t] >= t + watched)
    return Watch(len(graphs), watched, smallest_window(ends), apart)
