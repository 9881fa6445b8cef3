"""A method's functions, tried on two clients before the first round, in the order of a round.

They must leave what they are given as it is, return what they should, and read the rate. Whatever
an author's function raises becomes a sentence here, and in a run, too (engine/local/vmap.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.local.single_step import take_single_step
from quiverfl.engine.local.vmap import function_name, vmap_clients
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.methods.contract import Interleaved, Loss, Method, Part, SingleStep, StepInfo, Train
from quiverfl.methods.contract import Trained as TrainedParams
from quiverfl.methods.optional import adaptation_phase, message_bytes
from quiverfl.methods.state import replicated_fields
from quiverfl.task import Params, Task
from quiverfl.training import Training
from quiverfl.trees import first_leaf, tree_leaves, tree_map

CLIENTS = 2
"""Stacked states that functions are tried on: enough to see that two clients differ."""
STEP = 1e-2
"""Length of the trial's step, in the parameters' units."""


def check_functions(
    method: Method, task: Task, probe: ModelProbe, training: Training, alike: bool
) -> None:
    """Refuse functions that the engine could not carry out. `alike`: all receive the same sums."""
    with torch.no_grad():
        _Trial(method, task, probe, training).play_round(alike)


@dataclass(eq=False)
class _Trial:
    """One round of two clients, without data: gradients and steps are made up."""

    method: Method
    task: Task
    probe: ModelProbe
    training: Training
    rate_was_read: bool = False

    def play_round(self, alike: bool) -> None:
        method = self.method
        first = self.probe.first_state(method)
        state: Any = type(first)(*(torch.stack([leaf] * CLIENTS) for leaf in first))
        phases = tuple(method.phases(self.task))
        for phase in phases:
            for inner in phase.phases if isinstance(phase, Interleaved) else (phase,):
                state = self._take_phase(inner, state)
        self._check_rate(phases)
        message = self._emit(state)
        self._merge(state, message, alike)
        params = self._find_params(method.personal, state)
        adaptation = adaptation_phase(method, self.task)
        if adaptation is not None:
            self._train(adaptation, params)

    def _take_phase(self, phase: Train | SingleStep, state: Any) -> Any:
        if isinstance(phase, Train):
            return self._train(phase, state)
        asked: dict[str, Any] = {}
        if phase.needs_gradient or phase.statistics is not None:
            params = self._find_params(phase.params or self.method.personal, state)
        if phase.needs_gradient:
            asked["gradient"] = self._make_gradient(params, "whole")
        if phase.statistics is not None:
            seen, y = self.probe.look(params, features=self.task.head is not None)
            weights = torch.ones(first_leaf(y).shape[:2]).to(params.shared)
            asked["statistics"] = self._call(phase.statistics, seen, y, weights, state)
        if phase.needs_noise:
            layouts = self.task.shared_layout, self.task.personal_layout
            size = sum(layout.size for layout in layouts)
            asked["noise"] = torch.linspace(0.0, 0.9, size, dtype=torch.float64).expand(CLIENTS, -1)
        info = partial(_WatchedInfo, 0, 1, self.training, 1.0, trial=self)
        step = partial(take_single_step, phase, info=info)
        after = _call_purely(phase.step, step, (state, asked))
        return check_same_structure(phase.step, after, state)

    def _train(self, phase: Train, state: Any) -> Any:
        params = self._find_params(phase.params, state)
        if phase.gradient_at is not None:
            self._find_params(phase.gradient_at, params, state)
        gradient = self._make_gradient(params, phase.part)
        if phase.lookahead is not None:
            self._find_params(phase.lookahead.gradient_at, gradient, params, state)
        if phase.gradient is not None:
            self._find_params(phase.gradient, gradient, params, state)
        if phase.lr_scale is not None:
            self._call(phase.lr_scale, state)
        if phase.loss is not None:
            self._check_loss(phase.loss, params, state)
        one = params.shared.new_ones(CLIENTS)
        rate, moves = self.training.lr_at(0), self._make_gradient(params, "whole")
        shared, personal = (part - STEP * move for part, move in zip(params, moves, strict=True))
        shared = params.shared if phase.part == "personal" else shared
        personal = params.personal if phase.part == "shared" else personal
        trained = TrainedParams(shared, personal, one, rate * one, rate * one, one)
        after = self._call(phase.update, state, trained)
        return check_same_structure(phase.update, after, state)

    def _check_loss(self, loss: Loss, params: Params, state: Any) -> None:
        """The method's own loss of two samples, and what its teachers see."""
        seen, y = self.probe.look(params, loss.needs_features)
        models = () if loss.teachers is None else self._call(loss.teachers, state)
        taught = tuple(self.probe.look(model, loss.needs_features)[0] for model in models)
        given: tuple[Any, ...] = (seen, y, state, taught)
        if loss.needs_weights:
            given = (*given, state[0].new_ones(first_leaf(y).shape[:2]))
        check_per_sample(loss, self._call(loss.function, *given), y)

    def _emit(self, state: Any) -> dict[str, Tensor]:
        message = self._call(self.method.message, state)
        if not isinstance(message, dict):
            raise QuiverError(
                f"{self.method.title}: message returned a {type(message).__name__}; it must "
                "return named tensors, such as {'u': state.u}."
            )
        if message:
            self._call(partial(message_bytes, self.method), message)
        return message

    def _merge(self, state: Any, message: dict[str, Tensor], alike: bool) -> None:
        """Merge the messages as they are, then without what was given away."""
        title, merge = self.method.title, self.method.merge
        mixed = {
            name: leaf.mean(dim=0, keepdim=True).expand_as(leaf) if alike else leaf
            for name, leaf in message.items()
        }
        merged = check_same_structure(merge, self._call(merge, state, mixed), state)
        sent = {leaf.data_ptr() for leaf in vmap_clients(self.method.message)(state).values()}
        gone = {
            name: torch.full_like(leaf, float("nan"))
            for name, leaf in zip(state._fields, state, strict=True)
            if leaf.data_ptr() in sent
        }
        without = vmap_clients(merge)(state._replace(**gone), mixed)
        for name, leaf, other in zip(state._fields, without, merged, strict=True):
            if torch.isnan(leaf).any() and not torch.isnan(other).any():
                raise QuiverError(
                    f"{title}: merge reads what message sent as it stands in the state "
                    f"({', '.join(gone)}), and so cannot compute field {name!r}. The exchange "
                    "mixes in that memory: send a copy (.clone()) of what merge needs."
                )
        check_replicated(self.method, merged)

    def _check_rate(self, phases: Iterable[Any]) -> None:
        """Refuse a method that computes gradients and steps without looking at the rate."""
        phases = tuple(phases)
        steps = any(isinstance(phase, Train | Interleaved) for phase in phases)
        alone = any(isinstance(phase, SingleStep) and phase.needs_gradient for phase in phases)
        if alone and not steps and not self.rate_was_read:
            raise QuiverError(
                f"{self.method.title} computes gradients in a SingleStep that never reads "
                "info.lr: training.lr would change nothing. Step with info.lr."
            )

    def _make_gradient(self, params: Params, part: Part) -> Params:
        """Other numbers for every client; that of a part that is not trained is empty."""
        size = torch.arange(1.0, 1 + CLIENTS).to(params.shared).unsqueeze(1)
        shared, personal = (size * torch.ones_like(half) for half in params)
        shared = shared[:, :0] if part == "personal" else shared
        return Params(shared, personal[:, :0] if part == "shared" else personal)

    def _call(self, function: Callable[..., Any], *stacked: Any) -> Any:
        return _call_purely(function, vmap_clients(function), stacked)

    def _find_params(self, function: Callable[..., Any], *stacked: Any) -> Params:
        return _check_params(function, self._call(function, *stacked))


