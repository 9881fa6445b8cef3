"""One process with the peers' arithmetic: sync peers compute the same, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.accounting import traffic
from quiverfl.engine.coded_exchange import coded_payload
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
    kept,
    row,
    scaled,
    split_mass,
    unknown,
)
from quiverfl.engine.splitting import Split, check_split
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.transforms.coding import Coding, Origin
from quiverfl.transforms.judging import factors_of, judged_weights
from quiverfl.transforms.robustness import Robustness

Integers = npt.NDArray[np.int64]


class ShareExchange:
    """Splits, codes, rounds, judges and adds as real peers do, client by client."""

    def __init__(
        self,
        mass: str | None,
        split: Split,
        rounds: int = 1,
        coding: Coding | None = None,
        rule: Robustness | None = None,
    ) -> None:
        self._mass, self._split = mass, split
        self._rounds, self._coding, self._rule = rounds, coding, rule
        self._units: list[int] = []
        """Of every client, where the method carries no mass itself."""
        self._mixed: Message = {}

    def senders(self, graph: Graph) -> Integers | None:
        return None

    def weigh(self, outbox: Message, payload: Integers) -> Integers:
        if self._coding is None:
            return payload
        return coded_payload(self._coding.compression, outbox, self._mass, payload)

    def traffic(self, graph: Graph, payload: Integers) -> dict[str, Any]:
        return traffic(graph, payload)

    def push(self, round: int, graph: Graph, outbox: Message) -> None:
        check_split(self._split, graph, round)
        sent = [_of(outbox, client, self._mass) for client in range(graph.clients)]
        masses = None if self._mass is None else outbox.get(self._mass)
        if self._split == "copies":
            known = self._known(sent, round)
            mixed = [self._weighed(graph, sent, known, i, round) for i in range(len(sent))]
            self._mixed = _stacked(mixed, outbox)
            if masses is not None and self._mass is not None:
                self._mixed[self._mass] = torch.ones_like(masses)
            return
        if masses is not None:
            units = [in_units(mass) for mass in masses.tolist()]
        else:
            units = self._units or [UNIT] * graph.clients
            sent = [biased(m, own / UNIT) for m, own in zip(sent, units, strict=True)]
        mixed, units = self._split_and_added(graph, sent, units, round)
        if masses is None:
            _check_mass(units, round)
            mixed = [debiased(m, own / UNIT) for m, own in zip(mixed, units, strict=True)]
            self._units = units
        self._mixed = _stacked(mixed, outbox)
        if masses is not None and self._mass is not None:
            self._mixed[self._mass] = torch.tensor(
                [own / UNIT for own in units], dtype=masses.dtype, device=masses.device
            )

    def _known(self, sent: list[Leaves], round: int) -> list[Leaves]:
        """What others are told of each message."""
        if self._coding is None:
            return sent
        return [self._coding.known(m, Origin(client, round)) for client, m in enumerate(sent)]

    def _split_and_added(
        self, graph: Graph, sent: list[Leaves], units: list[int], round: int
    ) -> tuple[list[Leaves], list[int]]:
        """What every client has after a round of shares, and its mass."""
        home: list[Leaves] = []
        left = list(units)
        arriving: list[list[_Share]] = [[] for _ in sent]
        for sender, (message, known) in enumerate(zip(sent, self._known(sent, round), strict=True)):
            parts = as_parts(column(graph, sender))
            own = parts.pop(sender, 0)
            shares, whole = split_mass(units[sender], parts, own)
            home.append(self._home(message, known, own, whole) if shares else message)
            made = {part: scaled(known, part, whole) for part in {parts[to] for to in shares}}
            for receiver, count in shares.items():
                left[sender] -= count
                arriving[receiver].append(_Share(sender, count, made[parts[receiver]]))
        returned: list[list[_Share]] = [[] for _ in sent]
        for receiver, here in enumerate(arriving):
            refused = self._refused((sent[receiver], units[receiver] / UNIT), here, round)
            for share in refused:
                returned[share.sender].append(share)
            arriving[receiver] = [share for share in here if share not in refused]
        come = [[*new, *back] for new, back in zip(arriving, returned, strict=True)]
        mixed = [
            added(own, [share.message for share in shares])
            for own, shares in zip(home, come, strict=True)
        ]
        masses = [
            own + sum(share.units for share in shares)
            for own, shares in zip(left, come, strict=True)
        ]
        return mixed, masses

    def _home(self, message: Leaves, known: Leaves, own: int, whole: int) -> Leaves:
        if self._coding is None:
            return scaled(message, own, whole)
        return kept(message, known, own, whole)

    def _refused(self, own: tuple[Leaves, float], shares: list[_Share], round: int) -> list[_Share]:
        """Which shares their receiver sends back."""
        if self._rule is None or not shares:
            return []
        others = [(share.message, share.units / UNIT) for share in shares]
        factors = factors_of(self._rule, own, others, round / max(1, self._rounds))
        return [share for share, factor in zip(shares, factors, strict=True) if not factor]

    def _weighed(
        self, graph: Graph, sent: list[Leaves], known: list[Leaves], client: int, round: int
    ) -> Leaves:
        """What a client makes of the copies it gets."""
        weights = {other: in_units(weight) for other, weight in row(graph, client).items()}
        own, copies = weights.pop(client, 0), [known[other] for other in weights]
        others = list(weights.values())
        if self._rule is not None:
            progress = round / max(1, self._rounds)
            theirs = [(copy, 1.0) for copy in copies]
            factors = factors_of(self._rule, (sent[client], 1.0), theirs, progress)
            own, others = judged_weights(own, others, factors)
        mean = averaged(known[client], own, list(zip(copies, others, strict=True)))
        if self._coding is None:
            return mean
        return added(unknown(sent[client], known[client]), [mean])

    def collect(self, round: int) -> Message:
        mixed, self._mixed = self._mixed, {}
        return mixed

    def in_flight(self) -> dict[str, Tensor]:
        """Nothing is late; but whose mass is not in its state has it here."""
        return {"units": torch.tensor(self._units, dtype=torch.float64)} if self._units else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._units = [int(count) for count in tensors.get("units", torch.zeros(0)).tolist()]


@dataclass(frozen=True, eq=False)
class _Share:
    """On its way."""

    sender: int
    units: int
    message: Leaves


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
