"""What a model does, found out by trying it on a few samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch

from quiverfl.data.federated import FederatedData
from quiverfl.engine.draws import KeyedDraws
from quiverfl.engine.examples import Examples
from quiverfl.engine.programs import Executor, Program, Vectorized, choose_executor
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.task import Point, Task
from quiverfl.trees import Tree, mapped


class Trial:
    """A model and two samples of the first client to try it on."""

    def __init__(self, program: Program, point: Point, x: Tree, y: Tree) -> None:
        """Inputs and targets are those of two samples, [2, …]."""
        self._program, self._point, self._x, self._y = program, point, x, y

    @classmethod
    def of(
        cls, task: Task, examples: Examples, dtype: torch.dtype, device: torch.device
    ) -> Trial | None:
        """None where there are no clients."""
        if not len(examples.sizes):
            return None
        second = min(1, int(examples.sizes[0]) - 1)
        x, y = examples.gather(np.zeros(1, dtype=np.int64), np.array([[0, second]]))
        point = Point(*(part.to(device, dtype) for part in task.initial(0)))
        one = (mapped(lambda leaf: leaf[0], part) for part in (x, y))
        return cls(Program.of(task, dtype, device), point, *one)

    @classmethod
    def here(cls, task: Task, data: FederatedData, dtype: torch.dtype) -> Trial:
        """On the CPU, before anything is made for a run; the first sample twice."""

        def twice(leaf: Tensor) -> Tensor:
            return leaf[:1].expand(2, *leaf.shape[1:]).clone()

        def cast(leaf: Tensor) -> Tensor:
            return leaf.to(dtype) if leaf.is_floating_point() else leaf

        x, y = mapped(twice, data.train.x), mapped(twice, data.train.y)
        x = x if data.prepare is None else data.prepare(x)
        point = Point(*(part.to(dtype) for part in task.initial(0)))
        program = Program.of(task, dtype, torch.device("cpu"))
        return cls(program, point, mapped(cast, x), mapped(cast, y))

    def draws(self) -> bool:
        """Whether it draws random numbers in training, of the kinds that can be keyed."""
        self._program.module.train()
        draws = KeyedDraws(self._key())
        with torch.no_grad():
            self._program.outputs(self._program.named(self._point), self._x, draws)
        return draws.count > 0

    def why_not_stacked(self, loops: bool = False) -> str | None:
        """Why vmap cannot compute it for several clients at once; None if it can.

        Where vmap has no rule for an operation it loops over the clients, slowly. That counts as
        something it cannot do, unless `loops` are allowed.
        """
        point = Point(*(torch.stack([part, part]) for part in self._point))
        x, y = (mapped(lambda leaf: torch.stack([leaf, leaf]), part) for part in (self._x, self._y))
        keys = torch.stack([self._key(), self._key()])
        together = Vectorized()
        with _vmap_loops(loops):
            try:
                together.bind(self._program, point, "whole")(2, x, y, None, keys)
                together.see(self._program, point, x)
            except Exception as error:  # whatever it is: one by one it works, or says it again
                return _first_sentence(error)
        return None

    def _key(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._point.shared.device)


def executor_for(name: str, task: Task, device: torch.device, trial: Trial | None) -> Executor:
    """The executor by its name; `auto` takes one that can compute the model, and says so."""
    executor = choose_executor(name, task, device)
    if trial is None or not isinstance(executor, Vectorized):
        return executor
    reason = trial.why_not_stacked(loops=name == "vectorized")
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
    """Of torch's message, whose rest invites to file an issue."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].strip().rstrip(".")
