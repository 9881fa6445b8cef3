"""The core of `run.arithmetic = "peers"`: sync peers compute the same, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.checks.peers import MessageSplit, check_message_split
from quiverfl.engine.exchange.compression import count_coded_bytes
from quiverfl.engine.exchange.fixed_point import (
    UNIT,
    Leaves,
    add_shares,
    average_copies,
    bias_message,
    debias_message,
    integer_weights,
    keep_remainder,
    receiver_weights,
    scale_message,
    sender_weights,
    split_mass,
    to_units,
    unsent_part,
)
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Message
from quiverfl.topologies.graph import Graph
from quiverfl.transforms.codec import MessageCodec, Origin
from quiverfl.transforms.robustness import Robustness, compute_factors, reweigh_copies
from quiverfl.types import Integers


class PeerArithmetic:
    """A core: splits, codes, rounds, compares and adds messages as real peers do, one by one."""

    def __init__(
        self,
        mass: str | None,
        split: MessageSplit,
        rounds: int = 1,
        codec: MessageCodec | None = None,
        rule: Robustness | None = None,
    ) -> None:
        self._mass, self._split = mass, split
        self._rounds, self._codec, self._rule = rounds, codec, rule
        self._units: list[int] = []
        """The mass of every client, where the method carries none itself."""

    def senders(self, graph: Graph) -> None:
        """All clients: each keeps its own message or a part of it."""

    def coded_sizes(self, outbox: Message, sizes: Integers) -> Integers:
        if self._codec is None:
            return sizes
        return count_coded_bytes(self._codec.compression, outbox, self._mass, sizes)

    def mix(self, round: int, graph: Graph, outbox: Message) -> Message:
        check_message_split(self._split, graph, round)
        messages = [_select_client(outbox, client, self._mass) for client in range(graph.clients)]
        masses = None if self._mass is None else outbox.get(self._mass)
        if self._split == "copies":
            transmitted = self._transmit(messages, round)
            averages = [
                self._average(graph, messages, transmitted, client, round)
                for client in range(len(messages))
            ]
            mixed = _stack_messages(averages, outbox)
            return mixed if masses is None else {**mixed, str(self._mass): torch.ones_like(masses)}
        if masses is not None:
            units = [to_units(mass) for mass in masses.tolist()]
        else:
            units = self._units or [UNIT] * graph.clients
            messages = [bias_message(m, n / UNIT) for m, n in zip(messages, units, strict=True)]
        sums, units = self._exchange_shares(graph, messages, units, round)
        if masses is None:
            _check_mass(units, round)
            sums = [debias_message(m, n / UNIT) for m, n in zip(sums, units, strict=True)]
            self._units = units
        mixed = _stack_messages(sums, outbox)
        if masses is not None and self._mass is not None:
            mixed[self._mass] = torch.tensor(
                [own / UNIT for own in units], dtype=masses.dtype, device=masses.device
            )
        return mixed

    def _transmit(self, messages: list[Leaves], round: int) -> list[Leaves]:
        """Each message as its receivers decode it."""
        if self._codec is None:
            return messages
        return [
            self._codec.transmit(message, Origin(client, round))
            for client, message in enumerate(messages)
        ]

    def _exchange_shares(
        self, graph: Graph, messages: list[Leaves], units: list[int], round: int
    ) -> tuple[list[Leaves], list[int]]:
        """Every client's message after a round of shares, and its mass."""
        own_parts: list[Leaves] = []
        own_units = list(units)
        arriving: list[list[_Share]] = [[] for _ in messages]
        transmitted = self._transmit(messages, round)
        for sender, (message, known) in enumerate(zip(messages, transmitted, strict=True)):
            weights = integer_weights(receiver_weights(graph, sender))
            own = weights.pop(sender, 0)
            shares, whole = split_mass(units[sender], weights, own)
            own_parts.append(self._keep_own(message, known, own, whole) if shares else message)
            scaled = {
                weight: scale_message(known, weight, whole)
                for weight in {weights[receiver] for receiver in shares}
            }
            for receiver, count in shares.items():
                own_units[sender] -= count
                arriving[receiver].append(_Share(sender, count, scaled[weights[receiver]]))
        returned: list[list[_Share]] = [[] for _ in messages]
        for receiver, shares_here in enumerate(arriving):
            own_message = messages[receiver], units[receiver] / UNIT
            refused = self._refuse_shares(own_message, shares_here, round)
            for share in refused:
                returned[share.sender].append(share)
            arriving[receiver] = [share for share in shares_here if share not in refused]
        added = [[*new, *back] for new, back in zip(arriving, returned, strict=True)]
        sums = [
            add_shares(own_part, [share.message for share in shares])
            for own_part, shares in zip(own_parts, added, strict=True)
        ]
        masses = [
            count + sum(share.units for share in shares)
            for count, shares in zip(own_units, added, strict=True)
        ]
        return sums, masses

    def _keep_own(self, message: Leaves, known: Leaves, own: int, whole: int) -> Leaves:
        if self._codec is None:
            return scale_message(message, own, whole)
        return keep_remainder(message, known, own, whole)

    def _refuse_shares(
        self, own: tuple[Leaves, float], shares: list[_Share], round: int
    ) -> list[_Share]:
        """The shares that their receiver sends back."""
        if self._rule is None or not shares:
            return []
        others = [(share.message, share.units / UNIT) for share in shares]
        factors = compute_factors(self._rule, own, others, round / max(1, self._rounds))
        return [share for share, factor in zip(shares, factors, strict=True) if not factor]

    def _average(
        self,
        graph: Graph,
        messages: list[Leaves],
        transmitted: list[Leaves],
        client: int,
        round: int,
    ) -> Leaves:
        """The mean of a client's own message and the copies that it gets."""
        weights = {
            other: to_units(weight) for other, weight in sender_weights(graph, client).items()
        }
        own, copies = weights.pop(client, 0), [transmitted[other] for other in weights]
        others = list(weights.values())
        if self._rule is not None:
            progress = round / max(1, self._rounds)
            received = [(copy, 1.0) for copy in copies]
            factors = compute_factors(self._rule, (messages[client], 1.0), received, progress)
            own, others = reweigh_copies(own, others, factors)
        mean = average_copies(transmitted[client], own, list(zip(copies, others, strict=True)))
        if self._codec is None:
            return mean
        return add_shares(unsent_part(messages[client], transmitted[client]), [mean])

    def tensors(self) -> dict[str, Tensor]:
        """Nothing is late, but mass that is not in a method's state is kept here."""
        return {"units": torch.tensor(self._units, dtype=torch.float64)} if self._units else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._units = [int(count) for count in tensors.get("units", torch.zeros(0)).tolist()]


@dataclass(frozen=True, eq=False)
class _Share:
    """A part of a message on its way to one receiver."""

    sender: int
    units: int
    message: Leaves


def _check_mass(units: list[int], round: int) -> None:
    if 0 in units:
        raise QuiverError(
            f"client {units.index(0)} keeps nothing and receives nothing in round {round}: give "
            "every client a weight of its own."
        )


def _select_client(outbox: Message, client: int, mass: str | None) -> Leaves:
    """One client's message without its mass."""
    return {name: _to_array(leaf[client]) for name, leaf in outbox.items() if name != mass}


def _to_array(leaf: Tensor) -> npt.NDArray[Any]:
    if leaf.dtype not in (torch.float32, torch.float64):
        raise QuiverError(
            f'arithmetic = "peers": peers send float32 or float64, and a message has {leaf.dtype}.'
        )
    array: npt.NDArray[Any] = leaf.detach().cpu().numpy()
    return array


def _stack_messages(messages: list[Leaves], like: Message) -> Message:
    return {
        name: torch.from_numpy(np.stack([message[name] for message in messages])).to(leaf.device)
        for name, leaf in like.items()
        if messages and name in messages[0]
    }
