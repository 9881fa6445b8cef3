"""A model's shapes and behaviour, found by calling it on a few samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch

from quiverfl.data.federated import FederatedData
from quiverfl.engine.local.examples import Batch, Examples
from quiverfl.engine.local.model_rng import KeyedRandomMode
from quiverfl.engine.local.programs import Executor, Program, Vectorized, choose_executor
from quiverfl.engine.start import check_state, make_state
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.methods.contract import Method, Start
from quiverfl.task import ModelOutputs, Params, Task
from quiverfl.trees import Tree, first_leaf, tree_map

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shapes of one sample's features, () without a head, and of its outputs."""


class ModelProbe:
    """A model and two samples of the first client to try it on."""

    def __init__(self, task: Task, program: Program, point: Params, x: Tree, y: Tree) -> None:
        """Inputs and targets are those of two samples, [2, …]."""
        self._task, self._program, self._point, self._x, self._y = task, program, point, x, y

    @classmethod
    def of(
        cls, task: Task, examples: Examples, dtype: torch.dtype, device: torch.device
    ) -> ModelProbe | None:
        """None where there are no clients."""
        if not len(examples.sizes):
            return None
        second = min(1, int(examples.sizes[0]) - 1)
        x, y = examples.gather(np.zeros(1, dtype=np.int64), np.array([[0, second]]))
        point = Params(*(part.to(device, dtype) for part in task.initial_params(0)))
        one = (tree_map(lambda leaf: leaf[0], part) for part in (x, y))
        return cls(task, Program.of(task, dtype, device), point, *one)

    @classmethod
    def from_data(cls, task: Task, data: FederatedData, dtype: torch.dtype) -> ModelProbe:
        """On the CPU, before anything is made for a run; the first sample twice."""

        def twice(leaf: Tensor) -> Tensor:
            return leaf[:1].expand(2, *leaf.shape[1:]).clone()

        def cast(leaf: Tensor) -> Tensor:
            return leaf.to(dtype) if leaf.is_floating_point() else leaf

        x, y = tree_map(twice, data.train.x), tree_map(twice, data.train.y)
        x = x if data.prepare is None else data.prepare(x)
        point = Params(*(part.to(dtype) for part in task.initial_params(0)))
        program = Program.of(task, dtype, torch.device("cpu"))
        return cls(task, program, point, tree_map(cast, x), tree_map(cast, y))

    def look(self, params: Params, features: bool) -> tuple[ModelOutputs, Tree]:
        """Outputs of stacked models for the samples, [k, 2, …], and the samples' targets."""
        self._program.module.eval()
        seen = []
        for own in zip(*params, strict=True):
            named = self._program.named_params(Params(*own))
            seen.append(self._program.call(named, self._x, features))
        outputs = tree_map(lambda *leaves: torch.stack(leaves), *(one.outputs for one in seen))
        targets = tree_map(lambda leaf: torch.stack([leaf] * len(seen)), self._y)
        return ModelOutputs(outputs, torch.stack([one.features for one in seen])), targets

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes of features and outputs; of several outputs the first."""
        program, named = self._program, self._program.named_params(self._point)
        program.module.eval()
        with torch.no_grad():
            try:
                seen = program.call(named, self._x, features=program.head is not None)
            except QuiverError:  # who needs features of a head that is called otherwise is told
                seen = program.call(named, self._x, features=False)
        features = tuple(seen.features.shape[1:]) if seen.features.numel() else ()
        return features, tuple(first_leaf(seen.outputs).shape[1:])

    def first_state(self, method: Method) -> Any:
        """A possible initial state of one client: its fields have the shapes of all clients'."""
        own, common = (Params(*(part.clone() for part in self._point)) for _ in range(2))
        start = Start(own, common, 1, np.random.default_rng(0), *self.shapes)
        state = make_state(method, self._task, start)
        check_state(method, self._task, state)
        return state

    @cached_property
    def draws(self) -> bool:
        """Whether it draws random numbers in training, of the kinds that can be keyed."""
        self._program.module.train()
        draws = KeyedRandomMode(self._key())
        with torch.no_grad():
            self._program.outputs(self._program.named_params(self._point), self._x, draws)
        return draws.count > 0

    def why_not_stacked(self, loops: bool = False) -> str | None:
        """Why vmap cannot compute it for several clients at once; None if it can.

        Where vmap has no rule for an operation it loops over the clients, slowly. That counts as
        something it cannot do, unless `loops` are allowed.
        """
        if self._task.one_by_one is not None:
            return self._task.one_by_one
        point = Params(*(torch.stack([part, part]) for part in self._point))
        x, y = (
            tree_map(lambda leaf: torch.stack([leaf, leaf]), part) for part in (self._x, self._y)
        )
        keys = torch.stack([self._key(), self._key()])
        together = Vectorized()
        with _vmap_loops(loops):
            try:
                together.bind(self._program, point, "whole")(Batch(2, x, y, keys=keys))
                together.forward(self._program, point, x)
            except Exception as error:  # any error: the model works one by one, or raises it again
                return _first_sentence(error)
        return None

    def is_exact(self) -> bool:
        """Whether a number is computed the same wherever it lies in a tensor of many clients.

        PyTorch computes a sigmoid one way in full vectors and another way in what is left.
        """
        self._program.module.train()
        named = self._program.named_params(self._point)
        named = {name: leaf.detach().requires_grad_() for name, leaf in named.items()}
        x = tree_map(_differentiable, self._x)
        loss = self._task.loss(self._program.outputs(named, x), self._y)
        return _operations_of(loss).issubset(EXACT)

    def _key(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._point.shared.device)


