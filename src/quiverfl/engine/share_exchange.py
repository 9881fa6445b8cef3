"""One process with the peers' arithmetic: sync peers compute the same, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.accounting import traffic
from quiverfl.engine.exchange import Exchange, MatrixExchange
from quiverfl.engine.settings import RunSettings
from quiverfl.engine.shares import (
    UNIT,
    Leaves,
    added,
    as_parts,
    averaged,
    biased,
    column,
    debiased,
    in_units,
    row,
    scaled,
    split_mass,
)
from quiverfl.engine.splitting import Split, check_split, splitting
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message, Method
from quiverfl.topologies.graph import Graph
from quiverfl.topologies.topology import Topology

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def exchange_for(method: Method, topology: Topology, settings: RunSettings) -> Exchange:
    """Who computes the sums of a run in one process, and how it rounds."""
    if settings.arithmetic == "matrix":
        return MatrixExchange(method.delay)
    return ShareExchange(method.mass, splitting(method, topology, settings.rounds))


class ShareExchange:
    """Splits, rounds and adds as real peers do, client by client."""

    def __init__(self, mass: str | None, split: Split) -> None:
        self._mass, self._split = mass, split
        self._units: list[int] = []
        """Of every client, where the method carries no mass itself."""
        self._mixed: Message = {}
        self._graph: Graph | None = None

    def senders(self, graph: Graph) -> Integers | None:
        return None

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        return payload

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        return traffic(graph, payload)

    def kept(self) -> Floats:
        assert self._graph is not None
        found: Floats = self._graph.sparse.diagonal()
        return found

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        self._graph = graph
        check_split(self._split, graph, round)
        sent = [_of(outbox, client, self._mass) for client in range(graph.clients)]
        masses = None if self._mass is None else outbox.get(self._mass)
        if self._split == "copies":
            self._mixed = _stacked([_weighed(graph, sent, i) for i in range(len(sent))], outbox)
            if masses is not None and self._mass is not None:
                self._mixed[self._mass] = torch.ones_like(masses)
            return
        if masses is not None:
            units = [in_units(mass) for mass in masses.tolist()]
        else:
            units = self._units or [UNIT] * graph.clients
            sent = [biased(m, own / UNIT) for m, own in zip(sent, units, strict=True)]
        mixed, units = _split_and_added(graph, sent, units)
        if masses is None:
            _check_mass(units, round)
            mixed = [debiased(m, own / UNIT) for m, own in zip(mixed, units, strict=True)]
            self._units = units
        self._mixed = _stacked(mixed, outbox)
        if masses is not None and self._mass is not None:
            self._mixed[self._mass] = torch.tensor(
                [own / UNIT for own in units], dtype=masses.dtype, device=masses.device
            )

    def collect(self, round: int) -> Message:
        mixed, self._mixed = self._mixed, {}
        return mixed

    def in_flight(self) -> dict[str, Tensor]:
        """Nothing is late; but whose mass is not in its state has it here."""
        return {"units": torch.tensor(self._units, dtype=torch.float64)} if self._units else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._units = [int(count) for count in tensors.get("units", torch.zeros(0)).tolist()]


def _split_and_added(
    graph: Graph, sent: list[Leaves], units: list[int]
) -> tuple[list[Leaves], list[int]]:
    """What every client has after a round of shares, and its mass."""
    home: list[Leaves] = []
    kept = list(units)
    arriving: list[list[Leaves]] = [[] for _ in sent]
    came = [0] * len(sent)
    for sender, message in enumerate(sent):
        parts = as_parts(column(graph, sender))
        own = parts.pop(sender, 0)
        shares, whole = split_mass(units[sender], parts, own)
        home.append(scaled(message, own, whole) if shares else message)
        made = {part: scaled(message, part, whole) for part in {parts[to] for to in shares}}
        for receiver, count in shares.items():
            kept[sender] -= count
            came[receiver] += count
            arriving[receiver].append(made[parts[receiver]])
    mixed = [added(own, others) for own, others in zip(home, arriving, strict=True)]
    return mixed, [own + more for own, more in zip(kept, came, strict=True)]


def _weighed(graph: Graph, sent: list[Leaves], client: int) -> Leaves:
    """What a client makes of the copies it gets."""
    weights = {other: in_units(weight) for other, weight in row(graph, client).items()}
    own = weights.pop(client, 0)
    return averaged(sent[client], own, [(sent[j], weight) for j, weight in weights.items()])


def _check_mass(units: list[int], round: int) -> None:
    if 0 in units:
        raise QuiverError(
            f"client {units.index(0)} keeps nothing and receives nothing in round {round}: give "
            "every client a weight of its own."
        )


def _of(outbox: Message, client: int, mass: str | None) -> Leaves:
    """One client's message without its mass."""
    return {name: _array(leaf[client]) for name, leaf in outbox.items() if name != mass}


def _array(leaf: Tensor) -> npt.NDArray[Any]:
    if leaf.dtype not in (torch.float32, torch.float64):
        raise QuiverError(
            f'arithmetic = "peers": peers send float32 or float64, and a message has {leaf.dtype}.'
        )
    found: npt.NDArray[Any] = leaf.detach().cpu().numpy()
    return found


def _stacked(messages: list[Leaves], like: Message) -> Message:
    return {
        name: torch.from_numpy(np.stack([message[name] for message in messages])).to(leaf.device)
        for name, leaf in like.items()
        if messages and name in messages[0]
    }
