"""A task: a model as a function of its parameters, a loss, metrics, a personal part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from quiverfl.errors import QuiverError, suggest
from quiverfl.objectives import find_loss, find_metrics
from quiverfl.options import refuse_old_names
from quiverfl.seeds import key_hashes
from quiverfl.support.cards import ReprCard, format_thousands
from quiverfl.support.references import describe_origin
from quiverfl.trees import Layout, Tree, tree_map

InputStyle: TypeAlias = Literal["arguments", "tree"]
"""Whether a dictionary or tuple of inputs is several arguments of the model, or one."""
BufferUse: TypeAlias = Literal["personal", "mixed"]
"""Whether running statistics stay with their client, or are averaged with the shared part."""
BATCH_NORM = "batch_norm"
"""Among the personal prefixes: the parameters of all BatchNorm layers, as in FedBN."""


class Params(NamedTuple):
    """A whole model as two vectors: the shared parameters and the personal ones."""

    shared: Tensor
    personal: Tensor


class ModelOutputs(NamedTuple):
    """A model's outputs for some samples [n, …]."""

    outputs: Tree
    features: Tensor
    """Input of the head; empty if no method needs it."""


@refuse_old_names(named="named_params", initial="initial_params", module="make_module")
@dataclass(frozen=True, repr=False)
class Task(ReprCard):
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

    Running statistics are the buffers of a module whose `track_running_stats` is true, such as
    BatchNorm. They belong to a client: its training changes them, and they are never sent unless
    `buffers="mixed"`. "batch_norm" in `personal` names the parameters of all BatchNorm layers.

    A list of factories, one per client, makes personal parts that differ between clients, such as
    heads for other label sets. It becomes `own_models`; `model` is then the one whose personal part
    is the largest. Shared parts must be alike.
    """

    model: Callable[[], nn.Module]
    personal: tuple[str, ...] = ("head",)
    loss: Any = "cross_entropy"  # PerSample, once it has been looked up
    metrics: Any = None  # dict[str, AnyMetric], once they have been
    inputs: InputStyle = "arguments"
    buffers: BufferUse = "personal"
    own_models: tuple[Callable[[], nn.Module], ...] = ()

    def __post_init__(self) -> None:
        given: Any = self.model
        if isinstance(given, list | tuple) and not self.own_models:
            object.__setattr__(self, "own_models", tuple(given))
        if self.own_models:
            own = self._own_tasks
            object.__setattr__(self, "model", max(own, key=_personal_size).model)
        object.__setattr__(self, "metrics", find_metrics(self.metrics, self.loss))
        object.__setattr__(self, "loss", find_loss(self.loss))
        if self.inputs not in get_args(InputStyle):
            known = suggest(str(self.inputs), get_args(InputStyle))
            raise QuiverError(f"Task.inputs = {self.inputs!r}: {known}")
        if self.buffers not in get_args(BufferUse):
            known = suggest(str(self.buffers), get_args(BufferUse))
            raise QuiverError(f"Task.buffers = {self.buffers!r}: {known}")
        object.__setattr__(self, "personal", _check_prefixes(self.personal))
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise QuiverError(
                f"Task.model is a {type(self.model).__name__}: give a function that returns a "
                "fresh nn.Module, such as the class itself."
            )
        _check_model(self.skeleton)
        _check_layers(self.skeleton)
        object.__setattr__(self, "personal", _name_batch_norms(self.skeleton, self.personal))
        names = [name for name, _ in self._trainable()]
        every = [name for name, _ in self.skeleton.named_parameters()]
        if not every:
            raise QuiverError("the model has no parameters: there is nothing to train.")
        if not names:
            raise QuiverError(
                "every parameter of the model has requires_grad=False: there is nothing to train."
            )
        for prefix in self.personal:
            if any(_is_below(name, prefix) for name in names):
                continue
            if any(_is_below(name, prefix) for name in every):
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
                f"personal prefixes {self.personal} match every parameter that is trained: nothing "
                "would be shared. Name only the part that stays with the client, such as 'head'; "
                "personal = () shares all."
            )

    @cached_property
    def skeleton(self) -> nn.Module:
        """One instance; only the values of its frozen parameters are used."""
        with _SeededTorch(0):
            try:
                return self.model()
            except QuiverError:
                raise
            except Exception as error:
                # Also whatever a function of your own raises: where it did is all they need.
                raise QuiverError(
                    f"Task.model failed ({describe_origin(error)}): {type(error).__name__}: "
                    f"{error}. It is called without arguments: give those of the model with "
                    "lambda, such as model=lambda: MyModel(10)."
                ) from error

    @cached_property
    def _own_tasks(self) -> tuple[Task, ...]:
        """One for each client: those of the same factory are the same."""
        made: dict[int, Task] = {}
        for factory in self.own_models:
            if id(factory) not in made:
                made[id(factory)] = replace(self, model=factory, own_models=())
        tasks = tuple(made[id(factory)] for factory in self.own_models)
        for client, task in enumerate(tasks):
            _check_same_body(client, task, tasks[0])
        return tasks

    def of_client(self, client: int) -> Task:
        """The task with this client's own model; itself where all clients' are alike."""
        return self._own_tasks[client] if self.own_models else self

    @property
    def one_by_one(self) -> str | None:
        """Why its clients cannot be computed together; None if nothing is known against it."""
        if self.statistics_layout.names:
            return "batches of several clients are padded, which its running statistics would count"
        return "clients have models of their own" if self.own_models else None

    def title(self) -> str:
        return f"Task with {type(self.skeleton).__name__}"

    def fields(self) -> dict[str, str]:
        shared, personal = self.shared_layout.size, self.personal_layout.size
        return {
            "parameters": format_thousands(shared + personal),
            "personal": f"{', '.join(self.personal) or 'nothing'} ({format_thousands(personal)})",
            "loss": getattr(self.loss, "__name__", type(self.loss).__name__),
            "metrics": ", ".join(self.metrics) or "none",
        }

    def _trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((n, p) for n, p in self.skeleton.named_parameters() if p.requires_grad)

    @cached_property
    def shared_layout(self) -> Layout:
        return Layout.from_named((n, p) for n, p in self._trainable() if not self._is_personal(n))

    @cached_property
    def personal_layout(self) -> Layout:
        return Layout.from_named((n, p) for n, p in self._trainable() if self._is_personal(n))

    @cached_property
    def statistics_layout(self) -> Layout:
        """Running statistics, which are no parameters; empty for most models."""
        return Layout.from_named(_running_statistics(self.skeleton))

    def initial_statistics(self) -> Tensor:
        """Those of `model()`, the same for every client."""
        named = dict(_running_statistics(self.skeleton))
        return self.statistics_layout.join({n: leaf.float() for n, leaf in named.items()})

    @cached_property
    def batch_norms(self) -> tuple[str, ...]:
        """The names of all BatchNorm layers whose weights are trained."""
        return _find_batch_norms(self.skeleton)

    def _is_personal(self, name: str) -> bool:
        return any(_is_below(name, prefix) for prefix in self.personal)

    def initial_params(self, seed: int, client: int = 0) -> Params:
        """The parameters a fresh model of this client starts with, in float32."""
        with _SeededTorch(int(key_hashes(seed, "init", client)) >> 1):
            named = {n: _to_float(p.detach()) for n, p in self.model().named_parameters()}
        return Params(self.shared_layout.join(named), self.personal_layout.join(named))

    def with_own_part(self, params: Params, client: int, seed: int, start: int) -> Params:
        """The same shared part with this client's own personal one, where it has its own model.

        All clients' vectors are as long as the longest. Nothing trains or reads the zeros at the
        end of a shorter one.
        """
        if not self.own_models:
            return params
        personal = torch.zeros_like(params.personal)
        own = self.of_client(client).initial_params(seed, start).personal
        personal[: len(own)] = own
        return Params(params.shared, personal)

    def named_params(self, params: Params) -> dict[str, Tensor]:
        """Every parameter by name, as views into the two vectors."""
        return {
            **self.shared_layout.split(params.shared),
            **self.personal_layout.split(params.personal),
        }

    def make_module(self, params: Params, statistics: Tensor | None = None) -> nn.Module:
        """A model of its own with these parameters and running statistics, ready to use."""
        with _SeededTorch(0):
            module = self.model()
        module = module.to(device=params.shared.device, dtype=params.shared.dtype).eval()
        named = self.named_params(params)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in named:
                    parameter.copy_(named[name])
            if statistics is not None:
                kept = self.statistics_layout.split(statistics)
                for name, buffer in module.named_buffers():
                    if name in kept:
                        buffer.copy_(kept[name])
        return module

    @cached_property
    def head(self) -> str | None:
        """The one submodule that is the whole personal part, if there is one.

        Its inputs are the model's features.
        """
        if len(self.personal) != 1 or self.personal[0] not in dict(self.skeleton.named_modules()):
            return None
        return self.personal[0]


def _personal_size(task: Task) -> int:
    return task.personal_layout.size


def _check_same_body(client: int, own: Task, first: Task) -> None:
    """Refuse models that differ in more than their personal part."""
    bodies = [
        {
            **dict(zip(task.shared_layout.names, task.shared_layout.shapes, strict=True)),
            **dict(zip(task.statistics_layout.names, task.statistics_layout.shapes, strict=True)),
        }
        for task in (own, first)
    ]
    mine, theirs = bodies
    for name in (*theirs, *mine):
        if mine.get(name) != theirs.get(name):
            sizes = (f"{body[name]}" if name in body else "missing" for body in bodies)
            raise QuiverError(
                "the model of client {} differs from that of client 0 in its shared part: {!r} is "
                "{}, not {}. Only personal parts may differ, as shared ones are averaged number by "
                "number. Different bodies need an exchange of outputs on common data "
                "(distillation), which Quiver does not have.".format(client, name, *sizes)
            )
    frozen = dict(first.skeleton.named_parameters())
    for name, parameter in own.skeleton.named_parameters():
        same = name in frozen and torch.equal(parameter, frozen[name])
        if not parameter.requires_grad and not own._is_personal(name) and not same:
            raise QuiverError(
                f"the frozen parameter {name!r} of client {client}'s model is not that of client "
                "0's: clients that share a part must have the same frozen one. Load the same "
                "weights in both."
            )


def _to_float(values: Tensor) -> Tensor:
    """A half-precision model's values as float32; it is computed in the run's type."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _is_below(name: str, prefix: str) -> bool:
    """Whether a parameter lies below a prefix; `*` in it stands for anything."""
    if "*" in prefix:
        return fnmatchcase(name, prefix) or fnmatchcase(name, f"{prefix}.*")
    return name == prefix or name.startswith(prefix + ".")


