"""Bytes that a run needs, by arithmetic: to request from a cluster, and to see what fits on a GPU.

The activations that a gradient keeps are counted on a few samples on the CPU; all else follows from
shapes. What frameworks and libraries need for themselves is a round number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quiverfl.data.examples import ClientExamples
from quiverfl.data.federated import FederatedData
from quiverfl.engine.checks.probe import ModelProbe
from quiverfl.engine.local.model_rng import KeyedRandomMode
from quiverfl.engine.local.programs import Executor, Program, call_stacked, is_convolutional
from quiverfl.engine.local.workers import MOST
from quiverfl.engine.settings import RunSettings
from quiverfl.methods.contract import Interleaved, Method, Train
from quiverfl.task import Params, Task
from quiverfl.topologies.reports import ReportSpec
from quiverfl.training import Training
from quiverfl.transforms import PLAIN, Transforms
from quiverfl.trees import Tree, tree_leaves, tree_map

CPU = torch.device("cpu")
OVERHEAD = 600 << 20
"""Bytes of Python, torch and what they load: 420 MB were measured, with results."""
WIDEST = 25
"""Clients computed together at most, on any device."""
SPARE = 0.8
"""Fraction of a device's free memory to use; workspaces and the like need the rest."""


@dataclass(frozen=True)
class Activations:
    """Bytes that the gradient of one client keeps, apart from parameters."""

    fixed: int
    per_sample: int

    def at_batch(self, batch: int) -> int:
        return self.fixed + self.per_sample * batch


@dataclass(frozen=True)
class Footprint:
    """Bytes by what they are for."""

    states: int
    kept: int
    """Models from before the last communication, where a run keeps them."""
    data: int
    per_client: int
    """In training: activations of a batch, a copy of the model to step, gradient, momentum."""
    chunk: int
    """Clients that are in training at once."""
    view: int = 0
    """Bytes of the reports that clients know, with an adaptive topology; never on a device."""

    @property
    def total(self) -> int:
        return self.states + self.kept + self.data + self.per_client * self.chunk + self.view


def predict_memory(
    task: Task,
    data: FederatedData,
    method: Method,
    training: Training,
    settings: RunSettings,
    clients: int | None = None,
    transforms: Transforms = PLAIN,
    report_spec: ReportSpec | None = None,
) -> Footprint:
    """Bytes that a run needs on the device it computes on; for fewer `clients` if given.

    `report_spec` says what clients report, if its topology is adaptive.
    """
    count = data.clients if clients is None else clients
    fraction = count / data.clients
    size = torch.empty((), dtype=settings.dtype).element_size()
    model = (task.shared_layout.size + task.personal_layout.size) * size
    per_client, widest = training_bytes(task, data, training, settings, int(data.train.sizes.max()))
    return Footprint(
        states=count * _state_bytes(task, data, method, settings, transforms.copies),
        kept=count * model if settings.keep_local else 0,
        data=int(fraction * (_bytes(data.train) + _bytes(data.test))),
        per_client=per_client,
        chunk=min(count, widest),
        view=0 if report_spec is None else report_spec.memory(count),
    )


def training_bytes(
    task: Task, data: FederatedData, training: Training, settings: RunSettings, longest: int
) -> tuple[int, int]:
    """Bytes of a client in training, and how many are in training at once, at most.

    `longest` is the size of the largest client.
    """
    batch = longest if training.batch_size is None else min(longest, training.batch_size)
    size = torch.empty((), dtype=settings.dtype).element_size()
    model = (task.shared_layout.size + task.personal_layout.size) * size
    copies = 2 + {"sgd": int(bool(training.momentum)), "adam": 2, "adamw": 2}[training.optimizer]
    one_by_one = _is_one_by_one(task, data, settings)
    activations = count_activations(task, data, settings.dtype, not one_by_one)
    widest = min(MOST, settings.threads or MOST) if one_by_one else settings.chunk or WIDEST
    return activations.at_batch(batch) + copies * model, min(WIDEST, widest)


