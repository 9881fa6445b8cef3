"""Choices made before a run: the faster executor, and how many clients fit on a GPU."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
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
    Sequential,
    Vectorized,
    choose_executor,
    compile_stacked,
)
from quiverfl.engine.local.workers import worker_count
from quiverfl.engine.memory import Blocks, choose_blocks, predict_memory, room_for
from quiverfl.engine.settings import ExecutorName, Layout, Precision, RunSettings
from quiverfl.errors import QuiverError
from quiverfl.methods.contract import Interleaved, Method, Part, Train
from quiverfl.models.compiled import GroupNorm, warn_without_compiler
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
    def evaluation_chunk(self) -> int:
        return self.inner.evaluation_chunk

    @property
    def image_format(self) -> torch.memory_format:
        return self.inner.image_format

    def forward(
        self, program: Program, point: Params, x: Tree, features: bool = False
    ) -> ModelOutputs:
        with self._autocast():
            seen = self.inner.forward(program, point, x, features)

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
NOT_TOGETHER = (
    "compile = true: the model cannot be computed for several clients at once ({}), and that is "
    "what is compiled. Leave compile out."
)
TRIES = 3
"""Gradients that are timed of each executor, after one that is not; the fastest counts."""


@dataclass(frozen=True)
class Measurement:
    """The faster choices, measured here or before the run was interrupted; None: not measured."""

    executor: ExecutorName | None = None
    seconds: dict[str, float] | None = None
    """Seconds of one client's gradient, for each candidate that was tried."""
    precision: Precision | None = None
    layout: Layout | None = None

    def apply(self, settings: RunSettings) -> RunSettings:
        """The settings, with open ones replaced by the choices of the trial."""
        return replace(settings, **{key: getattr(self, key) for key in _open_settings(settings)})

    @property
    def choices(self) -> dict[str, str]:
        """The choices by setting, for a checkpoint."""
        chosen = {key: getattr(self, key) for key in _TRIED}
        return {key: choice for key, choice in chosen.items() if choice is not None}

    @classmethod
    def read(cls, text: Mapping[str, Any]) -> Measurement | None:
        chosen = {key: text[key] for key in _TRIED if key in text}
        return cls(**chosen) if chosen else None

    def matches(self, settings: RunSettings) -> bool:
        return all(getattr(self, key) is not None for key in _open_settings(settings))


_TRIED = {"executor": "measure", "precision": "auto", "layout": "measure"}
"""Settings that a trial can choose, and how they ask for it."""


def _open_settings(settings: RunSettings) -> list[str]:
    """The settings that are left to a trial."""
    return [key for key, word in _TRIED.items() if getattr(settings, key) == word]


def measure_executors(
    task: Task,
    examples: Examples,
    training: Training,
    settings: RunSettings,
    probe: ModelProbe | None,
) -> Measurement | None:
    """Measure candidates for the open settings; None if no setting is open."""
    asked = _open_settings(settings)
    if not asked:
        return None
    candidates = _list_candidates(settings, asked, probe)
    first = next(iter(candidates.values()))
    if probe is None or len(candidates) == 1:
        return Measurement(**{key: getattr(first, key) for key in asked})
    seconds = seconds_per_gradient(task, examples, training, candidates, probe.draws)
    fastest = candidates[min(seconds, key=seconds.__getitem__)]
    return Measurement(seconds=seconds, **{key: getattr(fastest, key) for key in asked})


def _list_candidates(
    settings: RunSettings, asked: list[str], probe: ModelProbe | None
) -> dict[str, RunSettings]:
    """Settings to try, by what they say about what is open."""
    device = torch.device(settings.device)
    stacks = probe is not None and probe.why_not_stacked() is None
    choices: dict[str, list[Any]] = {key: [getattr(settings, key)] for key in _TRIED}
    if "executor" in asked:
        choices["executor"] = ["vectorized", "sequential"] if stacks else ["sequential"]
    if "precision" in asked:
        choices["precision"] = ["float32", "bf16"] if has_bfloat16(device) else ["float32"]
    if "layout" in asked:
        choices["layout"] = ["contiguous", "channels_last"]
    candidates = {}
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        if chosen["executor"] == "vectorized":
            if chosen["precision"] == "bf16" or chosen["layout"] == "channels_last":
                continue  # vmap has neither
            chosen["layout"] = "auto"
        named = " ".join(str(chosen[key]) for key in asked)
        candidates[named] = replace(settings, **chosen)
    return candidates


