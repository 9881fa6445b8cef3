"""What is learned: a model as a function of its parameters, a loss, metrics, a personal part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from quiverfl.errors import QuiverError, nearest
from quiverfl.objectives import find_loss, find_metrics
from quiverfl.seeds import hashed
from quiverfl.trees import Layout, Tree, mapped

Inputs: TypeAlias = Literal["arguments", "tree"]
"""Whether a dictionary or tuple of inputs is several arguments of the model, or one."""


class Point(NamedTuple):
    """A whole model as two vectors: the shared parameters and the personal ones."""

    shared: Tensor
    personal: Tensor


class Seen(NamedTuple):
    """What a model makes of some samples [n, …]."""

    outputs: Tree
    features: Tensor
    """What its head is given; empty where nobody asked for it."""


@dataclass(frozen=True)
class Task:
    """A model factory split into a shared and a personal part.

    `model` returns a fresh nn.Module. `personal` lists prefixes of parameter names: whatever lies
    below them is the personal part v, everything else is the shared part u. `*` in a prefix stands
    for anything, as in `*.lora_B`. An empty tuple means that nothing is personal.

    `loss` is a name in objectives.LOSSES or a function that gives one number per sample; `metrics`
    are names in objectives.METRICS, or a dictionary of names, such functions and `Metric`s. The
    first metric is the one that results are judged by.

    Inputs that are a dictionary are given to the model by name, those of a tuple one by one;
    `inputs="tree"` gives either as the one argument it is.

    Parameters with `requires_grad=False` stay as they are: neither trained nor sent, and kept once
    for all clients, as buffers are. Their values are those of `model()` whatever the run's seed.
    """

    model: Callable[[], nn.Module]
    personal: tuple[str, ...] = ("head",)
    loss: Any = "cross_entropy"  # PerSample, once it has been looked up
    metrics: Any = None  # dict[str, AnyMetric], once they have been
    inputs: Inputs = "arguments"

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", find_metrics(self.metrics, self.loss))
        object.__setattr__(self, "loss", find_loss(self.loss))
        if self.inputs not in get_args(Inputs):
            known = nearest(str(self.inputs), get_args(Inputs))
            raise QuiverError(f"Task.inputs = {self.inputs!r}: {known}")
        if isinstance(self.personal, str):
            object.__setattr__(self, "personal", (self.personal,))
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise QuiverError(
                f"Task.model is a {type(self.model).__name__}: give a function that returns a "
                "fresh nn.Module, such as the class itself."
            )
        _refuse_batch_statistics(self.skeleton)
        names = [name for name, _ in self._trainable()]
        every = [name for name, _ in self.skeleton.named_parameters()]
        if not every:
            raise QuiverError("the model has no parameters: there is nothing to train.")
        if not names:
            raise QuiverError(
                "every parameter of the model has requires_grad=False: there is nothing to train."
            )
        for prefix in self.personal:
            if any(_below(name, prefix) for name in names):
                continue
            if any(_below(name, prefix) for name in every):
                raise QuiverError(
                    f"personal prefix {prefix!r} matches frozen parameters only "
                    "(requires_grad=False): name a part that is trained."
                )
            tops = sorted({name.split(".")[0] for name in names})
            raise QuiverError(
                f"personal prefix {prefix!r} matches no parameter of the model; "
                f"its top-level parts are: {', '.join(tops)}."
            )
        if not self.shared_layout.size:
            raise QuiverError(
                f"personal prefixes {self.personal} match every parameter: nothing would be "
                "shared. Name only the part that stays with the client, such as 'head'."
            )

    @cached_property
    def skeleton(self) -> nn.Module:
        """One instance, of whose values only the frozen ones are used."""
        with _seeded(0):
            return self.model()

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self.skeleton.named_parameters() if p.requires_grad)

    @cached_property
    def shared_layout(self) -> Layout:
        return Layout.of((n, p) for n, p in self._trainable() if not self._mine(n))

    @cached_property
    def personal_layout(self) -> Layout:
        return Layout.of((n, p) for n, p in self._trainable() if self._mine(n))

    def _mine(self, name: str) -> bool:
        return any(_below(name, prefix) for prefix in self.personal)

    def initial(self, seed: int, client: int = 0) -> Point:
        """The parameters a fresh model of this client starts with, in float32."""
        with _seeded(int(hashed(seed, "init", client)) >> 1):
            named = {n: _whole(p.detach()) for n, p in self.model().named_parameters()}
        return Point(self.shared_layout.join(named), self.personal_layout.join(named))

    def named(self, point: Point) -> dict[str, Tensor]:
        """Every parameter by name, as views into the two vectors."""
        return {
            **self.shared_layout.split(point.shared),
            **self.personal_layout.split(point.personal),
        }

    def module(self, point: Point) -> nn.Module:
        """A model of its own with these parameters, ready to use."""
        with _seeded(0):
            module = self.model()
        module = module.to(device=point.shared.device, dtype=point.shared.dtype).eval()
        named = self.named(point)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in named:
                    parameter.copy_(named[name])
        return module

    @cached_property
    def head(self) -> str | None:
        """The one submodule that is the whole personal part, where there is one.

        What it is given are the model's features.
        """
        if len(self.personal) != 1 or self.personal[0] not in dict(self.skeleton.named_modules()):
            return None
        return self.personal[0]


def _whole(values: Tensor) -> Tensor:
    """Of a model that comes in half precision: it is computed in the run's type."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _below(name: str, prefix: str) -> bool:
    """Whether a parameter lies below a prefix; `*` in it stands for anything."""
    if "*" in prefix:
        return fnmatchcase(name, prefix) or fnmatchcase(name, f"{prefix}.*")
    return name == prefix or name.startswith(prefix + ".")