def room_for(footprint: Footprint, free: int, elsewhere: bool = False) -> int:
    """Number of clients that can be computed together, beside everything else in this memory.

    States and kept models may lie elsewhere.
    """
    beside = footprint.data + (0 if elsewhere else footprint.states + footprint.kept)
    return max(1, min(WIDEST, int((SPARE * free - beside) // max(1, footprint.per_client))))


TOGETHER = 64 << 20
"""Bytes of all clients that are computed together, at most: caches and calls share the gain."""
SLAB = 128
"""Samples of each that are evaluated at once, at most (engine/evaluation.py)."""
MOST_BLOCKS, FEWEST_BLOCKS = 64, 8
"""Chunks that are joined. With fewer, calls that are saved do not pay for rows between chunks."""


class Blocks(NamedTuple):
    """Number of chunks of like clients computed as one, in training and in evaluation."""

    training: int = 1
    evaluation: int = 1


def choose_blocks(
    task: Task,
    data: FederatedData,
    method: Method,
    training: Training,
    settings: RunSettings,
    probe: ModelProbe | None,
    executor: Executor,
) -> Blocks:
    """Choose as many blocks as fit into `TOGETHER`: tiny models spend most time in calls."""
    size, many = settings.dtype.itemsize, executor.chunk * FEWEST_BLOCKS
    model = size * (task.shared_layout.size + task.personal_layout.size)
    if probe is None or data.clients < many or many * 5 * model > TOGETHER:
        return Blocks()
    plain = executor.name == "vectorized" and torch.device(settings.device).type == "cpu"
    asked = settings.chunk is not None or settings.compile
    frozen = size * sum(p.numel() for p in task.skeleton.parameters()) > model
    if not plain or asked or frozen or not _is_exact(task, method, training, probe):
        return Blocks()
    each, longest = count_activations(task, data, settings.dtype), data.train.longest
    # A copy to step, gradients apart and joined, momentum, and the state itself.
    trained = 5 * model + 2 * each.at_batch(min(training.batch_size or longest, longest))
    seen = 2 * model + each.at_batch(min(data.test.longest, SLAB))

    def fit(clients: int, needed: int) -> int:
        blocks = min(MOST_BLOCKS, TOGETHER // (clients * needed))
        return blocks if blocks >= FEWEST_BLOCKS else 1

    return Blocks(fit(executor.chunk, trained), fit(executor.evaluation_chunk, seen))


def _is_exact(task: Task, method: Method, training: Training, probe: ModelProbe) -> bool:
    """Whether a client's step has the same bits whichever clients are computed beside it."""
    for phase in method.phases(task):
        for inner in phase.phases if isinstance(phase, Interleaved) else (phase,):
            if isinstance(inner, Train) and inner.loss is not None:
                return False
    return training.optimizer == "sgd" and not probe.draws and probe.is_exact()


def count_activations(
    task: Task, data: FederatedData, dtype: torch.dtype, together: bool = True
) -> Activations:
    """Measured by gradients on two and on four samples; `together`: by vmap, else one client.

    vmap takes some layers apart: GroupNorm by vmap keeps more than twice as much.
    """
    two, four = (saved_bytes(task, _inputs(data, n, dtype), dtype, together) for n in (2, 4))
    per_sample = max(0, four - two) // 2
    return Activations(max(0, two - 2 * per_sample), per_sample)


def saved_bytes(task: Task, x: Tree, dtype: torch.dtype, together: bool = True) -> int:
    """Bytes that a client's forward pass in training keeps for its gradient: every piece once."""
    clients = 2 if together else 1
    program = Program.of(task, dtype, CPU)
    program.module.train()
    start = (part.to(dtype) for part in task.initial_params(0))
    point = Params(*(part.expand(clients, -1).clone() if together else part for part in start))
    named = {name: leaf.requires_grad_() for name, leaf in program.named_params(point).items()}
    own = {leaf.untyped_storage().data_ptr() for leaf in (point.shared, point.personal)}
    own |= {leaf.untyped_storage().data_ptr() for leaf in program.module.buffers()}
    keys = torch.zeros(clients, dtype=torch.int64)
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        if together:
            inputs = tree_map(lambda leaf: leaf.expand(clients, *leaf.shape).clone(), x)
            outputs = call_stacked(program, named, inputs, False, keys).outputs
        else:
            outputs = program.call(named, x, False, KeyedRandomMode(keys[0])).outputs
    kept = sum(storages.values()) // clients
    del outputs  # until here it keeps everything alive, so that no address is used twice
    return kept


def _inputs(data: FederatedData, count: int, dtype: torch.dtype) -> Tree:
    x = tree_map(lambda leaf: leaf[:1].expand(count, *leaf.shape[1:]).clone(), data.train.x)
    x = x if data.prepare is None else data.prepare(x)
    return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, x)


def _state_bytes(
    task: Task, data: FederatedData, method: Method, settings: RunSettings, copies: int
) -> int:
    """Bytes of one client's state, messages in flight and further copies of its message."""
    state = ModelProbe.from_data(task, data, settings.dtype).first_state(method)
    own = sum(leaf.nbytes for leaf in state)
    late = method.delay + copies
    message = sum(leaf.nbytes for leaf in method.message(state).values()) if late else 0
    return int(own + late * message)


def _bytes(split: ClientExamples) -> int:
    """Inputs that stay on disk take none."""
    parts = (split.x, split.y) if split.rows is None else (split.y,)
    return sum(int(leaf.nbytes) for _, leaf in tree_leaves(parts))


def _is_one_by_one(task: Task, data: FederatedData, settings: RunSettings) -> bool:
    """Whether clients are computed one by one, as far as that is known before the run."""
    if settings.executor in ("vectorized", "sequential"):
        return settings.executor == "sequential"
    if settings.precision == "bf16":
        return True
    on_cpu = torch.device(settings.device).type == "cpu"
    if settings.executor == "auto" and is_convolutional(task) and on_cpu:
        return True
    return ModelProbe.from_data(task, data, settings.dtype).why_not_stacked() is not None