def has_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are instructions of the processor, not emulated ones."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


@dataclass(frozen=True, eq=False)
class Execution:
    """The executor of a run, with the settings and measurements that it follows from."""

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
        """Choose by the settings, or by what was measured where they leave it open."""
        if measured is None or not settings.has_trial:
            measured = None  # of a run that was interrupted: the settings have changed since
        else:
            settings = measured.apply(settings)
        return cls(_executor(task, settings, probe, chunk), settings, measured)

    @property
    def _layout(self) -> str | None:
        """The chosen layout of images; None if it is not chosen, or clients are not one by one."""
        asked = self.settings.layout != "auto" and self.executor.name == "sequential"
        return self.settings.layout if asked else None

    @property
    def record(self) -> dict[str, Any]:
        settings, seconds = self.settings, self.measured and self.measured.seconds
        return {
            "device": str(settings.device),
            "executor": self.executor.name,
            "chunk": self.executor.chunk,
            "precision": settings.precision,
            **({"layout": self._layout} if self._layout else {}),
            "compile": settings.compile,
            "states": settings.states,
            **({"seconds_per_gradient": seconds} if seconds else {}),
        }


def _executor(
    task: Task, settings: RunSettings, probe: ModelProbe | None, chunk: int | None
) -> Executor:
    device = torch.device(settings.device)
    rough = settings.precision == "bf16"
    executor = (
        choose_executor("sequential", task, device)
        if rough
        else executor_for(settings.executor, task, device, probe)
    )
    if isinstance(executor, Vectorized):
        chunk = chunk or executor.evaluation_chunk
        return replace(
            executor,
            chunk=min(executor.chunk, chunk),
            evaluation_chunk=min(executor.evaluation_chunk, chunk),
            compiled=compile_stacked() if settings.compile else None,
        )
    if settings.compile:
        raise QuiverError(ONE_BY_ONE)
    if settings.layout in FORMATS and isinstance(executor, Sequential):
        executor = replace(executor, image_format=FORMATS[settings.layout])
    return Autocast(executor, device.type) if rough else executor


FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
"""Layouts of images by their names in a configuration."""


