"""An exchange whose receivers judge what arrives: the round's graph with factors on its links."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.accounting import traffic
from quiverfl.engine.everyone import HERE, Everyone
from quiverfl.engine.exchange import Exchange
from quiverfl.methods.contract import Message
from quiverfl.seeds import hashed
from quiverfl.topologies.graph import Floats, Graph
from quiverfl.transforms.robustness import Robustness, Seen, across, judged

Integers = npt.NDArray[np.int64]

COLUMNS = 4096
"""Of all links' differences that are in memory at a time."""


class JudgedExchange:
    """Wraps the exchange that moves what was taken.

    With a sketch, random projections go ahead of the messages, and refused messages are not sent.
    """

    def __init__(
        self,
        inner: Exchange,
        rule: Robustness,
        seed: int,
        rounds: int,
        mass: str | None,
        everyone: Everyone = HERE,
    ) -> None:
        self._inner, self._rule, self._seed = inner, rule, seed
        self._rounds, self._mass, self._everyone = rounds, mass, everyone
        self._carried: Graph | None = None

    def senders(self, graph: Graph) -> None:
        """Everybody's: each compares with its own."""

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        return self._inner.weigh(outbox, payload)

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        receivers, senders = across(graph)
        squares = np.sqrt(self._squares(outbox, graph))
        distances, norms = squares[: len(receivers)], squares[len(receivers) :]
        seen = Seen(
            receivers,
            distances,
            norms[receivers],
            norms[senders],
            round / max(1, self._rounds),
        )
        factors = np.where(np.isfinite(distances), self._rule.factors(seen), 0.0)
        self._carried = judged(graph, factors, self._mass is not None)
        self._inner.push(round, self._carried, _finite(outbox))

    def _squares(self, outbox: Message, graph: Graph) -> Floats:
        """‖z_j - z_i‖² of every link, then ‖z_i‖² of every client; of sketches if they go ahead."""
        mass = None if self._mass is None else outbox[self._mass]
        masses = None if mass is None else self._everyone.rows(mass)
        receivers, senders = (torch.from_numpy(at) for at in across(graph))

        def squares(z: Tensor) -> Tensor:
            parts = (z[senders] - z[receivers], z)
            return torch.cat([p.to(torch.float64).square().sum(dim=1) for p in parts]).cpu()

        def of_messages(columns: Tensor) -> Tensor:
            return squares(_models(columns, masses))

        size = self._rule.sketch
        total = torch.zeros(len(receivers) + graph.clients, dtype=torch.float64)
        for name, leaf in outbox.items():
            flat = leaf.reshape(len(leaf), math.prod(leaf.shape[1:]))
            if name == self._mass:
                continue
            if size is None:
                total = self._everyone.summed(flat, COLUMNS, of_messages, total)
                continue
            sketch = sketched(_models(flat, mass), size, self._seed, name)
            total = HERE.summed(self._everyone.rows(sketch), COLUMNS, squares, total)
        found: Floats = total.numpy()
        return found

    def collect(self, round: int) -> Message:
        return self._inner.collect(round)

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        """Models travel on all links, or with a sketch on those that take something."""
        size = self._rule.sketch
        if size is None or self._carried is None:
            return self._inner.traffic(graph, payload)
        parts = (
            traffic(self._carried, payload),
            traffic(graph, np.where(payload > 0, 4 * size, 0)),
        )
        return {name: _sum(parts[0][name], parts[1][name]) for name in parts[0]}

    def in_flight(self) -> dict[str, Tensor]:
        return self._inner.in_flight()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._inner.restore(tensors)


def sketched(rows: Tensor, size: int, seed: int, name: str) -> Tensor:
    """A count sketch, [clients, size]: every number with a random sign in a random place.

    Distances of sketches are those of the rows on average; the same seed sketches alike.
    """
    bits = hashed(seed, f"sketch {name}", np.arange(rows.shape[1]))
    places = torch.from_numpy((bits >> np.uint64(1)).astype(np.int64) % size)
    signs = torch.from_numpy((bits & np.uint64(1)).astype(np.float64) * 2 - 1)
    result = rows.new_zeros(len(rows), size)
    return result.index_add_(1, places.to(rows.device), rows * signs.to(rows))


def _models(rows: Tensor, mass: Tensor | None) -> Tensor:
    return rows if mass is None else rows / mass.to(rows.dtype).unsqueeze(1)


def _finite(outbox: Message) -> Message:
    """What is not finite has been refused on every link; a weight of 0 would not make it 0."""
    return {
        name: torch.nan_to_num(leaf, nan=0.0, posinf=0.0, neginf=0.0)
        if not bool(torch.isfinite(leaf).all())
        else leaf
        for name, leaf in outbox.items()
    }


def _sum(first: Any, second: Any) -> Any:
    if isinstance(first, list):
        return [a + b for a, b in zip(first, second, strict=True)]
    return first + second
