"""A model as a function of stacked parameters, and the two ways of computing it for many clients.

`Vectorized` computes all clients of a chunk together (vmap: batched matrix products), which is what
dense models like; `Sequential` binds the parameters of one client after the other to one module,
which is what convolutional models like on a CPU (engine/workers.py: several at a time, each on a
module of its own). Both give the same numbers up to rounding, and
nothing above them can tell which one is at work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quiverfl.methods.contract import Part
from quiverfl.task import PerSample, Point, Task
from quiverfl.trees import Layout

Gradient = Callable[[int, Tensor, Tensor, Tensor | None], Tensor]
"""(k, inputs [k, n, …], targets [k, n, …], weights [k, n]) → gradients [k, size of the part].

Of the mean loss of each of the first k clients, at the bound parameters as they are then. Weights
are 1 for samples and 0 for padding; None where nothing is padded.
"""


@dataclass(frozen=True, eq=False)
class Program:
    """A module, the names of its shared and personal parameters, and the loss of its outputs."""

    module: nn.Module
    shared: Layout
    personal: Layout
    loss: PerSample

    @classmethod
    def of(cls, task: Task, dtype: torch.dtype, device: torch.device) -> Program:
        module = copy.deepcopy(task.skeleton).to(dtype=dtype, device=device).eval()
        return cls(
            module.requires_grad_(False), task.shared_layout, task.personal_layout, task.loss
        )

    def head(self, name: str) -> Program:
        """The personal submodule alone, as a program on the body's features."""
        names = tuple(n.removeprefix(name + ".") for n in self.personal.names)
        module = self.module.get_submodule(name)
        return Program(module, Layout((), ()), Layout(names, self.personal.shapes), self.loss)

    def named(self, point: Point) -> dict[str, Tensor]:
        return {**self.shared.split(point.shared), **self.personal.split(point.personal)}

    @cached_property
    def places(self) -> tuple[tuple[nn.Module, str, str], ...]:
        """Where the module keeps its parameters: owner, attribute, name (one for tied ones)."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        every = list(self.module.named_parameters(remove_duplicate=False))
        return tuple(
            (
                self.module.get_submodule(name.rpartition(".")[0]),
                name.rpartition(".")[2],
                names[id(p)],
            )
            for name, p in every
        )

    def trained(self, part: Part) -> tuple[str, ...]:
        shared = self.shared.names if part != "personal" else ()
        personal = self.personal.names if part != "shared" else ()
        return shared + personal


class Executor(Protocol):
    """How the clients of a chunk are computed together: so many to train, so many to evaluate."""

    @property
    def chunk(self) -> int: ...
    @property
    def evaluated(self) -> int: ...
    def outputs(self, program: Program, point: Point, x: Tensor) -> Tensor:
        """Outputs [k, n, …] of k stacked models on inputs [k, n, …]."""

    def features(self, program: Program, head: str, point: Point, x: Tensor) -> Tensor | None:
        """What the head is given, [k, n, …]; None if the head is not the model's last step."""

    def bind(self, program: Program, point: Point, part: Part) -> Gradient:
        """The gradient of one part at these stacked parameters, which may change in place."""


