"""A model as a function of stacked parameters, and the two ways of computing it for many clients.

`Vectorized` computes all clients of a chunk together (vmap: batched matrix products), which is
fastest for dense models; `Sequential` binds the parameters of one client after the other to one
module, which is fastest for convolutional models on a CPU (engine/local/workers.py: several at a
time, each on its own module). Both give the same numbers up to rounding, and nothing above
them can tell which one is at work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quiverfl.engine.local.examples import Batch
from quiverfl.engine.local.model_rng import KeyedRandomMode
from quiverfl.engine.local.workers import WORKER
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Part
from quiverfl.models.compiled import likes_channels_last
from quiverfl.objectives import PerSample
from quiverfl.task import InputStyle, ModelOutputs, Params, Task, call_arguments, to_plain_tree
from quiverfl.trees import Layout, Tree, first_leaf, tree_map

NOTHING = Layout((), ())
CACHE_LINE = 64
"""Bytes; new tensors begin at one."""

Losses = Callable[[ModelOutputs, Tree, int], Tensor]
"""(seen [k, n, …], targets [k, n, …], k) → one number per sample, [k, n]."""
Gradient = Callable[[Batch], Tensor]
"""batch → the gradients of one part, [clients, size].

Each is that of the client's mean loss, at the bound parameters as they are then.
"""

Stacked = Callable[["Program", dict[str, Tensor], Tree, bool, Tensor | None], ModelOutputs]
"""(program, stacked parameters, inputs [k, n, …], features?, keys) → what the k models see."""


@dataclass(frozen=True, eq=False)
class Program:
    """A module, the names of its shared and personal parameters, and the loss of its outputs."""

    module: nn.Module
    shared: Layout
    personal: Layout
    loss: PerSample
    head: str | None
    inputs: InputStyle = "arguments"
    statistics: Layout = NOTHING
    padding: int = 0
    """Numbers by which the personal part is shorter than the longest of all clients."""

    @classmethod
    def of(cls, task: Task, dtype: torch.dtype, device: torch.device) -> Program:
        module = copy.deepcopy(task.skeleton).to(dtype=dtype, device=device).eval()
        module.requires_grad_(False)
        layouts = (task.shared_layout, task.personal_layout)
        return cls(module, *layouts, task.loss, task.head, task.inputs, task.statistics_layout)

    def for_client(self, task: Task) -> Program:
        """The program of a client's own model, whose personal part may be shorter."""
        like = next(self.module.parameters())
        own = Program.of(task, like.dtype, like.device)
        return replace(own, padding=self.personal.size - own.personal.size)

    def copy(self) -> Program:
        """A program with its own module; tensors common to all clients are not copied."""
        bound = {*self.shared.names, *self.personal.names}
        same = [p for name, p in self.module.named_parameters() if name not in bound]
        memo = {id(tensor): tensor for tensor in (*same, *self.module.buffers())}
        module = copy.deepcopy(self.module, memo)
        return replace(self, module=module)

    def bind_statistics(self, values: Tensor) -> None:
        """Let the module keep its running statistics in this client's vector.

        `.data`, as in `_bind`: a layer's change would look to autograd like one of all layers'.
        """
        for name, view in self.statistics.split(values).items():
            owner, _, leaf = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[leaf] = view.data

    def head_alone(self) -> Program:
        """The personal submodule as a program on the body's features."""
        assert self.head is not None
        names = tuple(n.removeprefix(self.head + ".") for n in self.personal.names)
        module = self.module.get_submodule(self.head)
        return Program(module, Layout((), ()), Layout(names, self.personal.shapes), self.loss, None)

    def named_params(self, point: Params) -> dict[str, Tensor]:
        return {**self.shared.split(point.shared), **self.personal.split(point.personal)}

    @cached_property
    def places(self) -> tuple[tuple[nn.Module, str, str], ...]:
        """Places of the module's parameters: owner, attribute, name (one for tied ones)."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        every = list(self.module.named_parameters(remove_duplicate=False))
        bound = {*self.shared.names, *self.personal.names}
        return tuple(
            (
                self.module.get_submodule(name.rpartition(".")[0]),
                name.rpartition(".")[2],
                names[id(p)],
            )
            for name, p in every
            if names[id(p)] in bound
        )

    def param_names(self, part: Part) -> tuple[str, ...]:
        shared = self.shared.names if part != "personal" else ()
        personal = self.personal.names if part != "shared" else ()
        return shared + personal

    def call(
        self,
        named: dict[str, Tensor] | None,
        x: Tree,
        features: bool,
        draws: KeyedRandomMode | None = None,
    ) -> ModelOutputs:
        """One model on samples [n, …]: with these parameters, or with those bound to it."""
        if not features:
            outputs = self.outputs(named, x, draws)
            return ModelOutputs(outputs, first_leaf(outputs).new_empty(0))
        with self._capture_features() as calls:
            outputs = self.outputs(named, x, draws)
        if len(calls) != 1 or calls[0] is None:
            raise QuiverError(
                f"the model's features are what its head {self.head!r} is given, but it calls the "
                "head more than once or with more than one tensor: wrap the head in a module that "
                "is called once, with the features."
            )
        return ModelOutputs(outputs, calls[0])

    def outputs(
        self, named: dict[str, Tensor] | None, x: Tree, draws: KeyedRandomMode | None = None
    ) -> Tree:
        """The model's outputs, as a tree; its random numbers come from `draws`."""
        arguments, keywords = (
            ((x,), {}) if isinstance(x, Tensor) else call_arguments(x, self.inputs)
        )
        with draws or nullcontext():
            if named is None:
                outputs = self.module(*arguments, **keywords)
            else:
                outputs = functional_call(self.module, named, arguments, keywords)
        return outputs if isinstance(outputs, Tensor) else to_plain_tree(outputs)

    @contextmanager
    def _capture_features(self) -> Iterator[list[Tensor | None]]:
        """Record the head's input of every call; None for a call without exactly one tensor."""
        if self.head is None:
            raise QuiverError(
                "this method needs the model's features, which are what its head is given: name "
                "one submodule as personal, such as personal=('head',)."
            )
        calls: list[Tensor | None] = []

        def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            one = len(arguments) == 1 and not keywords and isinstance(arguments[0], Tensor)
            calls.append(arguments[0] if one else None)

        hook = self.module.get_submodule(self.head).register_forward_pre_hook(
            note, with_kwargs=True
        )
        try:
            yield calls
        finally:
            hook.remove()


