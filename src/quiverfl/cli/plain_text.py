"""Terminals and pipes that cannot show every letter get the nearest ASCII instead of an error."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

PLAIN = {
    "…": "...",
    "±": "+-",
    "–": "-",
    "—": "-",
    "−": "-",
    "→": "->",
    "←": "<-",
    "≤": "<=",
    "≥": ">=",
    "×": "x",
    "·": "*",
    "‖": "||",
    "√": "sqrt",
    "∞": "inf",
    "✓": "yes",
    "’": "'",
    "“": '"',
    "”": '"',
    "μ": "mu",
    "δ": "delta",
    "Δ": "Delta",
    "σ": "sigma",
    "Σ": "Sum",
    "η": "eta",
    "τ": "tau",
    "λ": "lambda",
    "χ": "chi",
    "κ": "kappa",
    "θ": "theta",
    "∇": "grad",
    "░": ".",
    "▒": ":",
    "▓": "+",
    "█": "#",
}
NAME = "quiver-plain"


def allow_any_encoding() -> None:
    """For standard output and error, unless somebody chose another way for what they lack."""
    codecs.register_error(NAME, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "backslashreplace"):
            stream.reconfigure(errors=NAME)


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter) or _nearest(letter) for letter in letters), error.end


def _nearest(letter: str) -> str:
    """Without its accent, or a question mark."""
    parts = unicodedata.normalize("NFKD", letter)
    return "".join(part for part in parts if part.isascii()) or "?"
