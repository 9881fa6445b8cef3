"""A head on a frozen body may be trained on the body's features, computed once.

They cannot change during the phase, unless inputs are augmented at every visit. That holds only for
a model that is body → head → output, which is proven from the graph of its call and not guessed:
the model is traced symbolically; its head is called once, with one tensor; what that call returns
is returned by the model and used by nothing else; and nothing outside of the head reads a parameter
that is in it. A model that cannot be traced, such as one that branches on values, has no proof.
"""

from __future__ import annotations

import copy

from torch import fx, nn


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
    return any(len(owners) > 1 for owners in places.values())


def _below(name: str, head: str) -> bool:
    return name.startswith(head + ".")


def _inside(name: str, head: str) -> bool:
    return name == head or _below(name, head)
