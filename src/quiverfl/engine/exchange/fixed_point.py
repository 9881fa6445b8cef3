"""The peers' arithmetic: one client's part of the sum that a matrix product computes for all.

On a graph whose columns sum to 1 a message is split into *shares*. Mass is counted in integer units
and every share is rounded before it is sent. A client adds its own share, then received ones in
client order. A method without a mass is given one: its message is sent times μ, and the sum is
divided by the μ that arrived, which is 1 on a doubly stochastic graph as long as nothing is late.
On a graph whose rows alone sum to 1, clients send *copies* and receivers weigh them: no mass moves,
and where a copy is missing the weights of the rest are scaled up to 1.

Pure functions, without torch. Real peers and `run.arithmetic = "peers"` call the same ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

import numpy as np

from quiverfl.topologies.graph import Graph
from quiverfl.types import AnyArray

Leaves: TypeAlias = dict[str, AnyArray]
Who = TypeVar("Who", bound=Hashable)

UNIT = 2**48
"""μ = 1."""


def receiver_weights(graph: Graph, client: int) -> dict[int, float]:
    """The receivers of a client and their weights, itself included, in client order."""
    return _read_weights(graph.sparse.tocsc(), client)


def sender_weights(graph: Graph, client: int) -> dict[int, float]:
    """The senders to a client and their weights, itself included, in client order."""
    return _read_weights(graph.sparse.tocsr(), client)


def _read_weights(matrix: Any, client: int) -> dict[int, float]:
    part = slice(matrix.indptr[client], matrix.indptr[client + 1])
    pairs = sorted(zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True))
    return {other: weight for other, weight in pairs if weight > 0}


def integer_weights(weights: Mapping[Who, float]) -> dict[Who, int]:
    """Mixing weights as integers: 1 each where they are equal, else multiples of 2^-48."""
    if len(set(weights.values())) <= 1:
        return dict.fromkeys(weights, 1)
    return {who: to_units(weight) for who, weight in weights.items()}


def to_units(weight: float) -> int:
    """A weight or a mass as a multiple of 2^-48."""
    return int(Fraction(weight) * UNIT)


def divide_units(units: int, parts: Mapping[Who, int], home: int) -> dict[Who, int]:
    """Integer shares of the mass. The remainder stays with the sender.

    With equal parts for k receivers and oneself, each is units // (k + 1). With `home` = 0, as when
    a peer leaves, nothing stays: the first receiver gets the remainder as well.
    """
    total = sum(parts.values()) + home
    shares = {receiver: units * part // total for receiver, part in parts.items()}
    if home == 0:
        shares[next(iter(parts))] += units - sum(shares.values())
    return shares


def split_mass(units: int, parts: Mapping[Who, int], home: int) -> tuple[dict[Who, int], int]:
    """(the units of each share that has any, the denominator of the shares' numbers)."""
    shares = divide_units(units, parts, home) if parts else {}
    shares = {receiver: count for receiver, count in shares.items() if count}
    return shares, home + sum(parts[receiver] for receiver in shares) if shares else 1


def scale_message(message: Mapping[str, AnyArray], numerator: int, denominator: int) -> Leaves:
    """A share of a message, in the message's own type."""
    return take_part(message, numerator / denominator)


def take_part(message: Mapping[str, AnyArray], part: float) -> Leaves:
    """This part of a message."""
    return {
        name: np.asarray(np.multiply(leaf, leaf.dtype.type(part))) for name, leaf in message.items()
    }


def add_shares(own: Mapping[str, AnyArray], shares: Sequence[Mapping[str, AnyArray]]) -> Leaves:
    """The own share plus the received ones, in the given order."""
    result = {name: np.array(leaf) for name, leaf in own.items()}
    for share in shares:
        for name, leaf in result.items():
            np.add(leaf, share[name], out=leaf)
    return result


def keep_remainder(
    message: Mapping[str, AnyArray], known: Mapping[str, AnyArray], numerator: int, denominator: int
) -> Leaves:
    """The part that a sender of coded shares keeps: u - Q(u) + w · Q(u)."""
    return add_shares(unsent_part(message, known), [scale_message(known, numerator, denominator)])


def unsent_part(message: Mapping[str, AnyArray], known: Mapping[str, AnyArray]) -> Leaves:
    """The part of a message that its code leaves out: u - Q(u)."""
    return {name: np.asarray(leaf - known[name]) for name, leaf in message.items()}


def average_copies(
    own: Mapping[str, AnyArray], weight: int, copies: Sequence[tuple[Mapping[str, AnyArray], int]]
) -> Leaves:
    """The weighted mean of one's own message and the copies, in the given order."""
    whole = weight + sum(other for _, other in copies)
    if not whole:
        return {name: np.array(leaf) for name, leaf in own.items()}
    return add_shares(
        scale_message(own, weight, whole),
        [scale_message(copy, other, whole) for copy, other in copies],
    )


def bias_message(message: Mapping[str, AnyArray], mass: float) -> Leaves:
    """u = μ · z, for a method that carries no mass itself."""
    return {name: np.asarray(leaf * leaf.dtype.type(mass)) for name, leaf in message.items()}


def debias_message(message: Mapping[str, AnyArray], mass: float) -> Leaves:
    """z = u / μ."""
    return {name: np.asarray(leaf / leaf.dtype.type(mass)) for name, leaf in message.items()}
