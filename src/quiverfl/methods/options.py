"""Options of methods and transforms: their types say which values are allowed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from quiverfl.errors import QuiverError, nearest
from quiverfl.methods.annotations import annotations_of


@dataclass(frozen=True)
class Bound:
    """Numbers from `low` to `high`; `words` say so."""

    words: str
    low: float
    high: float = math.inf
    open: bool = False  # without `low` itself
    whole: bool = False

    def admits(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.low < value <= self.high or (value == self.low and not self.open)


PLAIN: dict[Any, tuple[Any, str]] = {
    float: ((int, float), "a number"),
    int: (int, "a whole number"),
    str: (str, "a text"),
}
"""What options without a bound of their own take."""

Count: TypeAlias = Annotated[int, Bound("a whole number ≥ 0", 0, whole=True)]
Number: TypeAlias = Annotated[int, Bound("a whole number ≥ 1", 1, whole=True)]
Positive: TypeAlias = Annotated[float, Bound("a positive number", 0, open=True)]
NotNegative: TypeAlias = Annotated[float, Bound("a number, 0 or more", 0)]
UnitInterval: TypeAlias = Annotated[float, Bound("a number in [0, 1]", 0, 1)]
Fraction: TypeAlias = Annotated[float, Bound("a number in (0, 1]", 0, 1, open=True)]


def check_options(owner: Any, section: str = "method") -> None:
    """Refuse a value that its option's type does not allow; say which would be."""
    if not is_dataclass(owner):
        return
    hints = annotations_of(type(owner))
    for field in fields(owner):
        _check(f"{section}.{field.name}", getattr(owner, field.name), hints[field.name])


def options_of(method: Any) -> dict[str, Any]:
    """What a method was made with, by name; nothing if it is not a data class."""
    if is_dataclass(method) and not isinstance(method, type):
        return asdict(method)
    return {}


def _check(name: str, value: Any, hint: Any) -> None:
    if get_origin(hint) in (Union, UnionType):
        if value is None and type(None) in get_args(hint):
            return
        optional = next(kind for kind in get_args(hint) if kind is not type(None))
        return _check_bound(name, value, optional, ", or left out")
    if get_origin(hint) is Literal and value not in get_args(hint):
        known = nearest(str(value), [str(choice) for choice in get_args(hint)])
        raise QuiverError(f"{name} = {value!r}: {known}")
    if hint is bool and not isinstance(value, bool):
        raise QuiverError(f"{name} = {value!r}: it must be true or false.")
    if hint in PLAIN and not isinstance(value, PLAIN[hint][0]):
        raise QuiverError(f"{name} = {value!r}: it must be {PLAIN[hint][1]}.")
    _check_bound(name, value, hint, "")


def _check_bound(name: str, value: Any, hint: Any, otherwise: str) -> None:
    for bound in getattr(hint, "__metadata__", ()):
        if isinstance(bound, Bound) and not bound.admits(value):
            raise QuiverError(f"{name} = {value!r}: it must be {bound.words}{otherwise}.")