EXACT = {
    *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "LeakyRelu", "Sum", "Mean"),
    *("Addmm", "Mm", "Bmm", "Baddbmm", "Embedding", "NativeLayerNorm"),
    *("LogSoftmax", "NllLoss", "MseLoss", "AccumulateGrad"),
    *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze"),
    *("Unsqueeze", "Select", "Slice", "Cat", "Clone", "Alias", "ToCopy"),
}
"""Operations that compute rows, or numbers, by themselves; as autograd names them."""


def _differentiable(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_() if leaf.is_floating_point() else leaf


def _operations_of(result: Tensor) -> set[str]:
    """The names of the operations that a tensor was computed by."""
    waiting: list[Any] = [result.grad_fn]
    seen, names = set(waiting), set()
    while waiting:
        node = waiting.pop()
        names.add(type(node).__name__.partition("Backward")[0])
        inputs = {inner for inner, _ in getattr(node, "next_functions", ())} - seen - {None}
        seen |= inputs
        waiting += inputs
    return names


def executor_for(name: str, task: Task, device: torch.device, probe: ModelProbe | None) -> Executor:
    """The executor by its name; `auto` takes one that can compute the model, and says so."""
    executor = choose_executor(name, task, device)
    if probe is None or not isinstance(executor, Vectorized):
        return executor
    reason = probe.why_not_stacked(loops=name == "vectorized")
    if reason is None:
        return executor
    if name == "vectorized":
        refuse_stacked(reason)
    warnings.warn(
        f"the model cannot be computed for several clients at once ({reason}), so it is computed "
        "for one after the other: executor = 'sequential'.",
        QuiverWarning,
        stacklevel=2,
    )
    return choose_executor("sequential", task, device)


def refuse_stacked(reason: str) -> None:
    raise QuiverError(
        f"executor = 'vectorized': the model cannot be computed for several clients at once "
        f"({reason}). Use 'sequential' or 'auto'."
    )


@contextmanager
def _vmap_loops(allowed: bool) -> Iterator[None]:
    """Whether vmap may loop where it has no rule; its warning is not for the user's eyes here."""
    functorch: Any = _functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(allowed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


def _first_sentence(error: Exception) -> str:
    """First sentence of torch's message; the rest asks the reader to file an issue."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].strip().rstrip(".")
