"""How an object is shown: one line at a prompt, a small table in a notebook. Never its tensors."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping

_CELL = "padding:1px 12px 1px 0;text-align:left;border:0"


class Shown(ABC):
    """`facts` says what there is to say; both ways of showing it come from there."""

    def title(self) -> str:
        return type(self).__name__

    @abstractmethod
    def facts(self) -> Mapping[str, str]: ...

    def __repr__(self) -> str:
        words = ", ".join(f"{name} {text}" for name, text in self.facts().items())
        return f"<{self.title()}: {words}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td style="{_CELL};opacity:.7">{html.escape(name)}</td>'
            f'<td style="{_CELL}">{html.escape(text)}</td></tr>'
            for name, text in self.facts().items()
        )
        title = f'<tr><th colspan="2" style="{_CELL}">{html.escape(self.title())}</th></tr>'
        return f"<table>{title}{rows}</table>"


def thousands(number: int) -> str:
    return f"{number:,}"


def between(low: float, high: float) -> str:
    """`5` or `5 to 11`."""
    return (
        thousands(int(low)) if low == high else f"{thousands(int(low))} to {thousands(int(high))}"
    )


def shape(sides: tuple[int, ...]) -> str:
    return " × ".join(str(side) for side in sides) if sides else "one number"
