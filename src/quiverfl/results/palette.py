"""One name, one colour and one marker per method, the same in every table and figure.

The colours are told apart with the common kinds of colour blindness (they are Okabe and Ito's and
some of Tol's); where many methods meet, the marker tells the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    color: str
    marker: str


_KNOWN = {
    "local": ("Local", Style("#6E6E6E", "o")),
    "fedavg": ("FedAvg", Style("#0072B2", "s")),
    "fedper": ("FedPer", Style("#56B4E9", "D")),
    "fedrep": ("FedRep", Style("#009E73", "^")),
    "fedbabu": ("FedBABU", Style("#E69F00", "v")),
    "ditto": ("Ditto", Style("#CC79A7", "P")),
    "dfedavgm": ("DFedAvgM", Style("#332288", "X")),
    "dfedavgmp": ("DFedAvgM-P", Style("#882255", "<")),
    "osgp": ("OSGP", Style("#117733", ">")),
    "dispfl": ("Dis-PFL", Style("#8C8C2E", "h")),
    "dfedpgp": ("DFedPGP", Style("#D55E00", "o")),
}
ORDER = tuple(_KNOWN)


GLYPHS = {
    "o": "●",
    "s": "■",
    "D": "◆",
    "^": "▲",
    "v": "▼",
    "P": "✚",
    "X": "✖",
    "<": "◀",
    ">": "▶",
    "h": "⬢",
}
"""The markers as letters, for legends in text."""


def plain(method: str) -> str:
    """`dis-pfl`, `Dis_PFL` and `dispfl` are one method."""
    return "".join(letter for letter in method.lower() if letter.isalnum())


def display(method: str) -> str:
    """The method's name as its authors write it, where we know them."""
    known = _KNOWN.get(plain(method))
    return method.rpartition(":")[2] if known is None else known[0]


def rank(method: str) -> int:
    """The order of the paper's tables; unknown methods follow."""
    return ORDER.index(plain(method)) if plain(method) in ORDER else len(ORDER)


def styles(methods: Sequence[str]) -> list[Style]:
    """A style for each; a method that comes a second time takes a colour nobody has."""
    taken: list[Style | None] = []
    for position, method in enumerate(methods):
        first = plain(method) in _KNOWN and plain(method) not in map(plain, methods[:position])
        taken.append(_KNOWN[plain(method)][1] if first else None)
    free = [style for _, style in reversed(_KNOWN.values()) if style not in taken]
    spare = free or [style for _, style in _KNOWN.values()]
    given = iter(range(len(methods)))
    return [style or spare[next(given) % len(spare)] for style in taken]