class ProgramPool:
    """Copies of a program, each on its own module."""

    def __init__(self, template: Program) -> None:
        self._template = template
        self._programs: dict[tuple[int, int, int], Program] = {}
        self._templates: dict[int, Program] = {}
        self._opened: dict[int, tuple[Task | None, Tensor | None]] = {}

    def take(self, slot: int = 0, model: int = 0) -> Program:
        """This worker's own program: a module can be bound to only one model at a time.

        `model` says which of the client's models it is, as each has its own running statistics.
        """
        own, _ = self._opened.get(WORKER.index, (None, None))
        template = self._template if own is None else self._templates[id(own)]
        key = (WORKER.index, slot, 0 if own is None else id(own))
        if key not in self._programs:
            # From a template that no worker computes on: another one may be in use during the copy.
            self._programs[key] = template.copy()
        program = self._programs[key]
        if program.statistics.names:
            program.bind_statistics(self.statistics[model])
        return program

    def open_client(self, own: Task | None, statistics: Tensor | None) -> None:
        """Point this worker's modules at this client: its own model, if it has one.

        They keep their statistics in [models, size], in place.
        """
        if own is not None and id(own) not in self._templates:
            self._templates[id(own)] = self._template.for_client(own)
        self._opened[WORKER.index] = own, statistics

    @property
    def statistics(self) -> Tensor:
        """Running statistics of the client that this worker opened last."""
        statistics = self._opened[WORKER.index][1]
        assert statistics is not None
        return statistics


