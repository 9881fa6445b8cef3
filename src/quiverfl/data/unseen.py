"""Unseen clients: held out of the federation, and tested like clients that come later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from quiverfl.errors import QuiverError, suggest
from quiverfl.options import python_number
from quiverfl.seeds import stream
from quiverfl.types import Integers

if TYPE_CHECKING:
    from quiverfl.data.federated import FederatedData

Start: TypeAlias = Literal["random", "average", "nearest"]
Part: TypeAlias = Literal["personal", "whole"]
When: TypeAlias = Literal["last", "evaluated"]
Chosen: TypeAlias = int | Sequence[int | str]
"""A number of clients, or a list of client numbers or owners' names."""


@dataclass(frozen=True, eq=False)
class Unseen:
    """Clients held out of the federation, and how they are tested."""

    data: FederatedData
    start: Start = "random"
    """Source of each client's parameters: one participant drawn for it, the mean of all, or
    the participant whose model has the lowest loss on its training data."""
    epochs: int | None = None
    """Epochs it then fits; 5, or the method's own fine-tuning, unless given."""
    part: Part | None = None
    """The part it fits: by default the personal part, or the whole model if all of it is sent."""
    when: When = "last"
    """Tested after the last round alone, or after every evaluated one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", python_number(self.epochs))
        for key, kind in (("start", Start), ("part", Part), ("when", When)):
            value = getattr(self, key)
            if value not in get_args(kind) and not (key == "part" and value is None):
                known = suggest(str(value), get_args(kind))
                raise QuiverError(f"data.unseen_{key} = {value!r}: {known}")
        if self.epochs is not None and (type(self.epochs) is not int or self.epochs < 0):
            raise QuiverError(
                f"data.unseen_epochs = {self.epochs!r}: it must be a whole number, 0 or more."
            )
        if self.data.unseen is not None:
            raise QuiverError("clients were held out of this data before: hold all out at once.")
        for client, size in enumerate(self.data.train.sizes):
            if size == 0:
                raise QuiverError(
                    f"unseen client {self.name(client)} has no training data to fit anything on: "
                    "leave it out."
                )
        if not self.data.test.sizes.sum():
            raise QuiverError(
                f"none of the {self.data.clients} unseen clients has test data, so nothing could "
                "be said of them: hold others out."
            )

    def name(self, client: int) -> str:
        return self.data.names[client] if self.data.names else str(client)

    def record(self) -> dict[str, Any]:
        """The options of the test, as in [data] of a configuration."""
        said = {key: getattr(self, key) for key in ("start", "epochs", "part", "when")}
        return {f"unseen_{key}": value for key, value in said.items() if value is not None}


UNSEEN_OPTIONS = ("unseen_start", "unseen_epochs", "unseen_part", "unseen_when")


def choose_unseen(chosen: Chosen, clients: int, names: Sequence[str], seed: int) -> Integers:
    """The numbers of the clients to hold out, in ascending order; some must be left."""
    chosen = python_number(chosen)
    if isinstance(chosen, bool) or not isinstance(chosen, int | list | tuple):
        raise QuiverError(
            f"data.unseen = {chosen!r}: give how many clients are held out, or a list of them."
        )
    if isinstance(chosen, int):
        if not 1 <= chosen < clients:
            raise QuiverError(
                f"data.unseen = {chosen}: of {clients} clients 1 … {clients - 1} can be held out."
            )
        drawn = stream(seed, "unseen").choice(clients, chosen, replace=False)
        return np.sort(drawn).astype(np.int64)
    numbers = [_find_client(one, clients, names) for one in chosen]
    if not numbers or len(set(numbers)) < len(numbers):
        twice = "one of them is there twice" if numbers else "it is empty"
        raise QuiverError(f"data.unseen = {list(chosen)!r}: {twice}; name every client once.")
    if len(numbers) == clients:
        raise QuiverError("data.unseen names all clients: somebody must be left to train.")
    return np.sort(np.array(numbers, dtype=np.int64))


def _find_client(one: object, clients: int, names: Sequence[str]) -> int:
    if isinstance(one, str):
        if one in names:
            return list(names).index(one)
        known = suggest(one, names) if names else "these clients have no names: give their numbers."
        raise QuiverError(f"data.unseen: there is no client {one!r}; {known}")
    if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < clients:
        raise QuiverError(
            f"data.unseen: there is no client {one!r}; there are {clients}, 0 … {clients - 1}."
        )
    return one
