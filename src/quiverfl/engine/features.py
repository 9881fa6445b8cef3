"""A head on a frozen body may be trained on the body's features, computed once.

They cannot change during the phase, unless inputs are augmented at every visit. That holds only for
a model that is body → head → output, which is proven from one call of the model and not guessed:

- the head is called once, with one tensor, and what the model returns is the very tensor that the
  head returned, unchanged in place: nothing follows the head;
- no parameter of the head is in the graph that made the features, and with every parameter of the
  head NaN the features are still numbers: the body does not read the head;
- the head alone, given the features, says what the model says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from quiverfl.engine.examples import Examples
from quiverfl.engine.programs import Executor, Program
from quiverfl.task import Point

Integers = npt.NDArray[np.int64]

BATCH = 512
"""Samples per client that pass through the body at once."""


class HeadFeatures:
    """The features of some clients' training samples, instead of the samples."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y

    @classmethod
    def of(
        cls,
        executor: Executor,
        program: Program,
        examples: Examples,
        point: Point,
        rows: Integers,
        most: int | None = None,
    ) -> HeadFeatures:
        """`most` is the size of the largest client of the company, unless it is one of these."""
        width = int(examples.sizes[rows].max()) if most is None else most
        samples = np.minimum(np.arange(width), examples.sizes[rows][:, None] - 1)
        parts, targets = [], []
        for begin in range(0, width, BATCH):
            x, y = examples.gather(rows, samples[:, begin : begin + BATCH])
            parts.append(executor.see(program, point, x, features=True).features)
            targets.append(y)
        return cls(torch.cat(parts, dim=1), torch.cat(targets, dim=1))

    def gather(
        self, rows: Integers, samples: Integers, keys: object = None
    ) -> tuple[Tensor, Tensor]:
        """Of the first clients, as many as there are rows."""
        places = torch.arange(len(rows), device=self._x.device)[:, None]
        index = torch.from_numpy(samples).to(self._x.device)
        return self._x[places, index], self._y[places, index]


def head_is_last(program: Program, point: Point, x: Tensor) -> bool:
    """Whether the model is body → head → output, from calls with one client's model and inputs."""
    if program.head is None or not program.personal.names:
        return False
    named = {name: tensor.detach().clone() for name, tensor in program.named(point).items()}
    for name in program.personal.names:
        named[name].requires_grad_()
    call = _watched(program, named, x)
    if call is None:
        return False
    outputs, features = call
    personal = [named[name] for name in program.personal.names]
    if features.requires_grad:
        found = torch.autograd.grad(features.sum(), personal, allow_unused=True, retain_graph=True)
        if any(gradient is not None for gradient in found):
            return False
    poisoned = {name: tensor.detach() for name, tensor in named.items()}
    for name in program.personal.names:
        poisoned[name] = torch.full_like(poisoned[name], float("nan"))
    again = _watched(program, poisoned, x)
    if again is None or not torch.equal(again[1], features.detach()):
        return False
    alone = program.head_alone()
    with torch.no_grad():
        head = alone.personal.split(point.personal)
        return torch.equal(functional_call(alone.module, head, (features,)), outputs.detach())


def _watched(program: Program, named: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor] | None:
    """(outputs, features) if the head was called once with one tensor and its output returned."""
    returned: list[tuple[object, int]] = []

    def note(_: nn.Module, __: object, output: object) -> None:
        returned.append((output, output._version if isinstance(output, Tensor) else 0))

    assert program.head is not None
    hook = program.module.get_submodule(program.head).register_forward_hook(note)
    try:
        with program._captured() as calls:
            outputs: Tensor = functional_call(program.module, named, (x,))
    finally:
        hook.remove()
    if len(calls) != 1 or calls[0] is None or len(returned) != 1:
        return None
    output, version = returned[0]
    if output is not outputs or outputs._version != version:
        return None
    return outputs, calls[0]
