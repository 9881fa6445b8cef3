"""A colour and a marker per method, the same in every figure and legend.

The colours are told apart with the common kinds of colour blindness (they are Okabe and Ito's and
some of Tol's). Nobody tells more than a dozen apart: beyond that a colour comes again with another
marker. On a dark page the darkest colours would vanish: each has a lighter counterpart there.
"""

from __future__ import annotations

import colorsys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    color: str
    marker: str


METHOD_STYLES = {
    "local": Style("#6E6E6E", "o"),
    "fedavg": Style("#0072B2", "s"),
    "fedper": Style("#56B4E9", "D"),
    "fedrep": Style("#009E73", "^"),
    "fedbabu": Style("#E69F00", "v"),
    "ditto": Style("#CC79A7", "P"),
    "dfedavgm": Style("#332288", "X"),
    "dfedavgmp": Style("#882255", "<"),
    "osgp": Style("#117733", ">"),
    "dispfl": Style("#8C8C2E", "h"),
    "dfedpgp": Style("#D55E00", "o"),
}
"""The methods of the paper look alike in all reports; others take what is free."""

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
    "*": "★",
    "p": "⬟",
}
"""The markers as letters, for legends in text."""

_COLORS = (*(style.color for style in reversed(METHOD_STYLES.values())), "#000000", "#661100")
_POOL = tuple(
    Style(color, tuple(GLYPHS)[(place + turn) % len(GLYPHS)])
    for turn in range(len(GLYPHS))
    for place, color in enumerate(_COLORS)
)


def normalize_method(method: str) -> str:
    """`dis-pfl`, `Dis_PFL` and `dispfl` are one method."""
    return "".join(letter for letter in method.lower() if letter.isalnum())


def assign_styles(methods: Sequence[str]) -> list[Style]:
    """A style for each, in this order: its own the first time, otherwise the one least in use.

    That is an unused colour, then a rarely used colour with a rarely used marker.
    """
    names = [normalize_method(method) for method in methods]
    first = [
        name in METHOD_STYLES and name not in names[:place] for place, name in enumerate(names)
    ]
    taken = Counter(METHOD_STYLES[name] for name, own in zip(names, first, strict=True) if own)
    given = []
    for name, own in zip(names, first, strict=True):
        given.append(METHOD_STYLES[name] if own else _least_used(taken))
        taken[given[-1]] += not own
    return given


def _least_used(taken: Counter[Style]) -> Style:
    colors: Counter[str] = Counter()
    markers: Counter[str] = Counter()
    for style, times in taken.items():
        colors[style.color] += times
        markers[style.marker] += times
    return min(_POOL, key=lambda s: (taken[s], colors[s.color], markers[s.marker]))


_STRUCTURE = {
    "#222222": "#ececee",
    "#444444": "#c3c5ca",
    "#7f7f7f": "#8b8e95",
    "#b5b5b5": "#5b5e65",
    "#ececec": "#2c2e33",
    "#ffffff": "#16171a",
}
"""What axes, grids and names are drawn with, and what that is on a dark page."""
_PAPER = ("#440154", "#3b528b", "#21908c", "#5dc863", "#c7a300")
"""Further colours of the paper's figures."""


def theme_color(color: str) -> str:
    """A colour as a page writes it: one that has a counterpart on dark follows the page."""
    known = color.lower()
    return f"var(--c{known[1:]})" if known in ON_DARK else color


def theme_css() -> str:
    """The style sheet's lines that give every themed colour its two values."""
    lines = (f"--c{light[1:]}: light-dark({light}, {dark});" for light, dark in ON_DARK.items())
    return f":root {{ {' '.join(lines)} }}\n"


def _lighten(color: str) -> str:
    """The same hue, light enough to be seen on nearly black; black becomes nearly white."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = 0.93 if light < 0.05 else max(light, 0.6)
    return "#" + "".join(
        f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, light, saturation)
    )


ON_DARK = _STRUCTURE | {
    color.lower(): _lighten(color) for color in dict.fromkeys((*_COLORS, *_PAPER))
}
