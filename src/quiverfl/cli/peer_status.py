"""`quiver peer status` for people: plain words and numbers, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

FLAT = ("metrics", "counts")
"""Parts whose entries are lines of their own."""


def status_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of everything a peer says of itself."""
    for name, value in found.items():
        if name in FLAT:
            yield from status_rows(value)
        elif name.endswith("_seconds"):
            yield _words(name, "_seconds"), f"{value:.1f} s"
        elif name.endswith("_bytes"):
            yield _words(name, "_bytes"), f"{value / 1e6:,.1f} MB"
        else:
            yield _words(name), _value(value)


def _words(name: str, unit: str = "") -> str:
    return name.removesuffix(unit).replace("_", " ")


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_value(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
