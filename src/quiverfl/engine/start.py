"""The clients' initial states, stacked on axis 0, and their running statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quiverfl.engine.local.context import PhaseContext
from quiverfl.engine.settings import RunSettings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method, Phase, Start
from quiverfl.methods.state import field_roles, replicated_fields
from quiverfl.seeds import stream
from quiverfl.support.environment import NO_FLOAT64, use_large_pages
from quiverfl.task import Params, Task
from quiverfl.types import Integers


def initial_states(
    task: Task,
    method: Method,
    context: PhaseContext,
    ids: Integers,
    settings: RunSettings,
    home: torch.device,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Any:
    """A NamedTuple of stacked tensors at `home`: every client's `init`.

    `shapes` are those of a sample's features and outputs.
    """
    device = home if context.device.type in NO_FLOAT64 else context.device

    def cast(params: Params) -> Params:
        return Params(*(part.to(device, settings.dtype) for part in params))

    point = common = cast(task.initial_params(settings.seed))
    stacked: list[Tensor] = []
    kind: Any = None
    for row, client in enumerate(ids):
        if not settings.common_init:
            point = cast(task.initial_params(settings.seed, 1 + int(client)))
        if task.own_models:
            at = int(client), settings.seed
            start_at = 0 if settings.common_init else 1 + int(client)
            common = task.with_own_part(common, *at, 0)
            point = task.with_own_part(point, *at, start_at)
        random = stream(settings.seed, "start", int(client))
        samples = int(context.examples.sizes[row])
        start = Start(point, common, samples, random, *shapes)
        state = make_state(method, task, start)
        if kind is None:
            kind = type(state)
            check_state(method, task, state)
            stacked = [_room(leaf, len(ids), context.device, home) for leaf in state]
        if not settings.common_init and replicated_fields(kind):
            random = stream(settings.seed, "start", int(client))
            agreed_start = replace(start, params=common, random=random)
            _check_copies(method, state, make_state(method, task, agreed_start))
        for leaf, value in zip(stacked, state, strict=True):
            leaf[row] = value
    for name in replicated_fields(kind) if kind is not None else ():
        copies = stacked[kind._fields.index(name)]
        if not torch.equal(copies, copies[:1].expand_as(copies)):
            raise _copies_differ(method, name)
    return kind(*stacked)


def _room(leaf: Tensor, clients: int, device: torch.device, home: torch.device) -> Tensor:
    """For a leaf of all clients; pinned where a GPU fetches it from the host's memory."""
    pinned = device.type == "cuda" and home.type == "cpu"
    shape = (clients, *leaf.shape)
    return use_large_pages(leaf.new_empty(shape, device=home, pin_memory=pinned))


def make_state(method: Method, task: Task, start: Start) -> Any:
    """The method's `init`, which must leave its arguments as they are: other clients share them."""
    given = (*start.params, *start.common_params)
    before = [part._version for part in given]
    state = method.init(task, start)
    if [part._version for part in given] != before:
        raise QuiverError(
            f"{method.title}: init changes start.params or start.common_params in place, which "
            "other clients start from too. Return new tensors: a + b in place of a.add_(b)."
        )
    return state


def _check_copies(method: Method, own: Any, from_common: Any) -> None:
    for name in replicated_fields(type(own)):
        if not torch.equal(getattr(own, name), getattr(from_common, name)):
            raise _copies_differ(method, name)


def _copies_differ(method: Method, name: str) -> QuiverError:
    return QuiverError(
        f"{method.title}: the state's field {name!r} is declared Replicated, but init gives it "
        "different values at different clients: start it from start.common_params, which is the "
        "same for all of them also where run.common_init = false, and not from start.params, "
        "start.samples or start.random."
    )


def check_state(method: Method, task: Task, state: Any) -> None:
    """Refuse a state that engine, checkpoints and peers could not carry."""
    if not isinstance(state, tuple) or not hasattr(state, "_fields"):
        raise QuiverError(
            f"{method.title}: init returned a {type(state).__name__}; a state is a NamedTuple of "
            "tensors (docs/how-to/own-method.md)."
        )
    wanted = {"shared": (task.shared_layout.size,), "personal": (task.personal_layout.size,)}
    for name, role in field_roles(type(state)).items():
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
    if method.mass is not None and field_roles(type(state)).get(method.mass) != "scalar":
        raise QuiverError(
            f"{method.title} declares mass = {method.mass!r}, but its state has no Scalar field "
            f"of that name; it has: {', '.join(state._fields)}."
        )


def initial_statistics(
    task: Task, phases: Iterable[Phase], clients: int, dtype: torch.dtype, home: torch.device
) -> Tensor | None:
    """Running statistics of every client's models, [clients, models, size]; None without any."""
    if not task.statistics_layout.names:
        return None
    trains = [train for p in phases for train in getattr(p, "phases", (p,))]
    models = 1 + max((getattr(train, "model", 0) for train in trains), default=0)
    start = task.initial_statistics().to(home, dtype)
    return start.expand(clients, models, -1).clone()
