"""A head on a frozen body may be trained on the body's features, computed once.

They cannot change during the phase, unless inputs are augmented at every visit. That holds only for
a model that is body → head → output, which is proven from the graph of its call and not guessed:
the model is traced symbolically; its head is called once, with one tensor; what that call returns
is returned by the model and used by nothing else; and nothing outside of the head reads a parameter
that is in it. A model that cannot be traced, such as one that branches on values, has no proof.
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, fx, nn

from quiverfl.engine.examples import Examples
from quiverfl.engine.picks import Picks
from quiverfl.engine.programs import Executor, Program
from quiverfl.task import Point
from quiverfl.trees import Tree, mapped

Integers = npt.NDArray[np.int64]

BATCH = 512
"""Samples per client that pass through the body at once."""


class HeadFeatures:
    """The features of some clients' training samples, instead of the samples."""

    def __init__(self, x: Tensor, y: Tree) -> None:
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
        together = mapped(lambda *slabs: torch.cat(slabs, dim=1), *targets)
        return cls(torch.cat(parts, dim=1), together)

    def pick(self, rows: Integers, samples: Integers, keys: object = None) -> Picks:
        """Of the first clients, as many as there are rows."""
        return Picks(torch.from_numpy(samples))

    def take(self, picks: Picks) -> tuple[Tensor, Tree]:
        index = picks.places
        clients = torch.arange(len(index), device=self._x.device)[:, None]
        return self._x[clients, index], mapped(lambda leaf: leaf[clients, index], self._y)


def head_is_last(module: nn.Module, head: str | None) -> bool:
    """Whether the model is body → head → output, proven from its graph."""
    if head is None:
        return False
    own = copy.deepcopy(module)
    try:
        training, graph = (
            _Tracer(own.get_submodule(head)).trace(own.train(m)) for m in (True, False)
        )
    except Exception:  # whatever the model does that cannot be traced: there is no proof then
        return False
    if str(training) != str(graph):  # it computes something else in training
        return False
    nodes = list(graph.nodes)
    calls = [node for node in nodes if node.op == "call_module" and node.target == head]
    result = next(node for node in nodes if node.op == "output").args[0]
    if len(calls) != 1 or result is not calls[0] or len(calls[0].users) != 1:
        return False
    given = calls[0].args
    if len(given) != 1 or calls[0].kwargs or not isinstance(given[0], fx.Node):
        return False
    reads = any(_inside(str(node.target), head) for node in nodes if node.op == "get_attr")
    below = any(_below(str(node.target), head) for node in nodes if node.op == "call_module")
    return not reads and not below and not _shares_parameters(module, head)


class _Tracer(fx.Tracer):
    """The head is one node of the graph, whatever is in it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self._head = head

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m is self._head or super().is_leaf_module(m, module_qualified_name)


def _shares_parameters(module: nn.Module, head: str) -> bool:
    """Whether a parameter of the head is one of the body, too."""
    places: dict[int, set[bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(_below(name, head))
    return any(len(found) > 1 for found in places.values())


def _below(name: str, head: str) -> bool:
    return name.startswith(head + ".")


def _inside(name: str, head: str) -> bool:
    return name == head or _below(name, head)
