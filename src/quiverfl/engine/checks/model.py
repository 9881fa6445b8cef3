"""Checks of a model, its loss and its metrics, on two samples; errors are one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checks.probe import ModelProbe, refuse_stacked
from quiverfl.engine.local.examples import Batch
from quiverfl.engine.local.model_rng import KeyedRandomMode
from quiverfl.engine.local.programs import Program, Sequential
from quiverfl.engine.local.trainer import phase_settings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Method, Phase, Train
from quiverfl.methods.state import select_fields
from quiverfl.objectives import Metric, cross_entropy
from quiverfl.task import Params, Task
from quiverfl.training import Training
from quiverfl.trees import Tree, first_leaf, tree_leaves, tree_map

# Targets that do not fit the loss: the usual slips, each with what to write instead.


def check_targets(task: Task, y: Tree, outputs: Tree) -> None:
    """Labels for the default loss, as they are in the data; other losses raise by themselves."""
    if task.loss is cross_entropy and isinstance(y, Tensor) and isinstance(outputs, Tensor):
        _check_class_numbers(y, outputs)


def _check_class_numbers(y: Tensor, outputs: Tensor) -> None:
    """Inputs of cross-entropy: one class number for each row of outputs."""
    shape = tuple(y.shape[1:])
    if y.ndim == 2 and y.shape[1] > 1 and outputs.ndim == 2 and y.shape[1] == outputs.shape[1]:
        whole = bool(((y == 0) | (y == 1)).all())
        if whole and bool((y.sum(dim=1) == 1).all()):
            raise QuiverError(
                f"the labels are one-hot ({y.shape[1]} columns): give class numbers, "
                "y.argmax(axis=1)."
            )
        raise QuiverError(
            f"targets of shape {shape} and the default loss, cross-entropy: it takes class "
            "numbers. Several labels take loss='bce', several numbers loss='mse', next tokens "
            "loss='next_token' (Task(loss=…) or [task])."
        )
    if y.ndim == 2 and y.shape[1] == 1:
        raise QuiverError("the labels have shape (n, 1): give a flat array, y.reshape(-1).")
    if y.is_floating_point():
        if bool((y == y.round()).all()):
            raise QuiverError(
                f"the labels are {str(y.dtype).removeprefix('torch.')}: make them whole numbers, "
                "y.astype(int)."
            )
        raise QuiverError(
            "the targets are numbers, not classes, and the default loss is cross-entropy: for "
            "regression give loss='mse' (Task(loss='mse') or [task]), or a loss of your own that "
            "gives one number per sample."
        )


WRONG = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)
"""Errors that torch and a model's own code raise for inputs they cannot take."""
CPU, KEY = torch.device("cpu"), torch.int64


def check_model(task: Task, data: FederatedData, executor: str = "auto") -> None:
    """Two samples through the model, in training and in use, then through loss and metrics."""
    x, y = (tree_map(_first_two, part) for part in (data.train.x, data.train.y))
    x = data.prepare(x) if data.prepare is not None else x
    x, y = tree_map(_to_float32, x), tree_map(_to_float32, y)
    program = Program.of(task, torch.float32, CPU)
    with torch.no_grad():
        _check_training(program, x)
        outputs = _check_use(program, x)
    _check_samples(outputs, len(first_leaf(y)))
    _check_labels(outputs, data)
    check_targets(task, data.train.y, outputs)
    _check_numbers("loss", task.loss, outputs, y)
    for name, metric in task.metrics.items():
        if name == "loss":
            raise QuiverError("a metric is called 'loss', which is the loss: choose another name.")
        _check_numbers(f"metric {name!r}", metric, outputs, y)
    _check_gradient(program, task.initial_params(0), x, y)
    if executor == "vectorized":
        reason = ModelProbe(task, program, task.initial_params(0), x, y).why_not_stacked(loops=True)
        if reason is not None:
            refuse_stacked(reason)


def check_own_models(task: Task, data: FederatedData, executor: str) -> None:
    """Check clients' own models like `check_model`, each on its own client's data."""
    if len(task.own_models) != data.clients:
        raise QuiverError(
            f"Task.model lists {len(task.own_models)} models for {data.clients} clients: give one "
            "for each. On ranks clients have one model for all."
        )
    if executor == "vectorized" and task.one_by_one is not None:
        refuse_stacked(task.one_by_one)
    highest: dict[int, tuple[int, int]] = {}
    for client in range(data.clients):
        most, kind = -1, id(task.of_client(client))
        if data.classes is not None:
            labels = [split.of_client(client)[1] for split in (data.train, data.test)]
            most = max((int(y.max()) for y in labels if len(y)), default=-1)
        highest[kind] = max(highest.get(kind, (-1, client)), (most, client))
    for most, client in highest.values():
        classes = None if data.classes is None else most + 1
        try:
            own = replace(data.select([client]), classes=classes)
            check_model(task.of_client(client), own, executor)
        except QuiverError as error:
            raise QuiverError(f"client {client}: {error}") from error


