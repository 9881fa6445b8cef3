"""The contract of a method: its declarations, and a few pure functions for one client.

    init      the state a client starts with
    phases    what it does in a round before it sends, as data: the engine owns every loop
    message   what it sends (named tensors); what is sent as it is in the state is given away
    merge     the new state from what is left of the old one and the weighted sum of messages
    personal  the model it would use now: what is evaluated, at both stages

Tensors carry no client axis here. The engine lifts these functions over stacked clients, so they
use tensor operations only: no loop over clients, no branch on a value. optional.py has two more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from torch import Tensor
from typing_extensions import TypeVar

from quiverfl.methods.state import State
from quiverfl.options import check_options
from quiverfl.task import ModelOutputs, Params, Task
from quiverfl.training import Training

Message: TypeAlias = dict[str, Tensor]
Part: TypeAlias = Literal["shared", "personal", "whole"]
S = TypeVar("S", bound=State, default=Any)


@dataclass(frozen=True)
class Start:
    """Everything a client knows before the first round."""

    params: Params  # its initial parameters
    common_params: Params  # the initial parameters all clients could agree on
    samples: int  # how many training samples it holds
    random: np.random.Generator  # its own stream
    features: tuple[int, ...]  # shape of what the head is given for one sample; () if unknown
    outputs: tuple[int, ...]  # shape of what the model says of one sample


class Trained(NamedTuple):
    """Result of a Train phase: the trained model, its steps and its rates."""

    shared: Tensor
    personal: Tensor
    steps: Tensor  # steps this client took
    lr: Tensor  # η of the round
    effective_lr_sum: Tensor  # how far they move a parameter of gradient 1: steps · η, plain SGD
    active_fraction: Tensor  # of all clients, those that train in this round: |S| / N


@dataclass(frozen=True)
class Lookahead(Generic[S]):
    """A first gradient says where the second one, which the step follows, is taken (SAM, MAML)."""

    gradient_at: Callable[[Params, Params, S], Params]
    """(gradient, params, state) → params. An untrained part's gradient is an empty tensor."""
    split_batch: bool = False
    """The first gradient on the first half of the batch, the second on the rest."""


@dataclass(frozen=True)
class Loss(Generic[S]):
    """A loss of the method's own, in place of the task's."""

    function: (
        Callable[[ModelOutputs, Tensor, S, tuple[ModelOutputs, ...]], Tensor]
        | Callable[[ModelOutputs, Tensor, S, tuple[ModelOutputs, ...], Tensor], Tensor]
    )
    """(outputs, targets, state, the teachers' outputs) → one number per sample, [n]."""
    needs_features: bool = False
    """Whether it reads the features that the head is given."""
    needs_weights: bool = False
    """Whether it looks at the batch as a whole: it is then given the weights of the samples, too,
    [n], which are 0 for padding."""
    teachers: Callable[[S], tuple[Params, ...]] | None = None
    """Models that are applied to the same batch and are not trained."""


@dataclass(frozen=True)
class Train(Generic[S]):
    """Steps on one part of the model; the rest is not even differentiated."""

    part: Part
    params: Callable[[S], Params]
    """The parameters that are stepped, and where their gradient is taken."""
    update: Callable[[S, Trained], S]
    """The state after training. The one given to it is the state before.

    A client that takes no step keeps the state before: there is nothing to update.
    """
    epochs: int | None = None
    steps: int | None = None
    """One of the two; neither inside Interleaved."""
    repeats: int = 1
    """Steps on the same batch before the next one."""
    gradient: Callable[[Params, Params, S], Params] | None = None
    """(gradient, params, state) → gradient, before clipping and decay."""
    gradient_at: Callable[[Params, S], Params] | None = None
    """(params, state) → where the gradient is taken instead; its trained part is used."""
    lookahead: Lookahead[S] | None = None
    loss: Loss[S] | None = None
    lr_scale: Callable[[S], Tensor] | None = None
    """Factor on the learning rate: 1/μ for push-sum, where the engine steps z = u/μ."""
    use_personal_lr: bool = False
    """Step the personal part (if it is all that is trained, or with it) with personal_lr."""
    trains_message: bool = True
    """Whether this phase trains what is sent: `epochs_per_client` then replaces `epochs`."""
    settings: Callable[[Training], Training] | None = None
    """Other optimizer settings for this phase only."""
    keep_optimizer: bool = False
    """Keep the optimizer's state for the next round; otherwise it is reset."""
    model: int = 0
    """Number of the client's model that it trains: each has its own BatchNorm statistics.

    0 is the one that is evaluated. A method that also trains a second model, such as a global
    one beside the personal one, gives it the number 1.
    """


@dataclass(frozen=True)
class StepInfo:
    """Inputs of a SingleStep besides the state."""

    round: int
    rounds: int  # as planned, T
    training: Training
    active_fraction: float  # of all clients, those that train in this round: |S| / N
    gradient: Params | None = None  # of the plain loss on one batch
    statistics: Message | None = None
    noise: Tensor | None = None  # uniform in [0, 1), one per parameter, the shared part first

    @property
    def lr(self) -> float:
        return self.training.lr_at(self.round)


@dataclass(frozen=True)
class SingleStep(Generic[S]):
    """One step without a loop. Only what it needs is computed."""

    step: Callable[[S, StepInfo], S]
    needs_gradient: bool = False
    needs_noise: bool = False
    statistics: Callable[[ModelOutputs, Tensor, Tensor, S], Message] | None = None
    """(outputs, targets, weights, state) → sums over all training samples; padding has weight 0."""
    params: Callable[[S], Params] | None = None
    """The model that gradient and statistics are computed with; `personal` unless given."""
    sequential: bool = False
    """One client at a time, slowly: for a step that branches on values."""


@dataclass(frozen=True)
class Interleaved(Generic[S]):
    """Phases that take turns on every batch, each with the state that the one before left."""

    phases: tuple[Train[S] | SingleStep[S], ...]
    epochs: int | None = None
    steps: int | None = None
    trains_message: bool = True


Phase: TypeAlias = Train[S] | SingleStep[S] | Interleaved[S]


class Method(Protocol[S]):
    """A frozen dataclass of options with these functions. Inherit it for the defaults."""

    name: ClassVar[str]
    title: ClassVar[str]  # as papers print it
    topology: ClassVar[str]  # what "auto" means for it
    mass: ClassVar[str | None] = None  # push-sum's weight in state and message, if it has one
    unused: ClassVar[tuple[str, ...]] = ()  # keys of [training] it has no use for

    @property
    def delay(self) -> int:
        """Rounds a message from another client takes; carried out by the exchange."""
        return 0

    def __post_init__(self) -> None:
        check_options(self)

    def init(self, task: Task, start: Start) -> S: ...
    def phases(self, task: Task) -> tuple[Phase[S], ...]: ...
    def message(self, state: S) -> Message: ...
    def merge(self, state: S, mixed: Message) -> S: ...
    def personal(self, state: S) -> Params: ...
