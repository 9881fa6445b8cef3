"""What is found out before a run about how to carry it out: the faster executor, room on a GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quiverfl.data.federated import FederatedData
from quiverfl.engine.checks.probe import ModelProbe, Shapes, executor_for
from quiverfl.engine.local.context import PhaseContext
from quiverfl.engine.local.examples import Batch, Examples
from quiverfl.engine.local.programs import (
    Executor,
    Gradient,
    Losses,
    Program,
    Vectorized,
    choose_executor,
    compile_stacked,
)
from quiverfl.engine.local.workers import worker_count
from quiverfl.engine.memory import predict_memory, room_for
from quiverfl.engine.settings import ExecutorName, Precision, RunSettings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Interleaved, Method, Part, Train
from quiverfl.models.compiled import check_compiler
from quiverfl.task import ModelOutputs, Params, Task
from quiverfl.training import Training
from quiverfl.transforms.privacy import DPSGD
from quiverfl.trees import Tree, tree_map
from quiverfl.types import Integers

# How exactly products are computed: [run] precision.
#
# float32  plain, and made so: cuDNN's own default rounds inputs of convolutions to ten bits
# (TF32) tf32     those ten bits for products and convolutions on an NVIDIA GPU; sums stay float32
# bf16     autocast: the model's products in bfloat16; parameters, gradients and mixing stay
# float32


@contextlib.contextmanager
def set_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Set the GPU's products to what the run says, and put back what was set before."""
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass(frozen=True)
class Autocast:
    """An executor whose models compute in bfloat16; what it gives back is as precise as ever."""

    inner: Executor
    device: str

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def chunk(self) -> int:
        return self.inner.chunk

    @property
    def evaluated(self) -> int:
        return self.inner.evaluated

    @property
    def image_format(self) -> torch.memory_format:
        return self.inner.image_format

    def see(self, program: Program, point: Params, x: Tree, features: bool = False) -> ModelOutputs:
        with self._autocast():
            seen = self.inner.see(program, point, x, features)

        def precise(leaf: Tensor) -> Tensor:
            return leaf.to(point.shared.dtype) if leaf.is_floating_point() else leaf

        return ModelOutputs(*(tree_map(precise, part) for part in seen))

    def bind(
        self,
        program: Program,
        point: Params,
        part: Part,
        losses: Losses | None = None,
        features: bool = False,
        training: bool = True,
    ) -> Gradient:
        gradient = self.inner.bind(program, point, part, losses, features, training)

        def cast(batch: Batch) -> Tensor:
            with self._autocast():
                return gradient(batch)

        return cast

    def _autocast(self) -> torch.autocast:
        # Without its cache of cast weights: they change in place between two calls.
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)


ONE_BY_ONE = (
    "compile = true compiles what is computed for many clients together, and clients of this model "
    'are computed one by one: set executor = "vectorized", or leave compile out.'
)
TRIES = 3
"""Gradients that are timed of each executor, after one that is not; the fastest counts."""


@dataclass(frozen=True)
class Measurement:
    """Which executor was found to be faster, here or before the run was interrupted."""

    executor: ExecutorName
    seconds: dict[str, float] | None = None
    """Of one client's gradient, by executor."""


def measure_executors(
    task: Task,
    examples: Examples,
    training: Training,
    settings: RunSettings,
    probe: ModelProbe | None,
) -> Measurement | None:
    """What executor = "measure" asks for; None where something else is asked for."""
    if settings.executor != "measure":
        return None
    # In bfloat16 there is but one; and some models cannot be computed together.
    if probe is None or settings.precision == "bf16" or probe.why_not_stacked() is not None:
        return Measurement("sequential")
    seconds = seconds_per_gradient(task, examples, training, settings, probe.draws)
    together = seconds["vectorized"] <= seconds["sequential"]
    return Measurement("vectorized" if together else "sequential", seconds)