def check_sent_parts(task: Task, method: Method, state: Any) -> None:
    """Refuse a method that sends more than the shared part, where the other part differs.

    NaN in the personal part is followed.
    """
    fields = select_fields(state, "personal")
    gone = {name: torch.full_like(leaf, float("nan")) for name, leaf in fields.items()}
    sizes = ((), (task.shared_layout.size,))
    for name, leaf in method.message(state._replace(**gone)).items():
        if tuple(leaf.shape) not in sizes or leaf.isnan().any():
            raise QuiverError(
                f"{method.title} sends {name!r} of shape {tuple(leaf.shape)}, and clients have "
                "personal parts of their own, which cannot be averaged: use a method that sends "
                "the shared part alone, such as dfedpgp, fedper or fedrep."
            )


def check_batch_sizes(
    task: Task, data: FederatedData, phases: Iterable[Phase], training: Training
) -> None:
    """Refuse a batch of one sample where a layer needs several to compute statistics of."""
    if not task.statistics_layout.size:
        return
    trains = [t for p in phases for t in getattr(p, "phases", (p,)) if isinstance(t, Train)]
    for client, count in enumerate(data.train.sizes.tolist()):
        for phase in trains if count else ():
            size = phase_settings(phase, training).batch_size or count
            smallest = count % size or size
            if phase.lookahead is not None and phase.lookahead.split_batch:
                smallest = max(1, smallest // 2)
            if smallest == 1 and _needs_several(task, data):
                raise QuiverError(
                    f"client {client} has {count} training samples, so with training.batch_size = "
                    f"{size} a step sees one sample alone, of which BatchNorm can compute no "
                    "statistics: choose another batch_size, more samples per client "
                    "(data.min_samples), or qv.group_norm(model)."
                )


def _needs_several(task: Task, data: FederatedData) -> bool:
    """Whether training on one sample fails where it does not on two."""
    x = tree_map(lambda leaf: leaf[:1], data.train.x)
    x = tree_map(_to_float32, data.prepare(x) if data.prepare is not None else x)
    program = Program.of(task, torch.float32, CPU)
    program.module.train()
    try:
        with torch.no_grad():
            _outputs(program, x, KeyedRandomMode(torch.zeros((), dtype=KEY)))
    except QuiverError:
        return True
    return False


def _first_two(leaf: Tensor) -> Tensor:
    two = leaf[:2]
    return torch.cat([two, two])[:2]  # also where there is one sample only


def _to_float32(leaf: Tensor) -> Tensor:
    return leaf.to(torch.float32) if leaf.is_floating_point() else leaf


def _check_training(program: Program, x: Tree) -> None:
    """It draws nothing but what can be keyed, and changes no buffer but running statistics."""
    places = dict(program.module.named_buffers())
    buffers = {name: buffer.clone() for name, buffer in places.items()}
    program.module.train()
    watch = _Watch(torch.zeros((), dtype=KEY))
    _outputs(program, x, watch)
    if watch.culprit is not None:
        raise QuiverError(
            f"the model draws random numbers with {watch.culprit}, which cannot be reproduced per "
            "client. nn.Dropout and its variants, torch.rand, randn, rand_like, randn_like and "
            "bernoulli can; for dropout inside nn.LSTM or nn.GRU put nn.Dropout between layers."
        )
    for name, buffer in program.module.named_buffers():
        known, replaced = name in program.statistics.names, buffer is not places.get(name)
        if known and replaced:
            raise QuiverError(
                f"the model puts another tensor in place of its running statistics {name!r}; "
                f"change them in place, self.{name.rpartition('.')[2]}.copy_(…)."
            )
        if not known and (replaced or not torch.equal(buffer, buffers[name])):
            raise QuiverError(
                f"the model changes its buffer {name!r} in forward, and its module does not say "
                "that it keeps running statistics. Set track_running_stats = True in that module, "
                "and change the buffer in place; or make it a parameter, or do not change it."
            )


def _check_use(program: Program, x: Tree) -> Tree:
    """In eval mode it draws nothing, and a sample's output does not depend on its batch."""
    program.module.eval()
    watch = _Watch(torch.zeros((), dtype=KEY))
    outputs = _outputs(program, x, watch)
    if watch.culprit is not None or watch.count:
        raise QuiverError(
            "the model draws random numbers in evaluation too, not only in training: pass "
            "training=self.training to F.dropout, or draw only if self.training."
        )
    alone = _outputs(program, tree_map(lambda leaf: torch.cat([leaf[:1], leaf[:1]]), x))
    for (name, both), (_, one) in zip(tree_leaves(outputs), tree_leaves(alone), strict=True):
        if both.ndim and not torch.allclose(both[:1], one[:1], 1e-3, 1e-4, equal_nan=True):
            where = f", in its output {name!r}," if name else ""
            raise QuiverError(
                f"the model's output for a sample{where} depends on the other samples of the "
                "batch. Batches are padded, so it must not: normalise each sample by itself "
                "(nn.GroupNorm, nn.LayerNorm)."
            )
    return outputs


def _outputs(program: Program, x: Tree, draws: KeyedRandomMode | None = None) -> Tree:
    before = torch.random.get_rng_state()
    try:
        return program.outputs(None, x, draws)
    except WRONG as error:
        said = str(error).rstrip(". \n")
        raise QuiverError(f"the model does not take inputs {_shapes(x)}: {said}.") from error
    finally:
        torch.random.set_rng_state(before)


class _Watch(KeyedRandomMode):
    """Notes the first function that draws from torch's global generator all the same."""

    culprit: str | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = torch.random.get_rng_state()
        result = super().__torch_function__(function, types, args, kwargs)
        if self.culprit is None and not torch.equal(torch.random.get_rng_state(), before):
            self.culprit = getattr(function, "__name__", str(function))
        return result


def _check_samples(outputs: Tree, samples: int) -> None:
    for name, leaf in tree_leaves(outputs):
        if leaf.ndim == 0 or len(leaf) != samples:
            what = f"output {name!r}" if name else "output"
            raise QuiverError(
                f"the model's {what} has shape {tuple(leaf.shape)} for {samples} samples: the "
                "first dimension of everything a model returns is the samples."
            )


def _check_labels(outputs: Tree, data: FederatedData) -> None:
    classes = data.classes
    if classes is None or not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return
    count = outputs.shape[1]
    if count >= classes:
        return
    smallest = min((int(y.min()) for y in (data.train.y, data.test.y) if len(y)), default=0)
    remedy = f"give the model {classes} outputs."
    if smallest > 0 and classes - smallest <= count:
        remedy = f"they begin at {smallest}: subtract {smallest} from all of them, or {remedy}"
    raise QuiverError(
        f"labels go up to {classes - 1} but the model has {count} outputs: labels are out of "
        f"range; {remedy}"
    )


def _check_numbers(what: str, function: Callable[..., Any], outputs: Tree, y: Tree) -> None:
    """One number per sample, from outputs and targets of these shapes."""
    samples = len(first_leaf(y))
    try:
        result = function(outputs, y)
    except Exception as error:  # whatever a function of the person's own raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise QuiverError(
            f"the {what} cannot be computed from outputs {_shapes(outputs)} and targets "
            f"{_shapes(y)}: {first.rstrip('.')}."
        ) from error
    if isinstance(function, Metric):
        _check_metric(what, function, result, samples)
    elif not isinstance(result, Tensor) or tuple(result.shape) != (samples,):
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise QuiverError(
            f"the {what} gives {shape} for {samples} samples; it must give one number per sample, "
            f"({samples},): use reduction='none' and take the mean over the other dimensions."
        )


