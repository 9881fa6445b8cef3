"""The peers' arithmetic: what one client computes of the sum that a matrix product is for all.

On a graph whose columns sum to 1 a message is split into *shares*. Mass is counted in whole units,
every share is rounded before it travels, and a client adds its own share and then the others' in
client order. A method without a mass of its own is given one: its message is sent times μ, and the
sum is divided by the μ that arrived, which is 1 on a doubly stochastic graph as long as nothing is
late. On a graph whose rows alone sum to 1 everybody sends *copies*, and the receiver weighs them:
no mass moves, and where one is missing the weights of the rest are scaled up to 1.

Pure functions, without torch. Real peers and `run.arithmetic = "peers"` call the same ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from quiverfl.topologies.graph import Graph

Array: TypeAlias = npt.NDArray[Any]
Leaves: TypeAlias = dict[str, Array]
Who = TypeVar("Who", bound=Hashable)

UNIT = 2**48
"""μ = 1."""


def column(graph: Graph, client: int) -> dict[int, float]:
    """Whom a client sends to and with which weight, itself included, in client order."""
    return _weights(graph.sparse.tocsc(), client)


def row(graph: Graph, client: int) -> dict[int, float]:
    """Whom a client receives from and with which weight, itself included, in client order."""
    return _weights(graph.sparse.tocsr(), client)


def _weights(matrix: Any, client: int) -> dict[int, float]:
    part = slice(matrix.indptr[client], matrix.indptr[client + 1])
    pairs = sorted(zip(matrix.indices[part].tolist(), matrix.data[part].tolist(), strict=True))
    return {other: weight for other, weight in pairs if weight > 0}


def as_parts(weights: Mapping[Who, float]) -> dict[Who, int]:
    """Mixing weights as whole numbers: 1 each where they are equal, else multiples of 2^-48."""
    if len(set(weights.values())) <= 1:
        return dict.fromkeys(weights, 1)
    return {who: in_units(weight) for who, weight in weights.items()}


def in_units(weight: float) -> int:
    """A weight or a mass as a multiple of 2^-48."""
    return int(Fraction(weight) * UNIT)


def portions(units: int, parts: Mapping[Who, int], home: int) -> dict[Who, int]:
    """Integer shares of the mass; what does not divide stays home.

    With equal parts, k receivers and oneself, this is units // (k + 1). With home = 0, which is how
    a peer leaves, nothing stays: the first receiver takes the remainder as well.
    """
    total = sum(parts.values()) + home
    shares = {receiver: units * part // total for receiver, part in parts.items()}
    if home == 0:
        shares[next(iter(parts))] += units - sum(shares.values())
    return shares


def split_mass(units: int, parts: Mapping[Who, int], home: int) -> tuple[dict[Who, int], int]:
    """(the units of each share that has any, the whole that its numbers are a part of)."""
    shares = portions(units, parts, home) if parts else {}
    shares = {receiver: count for receiver, count in shares.items() if count}
    return shares, home + sum(parts[receiver] for receiver in shares) if shares else 1


def scaled(message: Mapping[str, Array], numerator: int, denominator: int) -> Leaves:
    """A share of a message, in the message's own type."""
    return parted(message, numerator / denominator)


def parted(message: Mapping[str, Array], part: float) -> Leaves:
    """This part of a message."""
    return {
        name: np.asarray(np.multiply(leaf, leaf.dtype.type(part))) for name, leaf in message.items()
    }


def added(own: Mapping[str, Array], shares: Sequence[Mapping[str, Array]]) -> Leaves:
    """Own share plus the others', in the given order."""
    result = {name: np.array(leaf) for name, leaf in own.items()}
    for share in shares:
        for name, leaf in result.items():
            np.add(leaf, share[name], out=leaf)
    return result


def kept(
    message: Mapping[str, Array], known: Mapping[str, Array], numerator: int, denominator: int
) -> Leaves:
    """What stays of a message of which others get shares of Q(u) alone: u - Q(u) + w · Q(u)."""
    return added(unknown(message, known), [scaled(known, numerator, denominator)])


def unknown(message: Mapping[str, Array], known: Mapping[str, Array]) -> Leaves:
    """What others are not told of a message: u - Q(u)."""
    return {name: np.asarray(leaf - known[name]) for name, leaf in message.items()}


def averaged(
    own: Mapping[str, Array], weight: int, copies: Sequence[tuple[Mapping[str, Array], int]]
) -> Leaves:
    """The weighted mean of one's own message and the copies, in the given order."""
    whole = weight + sum(other for _, other in copies)
    if not whole:
        return {name: np.array(leaf) for name, leaf in own.items()}
    return added(scaled(own, weight, whole), [scaled(copy, other, whole) for copy, other in copies])


def biased(message: Mapping[str, Array], mass: float) -> Leaves:
    """u = μ · z, for a method that carries no mass itself."""
    return {name: np.asarray(leaf * leaf.dtype.type(mass)) for name, leaf in message.items()}


def debiased(message: Mapping[str, Array], mass: float) -> Leaves:
    """z = u / μ."""
    return {name: np.asarray(leaf / leaf.dtype.type(mass)) for name, leaf in message.items()}