def _check_prefixes(given: Any) -> tuple[str, ...]:
    """The personal prefixes; a single one may stand without brackets."""
    listed = (given,) if isinstance(given, str) else given
    if not isinstance(listed, Iterable) or not all(isinstance(p, str) for p in (*listed,)):
        raise QuiverError(
            f"Task.personal = {given!r}: give names of parts of the model, such as ('head',); () "
            "for none."
        )
    return tuple(listed)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise QuiverError(
            f"Task.model returned a {type(model).__name__}: it must return a fresh nn.Module. A "
            "function needs `return model` at its end."
        )


class _SeededTorch:
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


def call_arguments(x: Tree, inputs: InputStyle) -> tuple[tuple[Tree, ...], dict[str, Tree]]:
    """Arguments of a model's call: a tuple's parts in order, a dictionary's by name."""
    if inputs == "arguments" and isinstance(x, dict):
        return (), x
    if inputs == "arguments" and isinstance(x, tuple | list):
        return tuple(x), {}
    return (x,), {}


def to_plain_tree(outputs: Any) -> Tree:
    """A model's outputs as a tree of tensors: Hugging Face's objects become dictionaries."""
    if isinstance(outputs, Tensor):
        return outputs
    if hasattr(outputs, "logits") and not isinstance(outputs, tuple | dict):
        return {"logits": outputs.logits}
    if isinstance(outputs, Mapping):
        return {str(key): to_plain_tree(part) for key, part in outputs.items() if _is_tree(part)}
    if isinstance(outputs, tuple | list) and _is_tree(outputs):
        return tree_map(to_plain_tree, outputs)
    raise QuiverError(
        f"the model returns a {type(outputs).__name__}; it must return a tensor [n, …], a "
        "dictionary, tuple or list of tensors, or an object with .logits. Wrap it in a module "
        "whose forward picks what the loss needs."
    )