@dataclass(frozen=True, eq=False)
class Execution:
    """How a run is carried out."""

    executor: Executor
    settings: RunSettings
    measured: Measurement | None

    @classmethod
    def of(
        cls,
        task: Task,
        settings: RunSettings,
        probe: ModelProbe | None,
        measured: Measurement | None,
        chunk: int | None,
    ) -> Execution:
        """As the settings say, or as was measured where they leave it open."""
        if settings.executor != "measure":
            measured = None  # of a run that was interrupted: now something else is asked for
        name = settings.executor if measured is None else measured.executor
        return cls(_executor(name, task, settings, probe, chunk), settings, measured)

    @property
    def record(self) -> dict[str, Any]:
        settings, seconds = self.settings, self.measured and self.measured.seconds
        return {
            "device": str(settings.device),
            "executor": self.executor.name,
            "chunk": self.executor.chunk,
            "precision": settings.precision,
            "compile": settings.compile,
            "states": settings.states,
            **({"seconds_per_gradient": seconds} if seconds else {}),
        }


def _executor(
    name: ExecutorName,
    task: Task,
    settings: RunSettings,
    probe: ModelProbe | None,
    chunk: int | None,
) -> Executor:
    device = torch.device(settings.device)
    if settings.precision == "bf16":
        return Autocast(choose_executor("sequential", task, device), device.type)
    executor = executor_for(name, task, device, probe)
    if isinstance(executor, Vectorized):
        chunk = chunk or executor.evaluated
        return replace(
            executor,
            chunk=min(executor.chunk, chunk),
            evaluated=min(executor.evaluated, chunk),
            compiled=compile_stacked() if settings.compile else None,
        )
    if settings.compile:
        raise QuiverError(ONE_BY_ONE)
    return executor


@dataclass(frozen=True, eq=False)
class Computation:
    """What a shard computes with."""

    execution: Execution
    context: PhaseContext
    test: Examples
    shapes: Shapes
    """Of one sample's features and outputs."""
    home: torch.device
    """Where states lie between the rounds."""

    @property
    def one_by_one(self) -> bool:
        """Whether clients are computed one after the other on a CPU, where workers help."""
        return self.context.executor.name == "sequential" and self.context.device.type == "cpu"


def prepare_computation(
    task: Task,
    data: FederatedData,
    method: Method,
    training: Training,
    settings: RunSettings,
    private: DPSGD | None,
    measured: Measurement | None,
) -> Computation:
    """Probe the model, choose how clients are computed, and put examples where they are."""
    device, dtype = torch.device(settings.device), settings.dtype
    examples = Examples(data.train, data, dtype, device)
    probe = ModelProbe.of(task, examples, dtype, device)
    chunk = choose_chunk(task, data, method, training, settings)
    measured = measured or measure_executors(task, examples, training, settings, probe)
    execution = Execution.of(task, settings, probe, measured, chunk)
    executor, draws = execution.executor, probe is not None and probe.draws
    if private is not None and draws:
        raise QuiverError(
            "privacy.name = 'dp_sgd' takes the gradient of one sample after another, and this "
            "model draws random numbers (dropout) for a whole batch: use one that does not."
        )
    examples = examples.laid_out(
        executor.image_format, getattr(task.skeleton, "likes_bytes", False)
    )
    as_bytes = examples.byte_factors is not None
    test = Examples(data.test, data, dtype, device).laid_out(executor.image_format, as_bytes)
    # vmap is for one thread at a time, and not for every model.
    one_by_one = executor.name == "sequential" and device.type == "cpu"
    alone = not one_by_one or torch.get_num_threads() == 1
    by_sample = private is not None and alone and _is_stackable(probe)
    context = PhaseContext(
        task,
        examples,
        training,
        executor,
        dtype,
        device,
        settings.seed,
        settings.rounds,
        draws=draws,
        private=private,
        by_sample=by_sample,
    )
    home = torch.device("cpu") if settings.states == "host" else device
    shapes = ((), ()) if probe is None else probe.shapes
    return Computation(execution, context, test, shapes, home)


def _is_stackable(probe: ModelProbe | None) -> bool:
    return probe is not None and probe.why_not_stacked() is None


def choose_chunk(
    task: Task, data: FederatedData, method: Method, training: Training, settings: RunSettings
) -> int | None:
    """How many clients to compute together, at most: as many as a GPU's memory holds."""
    device = torch.device(settings.device)
    if settings.chunk is not None or device.type != "cuda":
        return settings.chunk
    free, _ = torch.cuda.mem_get_info(device)
    footprint = predict_memory(task, data, method, training, settings)
    return room_for(footprint, free, elsewhere=settings.states == "host")


