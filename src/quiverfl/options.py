"""Options of methods and transforms: their types say which values are allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import signature
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from quiverfl.errors import QuiverError, suggest


def resolve_annotations(kind: type) -> dict[str, Any]:
    """Field → type; a name that means nothing outside its function is refused."""
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise QuiverError(
            f"{kind.__name__}: the types of its fields cannot be read ({error}). Define the class "
            "at the top level of its file, or leave `from __future__ import annotations` out."
        ) from error


def python_number(value: Any) -> Any:
    """numpy's numbers as Python's, also in a list, tuple or dictionary; other values stay."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(python_number(part) for part in value)
    if isinstance(value, Mapping):
        return {key: python_number(part) for key, part in value.items()}
    return value


def convert_fields(owner: Any) -> None:
    """Turn numpy's numbers in a data class's fields into Python's, for its `__post_init__`."""
    for field in fields(owner):
        object.__setattr__(owner, field.name, python_number(getattr(owner, field.name)))


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
"""Values that options without a bound take."""

Count: TypeAlias = Annotated[int, Bound("a whole number ≥ 0", 0, whole=True)]
Number: TypeAlias = Annotated[int, Bound("a whole number ≥ 1", 1, whole=True)]
Positive: TypeAlias = Annotated[float, Bound("a positive number", 0, open=True)]
NotNegative: TypeAlias = Annotated[float, Bound("a number, 0 or more", 0)]
UnitInterval: TypeAlias = Annotated[float, Bound("a number in [0, 1]", 0, 1)]
Fraction: TypeAlias = Annotated[float, Bound("a number in (0, 1]", 0, 1, open=True)]


def check_options(owner: Any, section: str = "method") -> None:
    """Refuse a value that its option's type does not allow; say which would be.

    Numbers of numpy become Python's.
    """
    if not is_dataclass(owner):
        return
    convert_fields(owner)
    hints = resolve_annotations(type(owner))
    for field in fields(owner):
        _check(f"{section}.{field.name}", getattr(owner, field.name), hints[field.name])


def read_options(method: Any) -> dict[str, Any]:
    """A method's options by name; none if it is not a data class."""
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
        known = suggest(str(value), [str(choice) for choice in get_args(hint)])
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


Definition = TypeVar("Definition", bound=Callable[..., Any])


class _OldName:
    """Refuses an attribute that was renamed, of a class and of its objects."""

    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        raise AttributeError(self._sentence)


def refuse_old_names(**names: str) -> Callable[[Definition], Definition]:
    """Refuse keywords, and for a class attributes, that were renamed: old name → new name."""

    def decorate(owner: Definition) -> Definition:
        call: Any = owner.__init__ if isinstance(owner, type) else owner  # type: ignore[misc]

        parameters = signature(call).parameters
        renamed_parameters = {old for old, new in names.items() if new in parameters}

        @wraps(call)
        def call_with_new_names(*arguments: Any, **options: Any) -> Any:
            for old in options.keys() & names.keys() & renamed_parameters:
                raise QuiverError(
                    f"{owner.__name__}({old}=…): this is now called {names[old]}, so "
                    f"{owner.__name__}({names[old]}=…)."
                )
            return call(*arguments, **options)

        if not isinstance(owner, type):
            return cast(Definition, call_with_new_names)
        kind: Any = owner
        for old, new in names.items():
            setattr(kind, old, _OldName(f"{owner.__name__}.{old} is now called {new}"))
        if kind.__init__ is not object.__init__:  # a NamedTuple has none of its own
            kind.__init__ = call_with_new_names
        return owner

    return decorate