@dataclass(frozen=True)
class _WatchedInfo(StepInfo):
    """Records that the rate was read."""

    trial: _Trial | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in ("lr", "training"):
            object.__getattribute__(self, "trial").rate_was_read = True
        return object.__getattribute__(self, name)


def _call_purely(
    function: Callable[..., Any], lifted: Callable[..., Any], stacked: tuple[Any, ...]
) -> Any:
    """Refuse a function that changes what it is given: a state, a model or a message of a client.

    It is tried on a copy.
    """
    copies = tree_map(lambda leaf: leaf.detach().clone(), stacked)
    before = [leaf._version for _, leaf in tree_leaves(copies)]
    lifted(*copies)
    after = [leaf._version for _, leaf in tree_leaves(copies)]
    for name, then, now in zip(_name_leaves(copies), before, after, strict=True):
        if now != then:
            raise QuiverError(
                f"{function_name(function)} changes {name} in place. It belongs to the engine, and "
                "other steps would see the change: return new tensors, a + b in place of a.add_(b)."
            )
    return lifted(*stacked)


def _name_leaves(arguments: Iterable[Any]) -> Iterator[str]:
    """Every tensor of the arguments, as a sentence calls it; in the order of `tree_leaves`."""
    for argument in arguments:
        kind, fields = type(argument).__name__, getattr(argument, "_fields", ())
        for path, _ in tree_leaves(argument):
            first = path.partition(".")[0]
            part = fields[int(first)] if fields else first
            yield f"{part!r} of the {kind} it is given" if part else "a tensor that it is given"


def check_same_structure(function: Callable[..., Any], new: Any, old: Any) -> Any:
    """The new state, if it is like the old one in type, fields and shapes."""
    name = function_name(function)
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


def check_per_sample(loss: Loss, numbers: object, y: Any) -> None:
    """Refuse a loss of the method's own that does not give one number for each sample."""
    wanted = first_leaf(y).shape[:2]
    if isinstance(numbers, Tensor) and numbers.shape == wanted:
        return
    shape = tuple(numbers.shape[1:]) if isinstance(numbers, Tensor) else type(numbers).__name__
    name = getattr(loss.function, "__qualname__", "a loss")
    raise QuiverError(
        f"{name} gave {shape} for {wanted[1]} samples; a loss of a method's own returns one number "
        'per sample, such as F.cross_entropy(…, reduction="none").'
    )


def check_replicated(method: Method, state: Any) -> None:
    """Warn of server state whose copies a merge made different, by more than rounding."""
    for name in replicated_fields(type(state)):
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


def _check_params(function: Callable[..., Any], params: Any) -> Params:
    """Refuse what a function returned in place of a model."""
    if not isinstance(params, Params):
        raise QuiverError(
            f"{function_name(function)} returned a {type(params).__name__}; it must return a "
            "model, Params(shared, personal)."
        )
    return params