@dataclass(frozen=True, eq=False)
class Computation:
    """Executor, data and devices that a shard computes with."""

    execution: Execution
    context: PhaseContext
    test: Examples
    shapes: Shapes
    """Shapes of one sample's features and outputs."""
    home: torch.device
    """The device that holds states between rounds."""
    blocks: Blocks

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
    if measured is None or not measured.matches(settings):
        measured = measure_executors(task, examples, training, settings, probe)
    execution = Execution.of(task, settings, probe, measured, chunk)
    executor, draws = execution.executor, probe is not None and probe.draws
    if private is not None and draws:
        raise QuiverError(
            "privacy.name = 'dp_sgd' takes the gradient of one sample after another, and this "
            "model draws random numbers (dropout) for a whole batch: use one that does not."
        )
    examples = examples.laid_out(
        executor.image_format,
        getattr(task.skeleton, "likes_bytes", False) and not task.own_models,
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
    plain = None if private is not None else probe
    blocks = choose_blocks(task, data, method, training, settings, plain, executor)
    return Computation(execution, context, test, shapes, home, blocks)


def _is_stackable(probe: ModelProbe | None) -> bool:
    return probe is not None and probe.why_not_stacked() is None


def choose_chunk(
    task: Task, data: FederatedData, method: Method, training: Training, settings: RunSettings
) -> int | None:
    """Largest number of clients to compute together: as many as a GPU's memory holds."""
    device = torch.device(settings.device)
    if settings.chunk is not None or device.type != "cuda":
        return settings.chunk
    free, _ = torch.cuda.mem_get_info(device)
    footprint = predict_memory(task, data, method, training, settings)
    return room_for(footprint, free, elsewhere=settings.states == "host")


def seconds_per_gradient(
    task: Task,
    examples: Examples,
    training: Training,
    candidates: Mapping[str, RunSettings],
    draws: bool,
) -> dict[str, float]:
    """Seconds of one client's gradient by candidate, which take turns.

    The time is divided by the number of clients that are computed side by side.
    """
    trials, clients = {}, len(examples.sizes)
    for name, settings in candidates.items():
        device, executor = torch.device(settings.device), _executor(task, settings, None, None)
        context = PhaseContext(
            task, examples, training, executor, settings.dtype, device, settings.seed, 1, draws
        )
        sample = np.arange(min(executor.chunk, clients))
        one_by_one = executor.name == "sequential" and device.type == "cpu"
        workers = worker_count(clients) if one_by_one else 1
        trials[name] = _prepare_trial(context, sample), workers, len(sample) * workers
    seconds = dict.fromkeys(trials, math.inf)
    for attempt in range(1 + TRIES):
        for name, (trial, workers, clients_at_once) in trials.items():
            with _threads_of_one(workers):
                begin = time.perf_counter()
                trial()
                elapsed = (time.perf_counter() - begin) / clients_at_once
            if attempt:
                seconds[name] = min(seconds[name], elapsed)
    return seconds


def _prepare_trial(context: PhaseContext, rows: Integers) -> Callable[[], None]:
    """A gradient of a batch of each of these clients."""
    executor = context.executor
    sizes, batch = context.examples.sizes[rows], context.training.batch_size
    width = int(sizes.max()) if batch is None else min(batch, int(sizes.max()))
    x, y = context.examples.gather(rows, np.minimum(np.arange(width), sizes[:, None] - 1))
    if executor.chunk == 1:  # images lie as they do in the run
        form = executor.image_format
        x = tree_map(lambda t: t[0].contiguous(memory_format=form)[None] if t.ndim == 5 else t, x)
    start = (part.to(context.device, context.dtype) for part in context.task.initial_params(0))
    point = Params(*(part.expand(len(rows), -1).clone() for part in start))
    keys = torch.zeros(len(rows), dtype=torch.int64, device=context.device)
    if context.task.statistics_layout.names:  # a client's own, which the trial may change
        context.programs.open_client(None, context.task.initial_statistics()[None].to(point.shared))
    gradient = executor.bind(context.program(), point, "whole")
    one = Batch(len(rows), x, y, keys=keys if context.draws else None)

    def trial() -> None:
        _wait(context.device)
        gradient(one)
        _wait(context.device)

    return trial


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def _threads_of_one(workers: int) -> Iterator[None]:
    """Use as many threads as each of several workers has."""
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
    if task.one_by_one is not None:
        raise QuiverError(NOT_TOGETHER.format(task.one_by_one))
    device = torch.device(settings.device)
    if not isinstance(choose_executor(settings.executor, task, device), Vectorized):
        raise QuiverError(ONE_BY_ONE)
    if any(_sees_features(phase) for phase in method.phases(task)):
        raise QuiverError(
            f"compile = true with {method.title}, whose loss looks at the model's features: they "
            "are taken from inside the model, which cannot be compiled then. Leave compile out."
        )
    probe = ModelProbe.from_data(task, data, torch.float32)
    if probe.draws:
        raise QuiverError(
            "compile = true with a model that draws random numbers in training, such as dropout: "
            "they are drawn per client outside of what can be compiled. Leave compile out."
        )
    reason = probe.why_not_stacked()
    if reason is not None:
        raise QuiverError(NOT_TOGETHER.format(reason))


def has_compiled_layers(task: Task) -> bool:
    return any(getattr(m, "kernels", None) == "compiled" for m in task.skeleton.modules())


def check_kernels(task: Task, settings: RunSettings) -> None:
    """Refuse a model's compiled layers where PyTorch's would be computed in their place.

    Without a compiler they are computed by PyTorch, with a warning.
    """
    normed = any(isinstance(module, GroupNorm) for module in task.skeleton.modules())
    if not has_compiled_layers(task):
        if normed:
            warn_without_compiler(task.skeleton)
        return
    device = torch.device(settings.device).type
    rough = normed and settings.precision in ("bf16", "auto")
    where = {
        f"device = {str(settings.device)!r}": device != "cpu",
        f"dtype = {settings.dtype}": settings.dtype != torch.float32,
        f"precision = {settings.precision!r}": settings.precision != "float32" and not rough,
        f"executor = {settings.executor!r}": settings.executor in ("vectorized", "measure"),
    }
    types = "float32 or bfloat16" if normed else "float32"
    for setting, hinders in where.items():
        if hinders:
            raise QuiverError(
                f'{setting} with model.kernels = "compiled": compiled layers are computed on a '
                f"CPU, in {types}, one client at a time. Leave it out, or set "
                'model.kernels = "torch".'
            )
    warn_without_compiler(task.skeleton)


def _sees_features(phase: Any) -> bool:
    inner = phase.phases if isinstance(phase, Interleaved) else (phase,)
    return any(isinstance(p, Train) and p.loss is not None and p.loss.needs_features for p in inner)
