"""Refusals shared by the generators: the option, its value, and what would work."""

from __future__ import annotations

import operator
from typing import SupportsFloat, SupportsIndex

from quiverfl.errors import QuiverError

MOST_CLIENTS = 1_000_000_000


def check_whole(
    topology: str, option: str, value: object, low: int, high: int | None, why: str
) -> int:
    """Return the value as an int in low … high, or raise an error with the reason."""
    try:
        if not isinstance(value, SupportsIndex):
            raise TypeError
        number = operator.index(value)
    except TypeError:  # also an array's, which has an index only if it holds one number
        raise QuiverError(f"{topology}: {option} = {value!r}: it must be a whole number.") from None
    if number < low or (high is not None and number > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise QuiverError(f"{topology}: {option} = {number}: {why}; give a number {limits}.")
    return number


def check_clients(topology: str, clients: object) -> int:
    count = check_whole(topology, "clients", clients, 1, None, "a graph needs somebody in it")
    if count > MOST_CLIENTS:
        raise QuiverError(
            f"{topology}: clients = {count:,}: no graph of more than {MOST_CLIENTS:,} fits into "
            "memory; give fewer."
        )
    return count


def check_neighbors(topology: str, neighbors: object, clients: int) -> int:
    """Neighbours beside oneself: 1 … clients - 1."""
    if clients == 1:
        raise QuiverError(
            f"{topology}: one client has no neighbours to draw; "
            "give more clients, or use the topology 'isolated'."
        )
    others = "one other" if clients == 2 else f"{clients - 1} others"
    why = f"each of {clients} clients has {others} to be its neighbours"
    return check_whole(topology, "neighbors", neighbors, 1, clients - 1, why)


def check_fraction(topology: str, option: str, value: float, zero: bool) -> float:
    """A number in [0, 1], or in (0, 1] where zero makes no sense."""
    if not isinstance(value, SupportsFloat) or not 0 <= float(value) <= 1 or not (value or zero):
        interval = "[0, 1]" if zero else "(0, 1]"
        raise QuiverError(f"{topology}: {option} = {value!r}: it must be in {interval}.")
    return float(value)
