"""What leaves a client is not always what its method says: it is forged, or blurred for privacy.

Both start from what the client had when the round began, which is what it received last: a function
of messages that others have seen. Only those who send are altered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.exchange import Exchange
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import uploads
from quiverfl.transforms.adversary import Adversary
from quiverfl.transforms.noise import Noise

Integers = npt.NDArray[np.int64]
Alter = Callable[[Message, Message, str | None, Noise], Message]


class AlteredExchange:
    """Wraps the exchange that moves what was altered; `ids` are the clients of the rows here."""

    def __init__(
        self,
        inner: Exchange,
        adversary: Adversary | None,
        attackers: Integers,
        seed: int,
        ids: Integers,
        mass: str | None,
        first: Message,
    ) -> None:
        """`first` is what clients would have sent before they trained at all."""
        self._inner, self._adversary, self._seed = inner, adversary, seed
        self._ids, self._mass = ids, mass
        self._attack: npt.NDArray[np.bool_] = np.isin(ids, attackers)
        self._before = {n: x.clone() for n, x in first.items() if n != mass}

    def senders(self, graph: Graph) -> None:
        """Everybody's: a client that does not send keeps what it has."""

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        return self._inner.weigh(outbox, payload)

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        sends = uploads(graph)[self._ids] > 0
        if self._adversary is not None:
            self._alter(outbox, sends & self._attack, round, "adversary", self._adversary.forged)
        self._inner.push(round, graph, outbox)

    def _alter(self, outbox: Message, chosen: Any, round: int, why: str, alter: Alter) -> None:
        rows = np.flatnonzero(chosen)
        if not len(rows):
            return
        index = torch.from_numpy(rows)
        noise = Noise(self._seed, why, round, self._ids[rows])
        sent = {name: leaf[index] for name, leaf in outbox.items()}
        before = {name: leaf[index] for name, leaf in self._before.items()}
        for name, leaf in alter(sent, before, self._mass, noise).items():
            outbox[name][index] = leaf

    def collect(self, round: int) -> Message:
        mixed = self._inner.collect(round)
        self._before = {n: x.clone() for n, x in mixed.items() if n != self._mass}
        return mixed

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        return self._inner.traffic(graph, payload)

    def in_flight(self) -> dict[str, Tensor]:
        kept = {f"before/{name}": leaf for name, leaf in self._before.items()}
        return {**self._inner.in_flight(), **kept}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        own = {name for name in tensors if name.startswith("before/")}
        self._before = {name.removeprefix("before/"): tensors[name] for name in own}
        self._inner.restore({n: x for n, x in tensors.items() if n not in own})