def _is_tree(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return all(_is_tree(part) for part in tree.values())
    if isinstance(tree, tuple | list):
        return all(_is_tree(part) for part in tree)
    return isinstance(tree, Tensor)


def _running_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers of every module that says it keeps running statistics, by name."""
    for prefix, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            yield from module.named_buffers(prefix, recurse=False)


def _name_batch_norms(model: nn.Module, prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The prefixes with "batch_norm" replaced by the names of these layers."""
    if BATCH_NORM not in prefixes or BATCH_NORM in dict(model.named_modules()):
        return prefixes
    layers = _find_batch_norms(model)
    if not layers:
        raise QuiverError(
            f"personal prefix {BATCH_NORM!r} names the trained parameters of BatchNorm layers, and "
            "the model has none: name another part, such as 'head'."
        )
    return (*(prefix for prefix in prefixes if prefix != BATCH_NORM), *layers)


def _find_batch_norms(model: nn.Module) -> tuple[str, ...]:
    """The names of the BatchNorm layers that have weights, and do not keep them as they are."""
    kinds = nn.modules.batchnorm._BatchNorm
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, kinds) and any(p.requires_grad for p in module.parameters())
    )


def _find_held_norms(model: nn.Module) -> set[nn.Module]:
    """BatchNorm layers that have statistics, and stay in use whatever mode the model is in."""
    before = model.training
    held = {
        module
        for module in model.train().modules()
        if not module.training and getattr(module, "running_mean", None) is not None
    }
    model.train(before)
    return held


def _check_layers(model: nn.Module) -> None:
    """Refuse layers that a client cannot train by itself, or whose shapes nobody knows yet."""
    held = _find_held_norms(model)
    for name, module in model.named_modules():
        what = f"the model's layer {name!r} is a {type(module).__name__}"
        lazy = isinstance(module, nn.modules.lazy.LazyModuleMixin)
        if lazy and module.has_uninitialized_params():
            raise QuiverError(
                f"{what}, whose shape is not known before its first call: let `model` call it "
                "once on an example, or give the shape."
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise QuiverError(
                f"{what}, which needs all processes at every step; clients meet once a round. Use "
                "nn.BatchNorm2d, whose statistics stay with a client, or qv.group_norm(model)."
            )
        tracks = getattr(module, "track_running_stats", False) or module in held
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not tracks:
            raise QuiverError(
                f"{what} without running statistics: in use its output for a sample would depend "
                "on the rest of the batch. Set track_running_stats=True, or use "
                "qv.group_norm(model)."
            )
    for name, buffer in _running_statistics(model):
        if not torch.isfinite(buffer).all():
            raise QuiverError(
                f"the running statistics {name!r} of the model hold NaN or infinite numbers: the "
                "weights that it was given are damaged, or its training diverged."
            )
