"""The fields of a method's state. Their types declare their shapes, which engine and peers read.

    class PushSumState(NamedTuple):
        u: Shared       # a vector like the shared parameters
        v: Personal     # a vector like the personal ones
        mu: Scalar      # one number

A field declared as a plain Tensor may have any shape, such as one prototype for every class. State
of a server, of which every client has the same copy, is declared as such: `Replicated[Shared]`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from quiverfl.options import resolve_annotations

Role: TypeAlias = Literal["shared", "personal", "scalar", "any"]

Shared: TypeAlias = Annotated[Tensor, "shared"]
Personal: TypeAlias = Annotated[Tensor, "personal"]
Scalar: TypeAlias = Annotated[Tensor, "scalar"]
Kind = TypeVar("Kind")
Replicated: TypeAlias = Annotated[Kind, "replicated"]


State: TypeAlias = tuple[Tensor, ...]
"""A NamedTuple of tensors, declared by each method."""


def field_roles(kind: type) -> dict[str, Role]:
    """The role of every field of a state, in their order."""
    return _roles(kind)


@cache
def _roles(kind: Any) -> dict[str, Role]:
    hints = resolve_annotations(kind)
    return {name: _role(hints[name]) for name in getattr(kind, "_fields", ())}


def replicated_fields(kind: type) -> tuple[str, ...]:
    """The fields that must be equal on all clients from the start."""
    return _find_replicated(kind)


@cache
def _find_replicated(kind: Any) -> tuple[str, ...]:
    marked = resolve_annotations(kind).items()
    return tuple(name for name, hint in marked if "replicated" in getattr(hint, "__metadata__", ()))


def select_fields(state: State, role: Role) -> dict[str, Tensor]:
    """The fields of one role, by name."""
    pairs = zip(field_roles(type(state)).items(), state, strict=True)
    return {name: leaf for (name, kind), leaf in pairs if kind == role}


def _role(hint: Any) -> Role:
    for mark in getattr(hint, "__metadata__", ()):
        if mark in ("shared", "personal", "scalar"):
            role: Role = mark
            return role
    return "any"


class Model(NamedTuple):
    """The state of methods that keep a model and nothing else."""

    u: Shared
    v: Personal
