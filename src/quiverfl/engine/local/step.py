"""A client's local steps: a batch becomes a gradient, and a gradient a step.

The engine trains k clients at once: parameters and gradients are [k, size], one row per client.
Clients take their steps in the order of their number of batches, the busiest first, so that those
who still train are always the first k.

    trainer.py     carries a phase out: its batches, its rates, what the state absorbs
    gradients.py   computes the gradient of a batch: the task's loss or the method's, DP-SGD
    programs.py    computes the model of many clients together, or of one after the other
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from quiverfl.engine.local.context import PhaseContext
from quiverfl.engine.local.examples import Batch
from quiverfl.engine.local.gradients import bind_phase_gradient, make_workspace
from quiverfl.engine.local.programs import Program
from quiverfl.engine.local.vmap import vmap_clients
from quiverfl.engine.local.workers import WORKER, Halted
from quiverfl.methods.contract import Train
from quiverfl.methods.state import State
from quiverfl.task import Params
from quiverfl.training import Training

Buffers = dict[str, Tensor]
"""Buffers of an optimizer, each [clients, size] or [clients, 1]."""
Rates = tuple[tuple[slice, Tensor], ...]
"""Slices of the parameters and their own rate per client [clients, 1]."""
MOST_REPEATS = 1 << 20
"""Steps of a phase on one batch: phases that take turns on it draw noise of their own."""


class PhaseSteps:
    """The steps of one Train phase. `params` is where the clients are; it moves in place."""

    def __init__(
        self,
        phase: Train,
        context: PhaseContext,
        programs: Callable[[int], Program],
        start: Params,
        state: State,
        rates: Rates,
        training: Training,
        buffers: Buffers | None = None,
        turn: int | None = None,
    ) -> None:
        """`programs(i)` gives modules of this worker's own: several models want several.

        `turn` is the place of a phase that takes turns with others, and is loaded at every batch.
        """
        self._phase, self._state, self._rates, self._training = phase, state, rates, training
        self._trained, self.params = make_workspace(start, phase.part, both=turn is not None)
        self.buffers = make_buffers(training, self._trained) if buffers is None else buffers
        self._first_noise = MOST_REPEATS * (turn or 0)
        self._gradient = bind_phase_gradient(
            phase, context, programs, self.params, self._trained, self._first_states
        )

    def load(self, start: Params, state: State) -> None:
        """Continue from the parameters and state of the first clients; the optimizer remembers."""
        self._state = state
        for own, given in zip(self._first_params(len(start.shared)), start, strict=True):
            own.copy_(given)

    def run(self, batches: Iterable[Batch]) -> None:
        """Take the steps of all batches."""
        halt = WORKER.halt
        for batch in batches:
            if halt is not None and halt.is_set():
                raise Halted
            self.step(batch)

    def step(self, batch: Batch) -> None:
        """Take as many steps on this batch as the phase repeats it."""
        for repeat in range(self._phase.repeats):
            drawn_before = repeat or batch.noise is not None
            again = batch.repeat_for_step(repeat, self._first_noise) if drawn_before else batch
            self._descend(self._find_gradient(again))

    def _find_gradient(self, batch: Batch) -> Tensor:
        """The gradient to step along, taken where the phase says."""
        phase, k, before = self._phase, batch.clients, None
        if phase.gradient_at is not None:
            before = self._move(k, vmap_clients(phase.gradient_at)(*self._place(k)))
        if phase.lookahead is not None:
            uphill = self._to_params(self._gradient(batch))
            lookahead_params = vmap_clients(phase.lookahead.gradient_at)(uphill, *self._place(k))
            start = self._move(k, lookahead_params)
            before = start if before is None else before
        gradient = self._gradient(batch.second_half or batch)
        if before is not None:
            self._move(k, before)
        if phase.gradient is None:
            return gradient
        changed = vmap_clients(phase.gradient)(self._to_params(gradient), *self._place(k))
        return torch.cat(changed, dim=1)

    def _descend(self, gradient: Tensor) -> None:
        """Move the first k clients along their gradients [k, size], which are used up.

        Clip, decay, direction, step: in this order (docs/reference/methods.md).
        """
        k, training, decay = len(gradient), self._training, self._training.weight_decay
        params, rates, buffers = self._trained, self._rates, self.buffers
        if k < len(params):
            params = params[:k]
            rates = tuple((part, rate[:k]) for part, rate in rates)
            buffers = {name: buffer[:k] for name, buffer in buffers.items()}
        if training.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
            gradient.mul_(norm.reciprocal().mul_(training.clip_norm).clamp_(max=1))
        if decay and training.optimizer == "adamw":
            for part, rate in rates:
                params[:, part].mul_(1 - rate * decay)
        elif decay:
            gradient.add_(params, alpha=decay)
        direction = DIRECTIONS[training.optimizer](gradient, buffers, training)
        for part, rate in rates:
            whole = part == slice(None)  # a view costs as much as a small step
            target, along = (t if whole else t[:, part] for t in (params, direction))
            target.addcmul_(along, rate, value=-1)

    def _place(self, k: int) -> tuple[Params, Any]:
        """Parameters and state of the first k clients, as a method's functions take them."""
        return self._first_params(k), self._first_states(k)

    def _first_params(self, k: int) -> Params:
        return Params(*(part[:k] for part in self.params))

    def _first_states(self, k: int) -> Any:
        kind: Any = type(self._state)
        return kind(*(leaf[:k] for leaf in self._state))

    def _move(self, k: int, target: Params) -> Params:
        """Set the trained part to the target's; returns where it was, to go back."""
        before = Params(*(part.clone() for part in self._first_params(k)))
        if self._phase.part != "personal":
            self.params.shared[:k].copy_(target.shared)
        if self._phase.part != "shared":
            self.params.personal[:k].copy_(target.personal)
        return before

    def _to_params(self, gradient: Tensor) -> Params:
        """A gradient by its parts; that of a part that is not trained is empty."""
        empty = gradient[:, :0]
        if self._phase.part == "whole":
            cut = self.params.shared.shape[1]
            return Params(gradient[:, :cut], gradient[:, cut:])
        return Params(gradient, empty) if self._phase.part == "shared" else Params(empty, gradient)


def make_buffers(training: Training, params: Tensor) -> Buffers:
    """The buffers of an optimizer before its first step."""
    if training.optimizer == "sgd":
        return {"momentum": torch.zeros_like(params)} if training.momentum else {}
    count = params.new_zeros(len(params), 1)
    return {"first": torch.zeros_like(params), "second": torch.zeros_like(params), "count": count}


def _sgd_direction(gradient: Tensor, buffers: Buffers, training: Training) -> Tensor:
    if not training.momentum:
        return gradient
    buffer = buffers["momentum"].mul_(training.momentum).add_(gradient)
    return gradient.add_(buffer, alpha=training.momentum) if training.nesterov else buffer


def _adam_direction(gradient: Tensor, buffers: Buffers, training: Training) -> Tensor:
    """Kingma and Ba, ICLR 2015, Algorithm 1; ε is added to the corrected root, as they do."""
    beta1, beta2 = training.betas
    count = buffers["count"].add_(1)
    first = buffers["first"].mul_(beta1).add_(gradient, alpha=1 - beta1)
    second = buffers["second"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second / (1 - beta2**count)).sqrt_().add_(training.epsilon)
    return (first / (1 - beta1**count)).div_(root)


DIRECTIONS: dict[str, Callable[[Tensor, Buffers, Training], Tensor]] = {
    "sgd": _sgd_direction,
    "adam": _adam_direction,
    "adamw": _adam_direction,
}
