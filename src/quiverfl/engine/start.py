"""The states that clients start with, stacked; and what a state must be."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quiverfl.engine.context import PhaseContext
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.memory import in_large_pages
from quiverfl.methods.contract import Method, Start
from quiverfl.methods.state import replicated, roles
from quiverfl.seeds import stream
from quiverfl.task import Point, Task
from quiverfl.trees import Tree, first_leaf, mapped

Integers = npt.NDArray[np.int64]


def initial_states(
    task: Task,
    method: Method,
    context: PhaseContext,
    ids: Integers,
    settings: RunSettings,
    home: torch.device,
) -> Any:
    """A NamedTuple of stacked tensors at `home`: every client's `init`."""
    agreed = task.initial(settings.seed)
    features, outputs = _shapes(context, agreed)
    stacked: list[Tensor] = []
    kind: Any = None
    for row, client in enumerate(ids):
        own = agreed if settings.common_init else task.initial(settings.seed, 1 + int(client))
        point, common = (
            Point(*(part.to(context.device, settings.dtype) for part in at)) for at in (own, agreed)
        )
        random = stream(settings.seed, "start", int(client))
        samples = int(context.examples.sizes[row])
        start = Start(point, common, samples, random, features, outputs)
        state = _init(method, task, start)
        if kind is None:
            kind = type(state)
            check_state(method, task, state)
            stacked = [_room(leaf, len(ids), context.device, home) for leaf in state]
        if not settings.common_init and replicated(kind):
            random = stream(settings.seed, "start", int(client))
            agreed_start = replace(start, point=common, random=random)
            _check_copies(method, state, _init(method, task, agreed_start))
        for leaf, value in zip(stacked, state, strict=True):
            leaf[row] = value
    for name in replicated(kind) if kind is not None else ():
        copies = stacked[kind._fields.index(name)]
        if not torch.equal(copies, copies[:1].expand_as(copies)):
            raise _copies_differ(method, name)
    return kind(*stacked)


def _room(leaf: Tensor, clients: int, device: torch.device, home: torch.device) -> Tensor:
    """For a leaf of all clients; pinned where a GPU fetches it from the host's memory."""
    pinned = device.type == "cuda" and home.type == "cpu"
    shape = (clients, *leaf.shape)
    return in_large_pages(leaf.new_empty(shape, device=home, pin_memory=pinned))


def _init(method: Method, task: Task, start: Start) -> Any:
    """The method's `init`, which must leave its arguments as they are: other clients share them."""
    given = (*start.point, *start.common)
    before = [part._version for part in given]
    state = method.init(task, start)
    if [part._version for part in given] != before:
        raise QuiverError(
            f"{method.title}: init changes start.point or start.common in place, which other "
            "clients start from too. Return new tensors: a + b in place of a.add_(b)."
        )
    return state


def same_everywhere(method: Method, state: Any) -> None:
    """Warn of server state whose copies a merge made different, by more than rounding."""
    for name in replicated(type(state)):
        copies = getattr(state, name)
        if len(copies) and not torch.allclose(copies, copies[:1], rtol=1e-4, equal_nan=True):
            warnings.warn(
                f"{method.title}: the state's field {name!r} is declared Replicated, but merge "
                "makes it different at different clients, as if each had a server of its own. "
                "Compute it from Replicated fields and from what arrived, and use a graph where "
                'all clients receive the same: topology = "star".',
                QuiverWarning,
                stacklevel=2,
            )


def _check_copies(method: Method, own: Any, from_common: Any) -> None:
    for name in replicated(type(own)):
        if not torch.equal(getattr(own, name), getattr(from_common, name)):
            raise _copies_differ(method, name)


def _copies_differ(method: Method, name: str) -> QuiverError:
    return QuiverError(
        f"{method.title}: the state's field {name!r} is declared Replicated, but init gives it "
        "different values at different clients: start it from start.common, which is the same for "
        "all of them also where run.common_init = false, and not from start.point, start.samples "
        "or start.random."
    )


def check_state(method: Method, task: Task, state: Any) -> None:
    """Refuse a state that engine, checkpoints and peers could not carry."""
    if not isinstance(state, tuple) or not hasattr(state, "_fields"):
        raise QuiverError(
            f"{method.title}: init returned a {type(state).__name__}; a state is a NamedTuple of "
            "tensors (docs/add-a-method.md)."
        )
    wanted = {"shared": (task.shared_layout.size,), "personal": (task.personal_layout.size,)}
    for name, role in roles(type(state)).items():
        leaf = getattr(state, name)
        if not isinstance(leaf, Tensor):
            raise QuiverError(
                f"{method.title}: the state's field {name!r} is a {type(leaf).__name__}; every "
                "field is a tensor, a number torch.tensor(…)."
            )
        if not leaf.is_floating_point():
            raise QuiverError(
                f"{method.title}: the state's field {name!r} has type {leaf.dtype}; weighted sums "
                "need floating-point numbers, such as torch.tensor(3.0)."
            )
        shape = wanted.get(role, () if role == "scalar" else tuple(leaf.shape))
        if tuple(leaf.shape) != shape:
            raise QuiverError(
                f"{method.title}: the state's field {name!r} is declared {role.capitalize()}, "
                f"which has shape {shape}, but init made it {tuple(leaf.shape)}. Declare it as a "
                "plain Tensor if it has a shape of its own."
            )
    if method.mass is not None and roles(type(state)).get(method.mass) != "scalar":
        raise QuiverError(
            f"{method.title} declares mass = {method.mass!r}, but its state has no Scalar field "
            f"of that name; it has: {', '.join(state._fields)}."
        )


def _shapes(context: PhaseContext, agreed: Point) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of one sample's features (where there is a head) and outputs."""
    if not len(context.examples.sizes):
        return (), ()
    x, _ = context.examples.gather(np.zeros(1, dtype=np.int64), np.zeros((1, 1), dtype=np.int64))
    point = Point(*(part.to(context.device, context.dtype) for part in agreed))
    program = context.program()
    named, one = program.named(point), mapped(lambda leaf: leaf[0], x)
    with torch.no_grad():
        try:
            seen = program.call(named, one, features=program.head is not None)
        except QuiverError:  # a head that is called otherwise: whoever needs features is told then
            return (), _shape(program.call(named, one, features=False).outputs)
    shape = tuple(seen.features.shape[1:]) if program.head is not None else ()
    return shape, _shape(seen.outputs)


def _shape(outputs: Tree) -> tuple[int, ...]:
    """Of what is said of one sample; of several tensors the first."""
    return tuple(first_leaf(outputs).shape[1:])
