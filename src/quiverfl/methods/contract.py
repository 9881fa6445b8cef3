"""What a method is: a few pure functions, written for one client.

    init      the state a client starts with
    phases    what it does in a round before it sends, as data: the engine owns every loop
    message   what it sends (named tensors); what is sent as it is in the state is given away
    merge     the new state from what is left of the old one and the weighted sum of messages
    personal  the model it would use now: what is evaluated, at both stages
    adapt     (optional) a phase to run on a copy of that model before it is evaluated
    payload   (optional) the bytes of a message that is not sent whole

Tensors carry no client axis here. The engine lifts these functions over stacked clients, so they
may use nothing but tensor operations: no loop over clients, no branch on a tensor's value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from quiverfl.errors import QuiverError
from quiverfl.task import Point, Task
from quiverfl.training import Training

Message: TypeAlias = dict[str, Tensor]
Part: TypeAlias = Literal["shared", "personal", "whole"]
State: TypeAlias = Any
"""A NamedTuple of tensors, declared by each method. The last word of a field's name tells its kind:
`u` or `…_u` lies like the shared part, `v` or `…_v` like the personal one; others are scalars."""


@dataclass(frozen=True)
class Start:
    """What a client knows before the first round."""

    point: Point  # its initial parameters
    common: Point  # the initial parameters all clients could agree on
    samples: int  # how many training samples it holds
    random: np.random.Generator  # its own stream


@dataclass(frozen=True)
class Train:
    """SGD on one part of the model for some epochs; the rest is not even differentiated."""

    part: Part
    epochs: int
    point: Callable[[State], Point]
    """Where the gradient is taken, and what is stepped."""
    absorb: Callable[[State, Point], State]
    """The state after training, from the trained point."""
    gradient: Callable[[Point, Point, State], Point] | None = None
    """(gradient, point, state) → gradient, before clipping and decay. The gradient of a part that
    is not trained is an empty tensor."""
    scale: Callable[[State], Tensor] | None = None
    """Factor on the step: 1/μ for push-sum, where the engine steps z = u/μ."""
    personal_rate: bool = False
    """Step the personal part with Training.personal_lr."""
    sent: bool = True
    """Whether this phase trains what is sent: `epochs_per_client` then replaces `epochs`."""
    settings: Callable[[Training], Training] | None = None
    """Other optimizer settings for this phase only."""


@dataclass(frozen=True)
class Moment:
    """What a Once step may know beside the state."""

    round: int
    rounds: int  # as planned, T
    noise: Tensor  # uniform in [0, 1), one number per parameter, shared part first
    gradient: Point | None  # of the plain loss at `personal(state)` on one mini-batch, if asked for


@dataclass(frozen=True)
class Once:
    """One step without a loop, such as choosing a new mask. Run for one client at a time."""

    step: Callable[[State, Moment], State]
    gradient: bool = False
    """Whether the step wants Moment.gradient."""


Phase: TypeAlias = Train | Once


class Method(Protocol):
    """A frozen dataclass of hyper-parameters with these functions."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str:
        """The name as papers print it."""

    @property
    def carries_mass(self) -> bool:
        """Whether the message carries its own denominator's mass, so that columns may sum to 1."""

    @property
    def delay(self) -> int:
        """Rounds a message from another client takes; carried out by the exchange."""

    def init(self, task: Task, start: Start) -> State: ...
    def phases(self, task: Task) -> tuple[Phase, ...]: ...
    def message(self, state: State) -> Message: ...
    def merge(self, state: State, mixed: Message) -> State: ...
    def personal(self, state: State) -> Point: ...


@runtime_checkable
class Adapts(Protocol):
    """A method whose models are fine-tuned, on a copy, before they are evaluated."""

    def adapt(self, task: Task) -> Train: ...


@runtime_checkable
class Weighs(Protocol):
    """A method whose messages take fewer bytes than their tensors, such as sparse ones."""

    def payload(self, message: Message) -> Tensor: ...


def options_of(method: Method) -> dict[str, Any]:
    """What a method was made with, by name; nothing if it is not a data class."""
    if is_dataclass(method) and not isinstance(method, type):
        return asdict(method)
    return {}


def adaptation(method: Method, task: Task) -> Train | None:
    return method.adapt(task) if isinstance(method, Adapts) else None


def payload(method: Method, message: Message) -> Tensor:
    """Bytes the message of one client takes on the network, as a scalar tensor."""
    return method.payload(message) if isinstance(method, Weighs) else dense_bytes(message)


def dense_bytes(message: Message) -> Tensor:
    """Bytes of a message that is sent whole."""
    return torch.tensor(sum(leaf.numel() * leaf.element_size() for leaf in message.values()))


def check_epochs(method: Any) -> None:
    """Refuse numbers of epochs that are not whole or negative."""
    for field in fields(method):
        value = getattr(method, field.name)
        if field.name.endswith("epochs") and (not isinstance(value, int) or value < 0):
            raise QuiverError(f"method.{field.name} = {value!r}: it must be a whole number ≥ 0.")