def seconds_per_gradient(
    task: Task, examples: Examples, training: Training, settings: RunSettings, draws: bool
) -> dict[str, float]:
    """Of one client, by executor; clients computed side by side share the time."""
    device, clients = torch.device(settings.device), len(examples.sizes)
    found: dict[str, float] = {}
    for name in ("vectorized", "sequential"):
        executor = choose_executor(name, task, device)
        context = PhaseContext(
            task, examples, training, executor, settings.dtype, device, settings.seed, 1, draws
        )
        some = np.arange(min(executor.chunk, clients))
        one_by_one = name == "sequential" and device.type == "cpu"
        workers = worker_count(clients) if one_by_one else 1
        with _threads_of_one(workers):
            found[name] = _timed(context, some) / len(some) / workers
    return found


def _timed(context: PhaseContext, rows: Integers) -> float:
    sizes, batch = context.examples.sizes[rows], context.training.batch_size
    width = int(sizes.max()) if batch is None else min(batch, int(sizes.max()))
    x, y = context.examples.gather(rows, np.minimum(np.arange(width), sizes[:, None] - 1))
    start = (part.to(context.device, context.dtype) for part in context.task.initial_params(0))
    point = Params(*(part.expand(len(rows), -1).clone() for part in start))
    keys = torch.zeros(len(rows), dtype=torch.int64, device=context.device)
    gradient = context.executor.bind(context.program(), point, "whole")
    one = Batch(len(rows), x, y, keys=keys if context.draws else None)
    times = []
    for _ in range(1 + TRIES):
        _wait(context.device)
        begin = time.perf_counter()
        gradient(one)
        _wait(context.device)
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _threads_of_one(workers: int) -> Iterator[None]:
    """As many threads as each of several workers has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // workers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_compile(task: Task, data: FederatedData, method: Method, settings: RunSettings) -> None:
    """Refuse compile = true where steps would not be compiled: nothing is passed over silently."""
    if not settings.compile:
        return
    device = torch.device(settings.device)
    if not isinstance(choose_executor(settings.executor, task, device), Vectorized):
        raise QuiverError(ONE_BY_ONE)
    if any(_sees_features(phase) for phase in method.phases(task)):
        raise QuiverError(
            f"compile = true with {method.title}, whose loss looks at the model's features: they "
            "are taken from inside the model, which cannot be compiled then. Leave compile out."
        )
    probe = ModelProbe.here(task, data, torch.float32)
    if probe.draws:
        raise QuiverError(
            "compile = true with a model that draws random numbers in training, such as dropout: "
            "they are drawn per client outside of what can be compiled. Leave compile out."
        )
    reason = probe.why_not_stacked()
    if reason is not None:
        raise QuiverError(
            f"compile = true: the model cannot be computed for several clients at once ({reason}), "
            "and that is what is compiled. Leave compile out."
        )


def has_compiled_layers(task: Task) -> bool:
    return any(getattr(m, "kernels", None) == "compiled" for m in task.skeleton.modules())


def check_kernels(task: Task, settings: RunSettings) -> None:
    """Refuse a model's compiled layers where PyTorch's would be computed in their place."""
    if not has_compiled_layers(task):
        return
    device = torch.device(settings.device).type
    where = {
        f"device = {str(settings.device)!r}": device != "cpu",
        f"dtype = {settings.dtype}": settings.dtype != torch.float32,
        f"precision = {settings.precision!r}": settings.precision != "float32",
        f"executor = {settings.executor!r}": settings.executor in ("vectorized", "measure"),
    }
    for setting, hinders in where.items():
        if hinders:
            raise QuiverError(
                f'{setting} with model.kernels = "compiled": compiled layers are computed on a '
                "CPU, in float32, one client at a time. Leave it out, or set "
                'model.kernels = "torch".'
            )
    check_compiler()


def _sees_features(phase: Any) -> bool:
    inner = phase.phases if isinstance(phase, Interleaved) else (phase,)
    return any(isinstance(p, Train) and p.loss is not None and p.loss.needs_features for p in inner)