class Executor(Protocol):
    """Computes the models of a chunk of clients, with a chunk size for training and evaluation."""

    @property
    def name(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def evaluation_chunk(self) -> int: ...
    @property
    def image_format(self) -> torch.memory_format: ...
    def forward(
        self, program: Program, point: Params, x: Tree, features: bool = False
    ) -> ModelOutputs:
        """Outputs of k stacked models for inputs [k, n, …], in eval mode and without gradients."""

    def bind(
        self,
        program: Program,
        point: Params,
        part: Part,
        losses: Losses | None = None,
        features: bool = False,
        training: bool = True,
    ) -> Gradient:
        """The gradient of one part at these stacked parameters, which may change in place.

        `training` selects train mode, with dropout, or eval mode.
        """


@dataclass(frozen=True)
class Vectorized:
    """All clients of a chunk at once."""

    name: str = "vectorized"
    chunk: int = 25
    evaluation_chunk: int = 100
    image_format: torch.memory_format = torch.contiguous_format
    compiled: Stacked | None = None
    """Computes the models of a gradient in place of `stacked`."""

    def forward(
        self, program: Program, point: Params, x: Tree, features: bool = False
    ) -> ModelOutputs:
        program.module.eval()
        with torch.no_grad():
            return call_stacked(program, program.named_params(point), x, features)

    def bind(
        self,
        program: Program,
        point: Params,
        part: Part,
        losses: Losses | None = None,
        features: bool = False,
        training: bool = True,
    ) -> Gradient:
        named = program.named_params(point)
        trained = program.param_names(part)
        losses = losses or make_losses(program.loss)
        program.module.train(training)

        def gradient(batch: Batch) -> Tensor:
            k = batch.clients
            leaves = [named[name][:k].detach().requires_grad_() for name in trained]
            parameters = {name: tensor[:k] for name, tensor in named.items()}
            parameters.update(zip(trained, leaves, strict=True))
            run_models = self.compiled or call_stacked
            seen = run_models(program, parameters, batch.inputs, features, batch.keys)
            loss = _total(losses(seen, batch.targets, k), batch.weights)
            return _flat_gradient(loss, leaves, k)

        return gradient


@dataclass(frozen=True)
class Sequential:
    """One client after the other on one module whose parameters are views of the client's row."""

    name: str = "sequential"
    chunk: int = 1
    evaluation_chunk: int = 1
    image_format: torch.memory_format = torch.channels_last

    def forward(
        self, program: Program, point: Params, x: Tree, features: bool = False
    ) -> ModelOutputs:
        program.module.eval()
        _bind(program, program.named_params(Params(*(align_rows(part)[0] for part in point))), ())
        with torch.no_grad():
            return _one(program.call(None, tree_map(self._first, x), features))

    def bind(
        self,
        program: Program,
        point: Params,
        part: Part,
        losses: Losses | None = None,
        features: bool = False,
        training: bool = True,
    ) -> Gradient:
        named = program.named_params(Params(*(part[0] for part in point)))
        leaves = _bind(program, named, program.param_names(part))
        losses = losses or make_losses(program.loss)
        program.module.train(training)

        def gradient(batch: Batch) -> Tensor:
            draws = None if batch.keys is None else KeyedRandomMode(batch.keys[0])
            inputs = tree_map(self._first, batch.inputs)
            seen = _one(program.call(None, inputs, features, draws))
            loss = _total(losses(seen, batch.targets, 1), batch.weights)
            flat = _flat_gradient(loss, leaves, 1)
            if program.padding and part != "shared":
                flat = nn.functional.pad(flat, (0, program.padding))
            return flat

        return gradient

    def _first(self, x: Tensor) -> Tensor:
        """The one client's, in the layout that is fastest for its layers."""
        one = x[0]
        return one.contiguous(memory_format=self.image_format) if one.ndim == 4 else one


def align_rows(part: Tensor) -> Tensor:
    """Rows that begin at a cache line; copied if they do not.

    Products depend in their last bits on where a matrix lies: a client's must not depend on which
    row of a shard it is.
    """
    return part if part.data_ptr() % CACHE_LINE == 0 else part.clone()


def choose_executor(name: str, task: Task, device: torch.device) -> Executor:
    """`auto`: together, unless the model is convolutional and computed on a CPU."""
    if name == "auto":
        name = "sequential" if is_convolutional(task) and device.type == "cpu" else "vectorized"
    if name == "vectorized":
        return Vectorized()
    # Convolutions are faster with channels last; PyTorch's GroupNorm is not.
    last = all(map(likes_channels_last, task.skeleton.modules()))
    return Sequential(image_format=torch.channels_last if last else torch.contiguous_format)


def is_convolutional(task: Task) -> bool:
    return any(isinstance(m, nn.modules.conv._ConvNd) for m in task.skeleton.modules())


def make_losses(loss: PerSample) -> Losses:
    """The task's loss on all clients' samples at once."""

    def losses(seen: ModelOutputs, y: Tree, k: int) -> Tensor:
        first: Tensor = y if isinstance(y, Tensor) else first_leaf(y)
        numbers = loss(flatten_clients(seen.outputs), flatten_clients(y))
        return numbers.view(first.shape[:2])

    return losses


def flatten_clients(tree: Tree) -> Tree:
    """All clients' samples in a row: [k, n, …] → [k·n, …]."""
    if isinstance(tree, Tensor):
        return tree.flatten(0, 1)
    return tree_map(lambda leaf: leaf.flatten(0, 1), tree)


def call_stacked(
    program: Program,
    named: dict[str, Tensor],
    x: Tree,
    features: bool,
    keys: Tensor | None = None,
) -> ModelOutputs:
    """Outputs of k models with stacked parameters for inputs [k, n, …], all at once."""

    def call(named: dict[str, Tensor], x: Tree, key: Tensor | None) -> Any:
        draws = None if key is None else KeyedRandomMode(key)
        if features:
            return program.call(named, x, features, draws)
        return program.outputs(named, x, draws)

    with disable_fused_kernels():
        outputs = torch.vmap(call, in_dims=(0, 0, None if keys is None else 0))(named, x, keys)
    return outputs if features else ModelOutputs(outputs, _no_features(outputs))


def compile_stacked() -> Stacked:
    """`stacked` by torch.compile, for models that draw nothing, where no features are needed."""
    compiled: dict[Program, Callable[..., Tree]] = {}

    def call(
        program: Program, named: dict[str, Tensor], x: Tree, features: bool, keys: Tensor | None
    ) -> ModelOutputs:
        if features or keys is not None:
            return call_stacked(program, named, x, features, keys)
        if program not in compiled:
            compiled[program] = torch.compile(torch.vmap(program.outputs))
        with disable_fused_kernels():
            outputs = compiled[program](named, x)
        return ModelOutputs(outputs, _no_features(outputs))

    return call


@contextmanager
def disable_fused_kernels() -> Iterator[None]:
    """Without torch's fused transformer layer and attention for CPUs: vmap has no rule for them."""
    layers, attention = torch.backends.mha, cast(Any, torch.backends.cuda)
    before = layers.get_fastpath_enabled(), attention.flash_sdp_enabled()
    layers.set_fastpath_enabled(False)
    attention.enable_flash_sdp(False)
    try:
        yield
    finally:
        layers.set_fastpath_enabled(before[0])
        attention.enable_flash_sdp(before[1])


def _no_features(outputs: Tree) -> Tensor:
    """Empty features [k, 0], so that vmapped functions always get a tensor."""
    first: Tensor = outputs if isinstance(outputs, Tensor) else first_leaf(outputs)
    return first.new_empty((len(first), 0))


def _one(seen: ModelOutputs) -> ModelOutputs:
    return ModelOutputs(*(tree_map(lambda leaf: leaf.unsqueeze(0), part) for part in seen))


def _total(losses: Tensor, weights: Tensor | None) -> Tensor:
    """The sum over clients of the mean over samples: its gradient is each client's own."""
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