class _seeded:
    """Layers draw their initial values from torch's global generator: seed a fork of it.

    The only place where the global generator is touched; it is put back as it was.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._before = torch.random.get_rng_state()
        torch.default_generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        torch.random.set_rng_state(self._before)


def given(x: Tree, inputs: Inputs) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """How a model is given its inputs: a tuple's parts one by one, a dictionary's by name."""
    if inputs == "arguments" and isinstance(x, dict):
        return (), x
    if inputs == "arguments" and isinstance(x, tuple | list):
        return tuple(x), {}
    return (x,), {}


def plain(found: Any) -> Tree:
    """What a model returns as a tree of tensors: Hugging Face's outputs become dictionaries."""
    if isinstance(found, Tensor):
        return found
    if hasattr(found, "logits") and not isinstance(found, tuple | dict):
        return {"logits": found.logits}
    if isinstance(found, Mapping):
        return {str(key): plain(part) for key, part in found.items() if _is_tree(part)}
    if isinstance(found, tuple | list) and _is_tree(found):
        return mapped(plain, found)
    raise QuiverError(
        f"the model returns a {type(found).__name__}; it must return a tensor [n, …], a "
        "dictionary, tuple or list of tensors, or an object with .logits. Wrap it in a module "
        "whose forward picks what the loss needs."
    )


def _is_tree(found: Any) -> bool:
    if isinstance(found, Mapping):
        return all(_is_tree(part) for part in found.values())
    if isinstance(found, tuple | list):
        return all(_is_tree(part) for part in found)
    return isinstance(found, Tensor)


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise QuiverError(
                f"the model's layer {name!r} is a {kind}, which mixes the samples of a batch and "
                "keeps running statistics; a client's model must be a pure function of its "
                "parameters and of one sample. Replace all of them by GroupNorm in one call: "
                "model=lambda: qv.group_norm(make_model())."
            )
        if getattr(module, "track_running_stats", False):
            raise QuiverError(
                f"the model's layer {name!r} is a {kind} that keeps running statistics; a client's "
                "model must be a pure function of its parameters: set track_running_stats=False."
            )