@dataclass(frozen=True)
class Vectorized:
    """All clients of a chunk at once."""

    chunk: int = 25
    evaluated: int = 100

    def outputs(self, program: Program, point: Point, x: Tensor) -> Tensor:
        with torch.no_grad():
            return _stacked(program.module, program.named(point), x)

    def features(self, program: Program, head: str, point: Point, x: Tensor) -> Tensor | None:
        named = program.named(point)
        with torch.no_grad(), _Captured(program.module.get_submodule(head)) as captured:

            def both(named: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
                captured.inputs.clear()
                outputs = functional_call(program.module, named, (x,))
                return (outputs, *captured.inputs)

            found = torch.vmap(both)(named, x)
        if len(found) != 2:
            return None
        own = program.head(head)
        with torch.no_grad():
            again = _stacked(own.module, own.personal.split(point.personal), found[1])
        return found[1] if torch.equal(again, found[0]) else None

    def bind(self, program: Program, point: Point, part: Part) -> Gradient:
        named = program.named(point)
        trained = program.trained(part)

        def gradient(k: int, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
            leaves = [named[name][:k].detach().requires_grad_() for name in trained]
            parameters = {name: tensor[:k] for name, tensor in named.items()}
            parameters.update(zip(trained, leaves, strict=True))
            outputs = _stacked(program.module, parameters, x)
            return _flat_gradient(_total_loss(program.loss, outputs, y, weights), leaves, k)

        return gradient


@dataclass(frozen=True)
class Sequential:
    """One client after the other on one module whose parameters are views of the client's row."""

    chunk: int = 1
    evaluated: int = 1
    image_format: torch.memory_format = torch.channels_last

    def outputs(self, program: Program, point: Point, x: Tensor) -> Tensor:
        _bind(program, program.named(Point(*(part[0] for part in point))), ())
        with torch.no_grad():
            outputs: Tensor = program.module(self._laid_out(x[0]))
        return outputs.unsqueeze(0)

    def features(self, program: Program, head: str, point: Point, x: Tensor) -> Tensor | None:
        module = program.module.get_submodule(head)
        with _Captured(module) as captured:
            outputs = self.outputs(program, point, x)[0]
        if len(captured.inputs) != 1:
            return None
        with torch.no_grad():
            same = torch.equal(module(captured.inputs[0]), outputs)
        return captured.inputs[0].unsqueeze(0) if same else None

    def bind(self, program: Program, point: Point, part: Part) -> Gradient:
        named = program.named(Point(*(part[0] for part in point)))
        leaves = _bind(program, named, program.trained(part))

        def gradient(k: int, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
            outputs = program.module(self._laid_out(x[0])).unsqueeze(0)
            return _flat_gradient(_total_loss(program.loss, outputs, y, weights), leaves, 1)

        return gradient

    def _laid_out(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=self.image_format) if x.ndim == 4 else x


def choose_executor(name: str, task: Task, device: torch.device) -> Executor:
    """`auto`: together, unless the model is convolutional and computed on a CPU."""
    convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in task.skeleton.modules())
    if name == "auto":
        name = "sequential" if convolutional and device.type == "cpu" else "vectorized"
    if name == "vectorized":
        return Vectorized()
    # Convolutions are faster with channels last; PyTorch's GroupNorm is three times slower there.
    normed = any(isinstance(module, nn.GroupNorm) for module in task.skeleton.modules())
    return Sequential(image_format=torch.contiguous_format if normed else torch.channels_last)


def _stacked(module: nn.Module, named: dict[str, Tensor], x: Tensor) -> Tensor:
    outputs: Tensor = torch.vmap(lambda p, x: functional_call(module, p, (x,)))(named, x)
    return outputs


def _total_loss(loss: PerSample, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """The sum over clients of the mean over samples: its gradient is each client's own."""
    losses = loss(outputs.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
    if weights is None:
        return losses.mean(dim=1).sum()
    return ((losses * weights).sum(dim=1) / weights.sum(dim=1)).sum()


def _flat_gradient(loss: Tensor, leaves: list[Tensor], k: int) -> Tensor:
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.reshape(k, -1) for gradient in gradients], dim=1)


def _bind(program: Program, named: dict[str, Tensor], trained: tuple[str, ...]) -> list[Tensor]:
    """Make the module's parameters views of these tensors; the trained ones want a gradient.

    `.data`, since views of one tensor share its count of changes: another client's row that is
    written meanwhile would look to autograd like a change of this one's.
    """
    wanted = set(trained)
    bound = {n: nn.Parameter(tensor.data, requires_grad=n in wanted) for n, tensor in named.items()}
    for owner, leaf, name in program.places:
        owner._parameters[leaf] = bound[name]
    return [bound[name] for name in trained]


class _Captured:
    """Keeps what a submodule is called with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.inputs: list[Tensor] = []

    def __enter__(self) -> _Captured:
        self._hook = self._module.register_forward_pre_hook(
            lambda _, arguments: self.inputs.append(arguments[0])
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
