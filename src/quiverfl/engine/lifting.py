"""A method's functions for stacked clients; errors in them become a sentence."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.task import Point
from quiverfl.trees import leaves, mapped

LIBRARIES = (str(Path(__file__).parent), str(Path(inspect.getfile(torch)).parent))
"""Where lines are not the author's: the engine and torch."""
RULES = (
    "A method's functions are written for one client: its vectors have one axis, and they may use "
    "tensor operations only, no if on a value, no .item(), no random numbers, nothing in place."
)


def lift(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for all clients of a group at once."""
    lifted = torch.vmap(function)

    def call(*stacked: Any) -> Any:
        try:
            changes_nothing(function, lifted, stacked)
            return lifted(*stacked)
        except (QuiverError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever an author's function raises is theirs to see
            raise failed(function, error) from error

    return call


_TRIED: WeakSet[Any] = WeakSet()
"""Functions that were seen to leave their arguments as they are."""


def changes_nothing(
    function: Callable[..., Any], lifted: Callable[..., Any], stacked: tuple[Any, ...]
) -> None:
    """Refuse a function that changes what it is given: a state, a model or a message of a client.

    Tried once for every function, on a copy of one client's.
    """
    known = getattr(function, "__func__", function)
    if known in _TRIED:
        return
    with torch.no_grad():
        one = mapped(lambda leaf: leaf[:1].detach().clone(), stacked)
        before = [leaf._version for _, leaf in leaves(one)]
        lifted(*one)
        changed = [leaf._version for _, leaf in leaves(one)]
    for name, then, now in zip(_names(one), before, changed, strict=True):
        if now != then:
            raise QuiverError(
                f"{_name(function)} changes {name} in place. It belongs to the engine, and other "
                "steps would see the change: return new tensors, a + b in place of a.add_(b)."
            )
    with contextlib.suppress(TypeError):  # objects without weak references are tried again
        _TRIED.add(known)


def _names(arguments: Iterable[Any]) -> Iterator[str]:
    """Every tensor of the arguments, as a sentence calls it; in the order of `leaves`."""
    for argument in arguments:
        kind, fields = type(argument).__name__, getattr(argument, "_fields", ())
        for path, _ in leaves(argument):
            first = path.partition(".")[0]
            part = fields[int(first)] if fields else first
            yield f"{part!r} of the {kind} it is given" if part else "a tensor that it is given"


def lift_point(function: Callable[..., Any]) -> Callable[..., Point]:
    """The same for a function that returns a model."""
    lifted = lift(function)

    def call(*stacked: Any) -> Point:
        point = lifted(*stacked)
        if not isinstance(point, Point):
            raise QuiverError(
                f"{_name(function)} returned a {type(point).__name__}; it must return a model, "
                "Point(shared, personal)."
            )
        return point

    return call


def failed(function: Callable[..., Any], error: BaseException) -> QuiverError:
    """What went wrong, where in the author's file, and what a method's function may do."""
    first = str(error).splitlines()[0] if str(error) else ""
    return QuiverError(
        f"{_name(function)} failed{_place(error)}: {type(error).__name__}: {first.rstrip('.')}. "
        f"{RULES}"
    )


def _place(error: BaseException) -> str:
    """The innermost line of the author's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(LIBRARIES):
            return f" in {Path(frame.filename).name}, line {frame.lineno}"
    return ""


def same_kind(function: Callable[..., Any], new: Any, old: Any) -> Any:
    """The new state, if it is like the old one in type, fields and shapes."""
    name = _name(function)
    if type(new) is not type(old):
        raise QuiverError(
            f"{name} returned a {type(new).__name__}; it must return the state, a "
            f"{type(old).__name__}."
        )
    for field, one, other in zip(old._fields, new, old, strict=True):
        if not isinstance(one, Tensor) or one.shape != other.shape:
            shape = tuple(one.shape[1:]) if isinstance(one, Tensor) else type(one).__name__
            raise QuiverError(
                f"{name} made the state's field {field!r} {shape}; it must stay "
                f"{tuple(other.shape[1:])}."
            )
    return new


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