def _check_metric(what: str, metric: Metric, result: Any, samples: int) -> None:
    """Sums [n, s] of which numbers can be made, or one number."""
    if metric.value is None:
        if not isinstance(result, int | float) and not (
            isinstance(result, Tensor) and result.numel() == 1
        ):
            raise QuiverError(f"the {what} must give one number for all samples, not {result!r}.")
        return
    if not isinstance(result, Tensor) or result.ndim != 2 or len(result) != samples:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise QuiverError(
            f"the {what} gives {shape} for {samples} samples: with `value` it gives every "
            "sample's part of some sums, [n, sums]."
        )
    value = metric.value(result.double().sum(dim=0, keepdim=True))
    if tuple(value.shape) != (1,):
        raise QuiverError(
            f"the {what}: value(sums [clients, s]) must give [clients], not {tuple(value.shape)}."
        )


def _check_gradient(program: Program, point: Params, x: Tree, y: Tree) -> None:
    stacked = Params(*(part.unsqueeze(0) for part in point))
    x, y = (tree_map(lambda leaf: leaf.unsqueeze(0), part) for part in (x, y))
    try:
        batch = Batch(1, x, y, keys=torch.zeros(1, dtype=KEY))
        Sequential().bind(program, stacked, "whole")(batch)
    except WRONG as error:
        said = str(error).rstrip(". \n")
        raise QuiverError(f"the model's loss cannot be differentiated: {said}.") from error


def _shapes(tree: Tree) -> str:
    """Shapes and types of one sample, leaf by leaf."""

    def of(leaf: Tensor) -> str:
        return f"of shape {tuple(leaf.shape[1:])} ({leaf.dtype})"

    parts: Iterable[str] = (f"{name} {of(leaf)}".strip() for name, leaf in tree_leaves(tree))
    return ", ".join(parts)
