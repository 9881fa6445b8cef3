"""What is found out before a run about how to carry it out: the faster executor, room on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quiverfl.data.federated import FederatedData
from quiverfl.engine.context import PhaseContext
from quiverfl.engine.examples import Examples
from quiverfl.engine.footprint import predict, room_for
from quiverfl.engine.precision import Autocast
from quiverfl.engine.programs import Executor, Vectorized, choose_executor, compiled
from quiverfl.engine.settings import ExecutorName, RunSettings
from quiverfl.engine.trials import Trial, executor_for
from quiverfl.engine.workers import worker_count
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Interleaved, Method, Train
from quiverfl.models.compiled_layers import check_compiler
from quiverfl.task import Point, Task
from quiverfl.training import Training

Integers = npt.NDArray[np.int64]

ONE_BY_ONE = (
    "compile = true compiles what is computed for many clients together, and clients of this model "
    'are computed one by one: set executor = "vectorized", or leave compile out.'
)
TRIES = 3
"""Gradients that are timed of each executor, after one that is not; the fastest counts."""


@dataclass(frozen=True)
class Measured:
    """Which executor was found to be faster, here or before the run was interrupted."""

    executor: ExecutorName
    seconds: dict[str, float] | None = None
    """Of one client's gradient, by executor."""


def measure(
    task: Task, examples: Examples, training: Training, settings: RunSettings, trial: Trial | None
) -> Measured | None:
    """What executor = "measure" asks for; None where something else is asked for."""
    if settings.executor != "measure":
        return None
    # In bfloat16 there is but one; and some models cannot be computed together.
    if trial is None or settings.precision == "bf16" or trial.why_not_stacked() is not None:
        return Measured("sequential")
    seconds = seconds_per_gradient(task, examples, training, settings, trial.draws())
    together = seconds["vectorized"] <= seconds["sequential"]
    return Measured("vectorized" if together else "sequential", seconds)


@dataclass(frozen=True, eq=False)
class Execution:
    """How a run is carried out."""

    executor: Executor
    settings: RunSettings
    measured: Measured | None

    @classmethod
    def of(
        cls,
        task: Task,
        settings: RunSettings,
        trial: Trial | None,
        measured: Measured | None,
        chunk: int | None,
    ) -> Execution:
        """As the settings say, or as was measured where they leave it open."""
        if settings.executor != "measure":
            measured = None  # of a run that was interrupted: now something else is asked for
        name = settings.executor if measured is None else measured.executor
        return cls(_executor(name, task, settings, trial, chunk), settings, measured)

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
    name: ExecutorName, task: Task, settings: RunSettings, trial: Trial | None, chunk: int | None
) -> Executor:
    device = torch.device(settings.device)
    if settings.precision == "bf16":
        return Autocast(choose_executor("sequential", task, device), device.type)
    executor = executor_for(name, task, device, trial)
    if isinstance(executor, Vectorized):
        chunk = chunk or executor.evaluated
        return replace(
            executor,
            chunk=min(executor.chunk, chunk),
            evaluated=min(executor.evaluated, chunk),
            compiled=compiled() if settings.compile else None,
        )
    if settings.compile:
        raise QuiverError(ONE_BY_ONE)
    return executor


def room(
    task: Task, data: FederatedData, method: Method, training: Training, settings: RunSettings
) -> int | None:
    """How many clients to compute together, at most: as many as a GPU's memory holds."""
    device = torch.device(settings.device)
    if settings.chunk is not None or device.type != "cuda":
        return settings.chunk
    free, _ = torch.cuda.mem_get_info(device)
    footprint = predict(task, data, method, training, settings)
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
    start = (part.to(context.device, context.dtype) for part in context.task.initial(0))
    point = Point(*(part.expand(len(rows), -1).clone() for part in start))
    keys = torch.zeros(len(rows), dtype=torch.int64, device=context.device)
    gradient = context.executor.bind(context.program(), point, "whole")
    times = []
    for _ in range(1 + TRIES):
        _wait(context.device)
        begin = time.perf_counter()
        gradient(len(rows), x, y, None, keys if context.draws else None)
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
    trial = Trial.here(task, data, torch.float32)
    if trial.draws():
        raise QuiverError(
            "compile = true with a model that draws random numbers in training, such as dropout: "
            "they are drawn per client outside of what can be compiled. Leave compile out."
        )
    reason = trial.why_not_stacked()
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
    return any(isinstance(p, Train) and p.loss is not None and p.loss.features for p in inner)
