"""HTML that is escaped unless it says that it is HTML."""

from __future__ import annotations

import html
import json
from typing import Any


class Markup(str):
    """Text that is HTML already."""


_VOID = {"meta", "br", "hr"}


def tag(name: str, /, *content: str, **attributes: str | int | None) -> Markup:
    """An element. Plain text in it is escaped; None attributes are left out.

    `class_` and `aria_label` are written for the attributes that Python cannot name.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*content)}</{name}>")


def join(*content: str) -> Markup:
    return Markup("".join(c if isinstance(c, Markup) else html.escape(c) for c in content))


def data(content: Any) -> Markup:
    """JSON for the page's script; nothing in it can end the element it stands in."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return tag("script", Markup(text), type="application/json")
