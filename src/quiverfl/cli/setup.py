"""`quiver doctor`: verify a device, and print a table to send back."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import quiverfl
from quiverfl.data.federated import FederatedData
from quiverfl.engine.exchange import matrix
from quiverfl.engine.exchange import quantized as quantized_mixing
from quiverfl.engine.exchange.quantized import compiled_matches_torch
from quiverfl.engine.local import byte_images
from quiverfl.engine.memory import count_activations, predict_memory, saved_bytes
from quiverfl.engine.settings import ExecutorName, RunSettings
from quiverfl.errors import QuiverError, QuiverWarning
from quiverfl.methods import METHODS, Method
from quiverfl.models import MODELS, make_model
from quiverfl.models import compiled as compiled_layers
from quiverfl.runs.simulate import Simulation
from quiverfl.support import durable
from quiverfl.support.compiler import why_not_compiled
from quiverfl.support.environment import NO_FLOAT64
from quiverfl.support.output_folders import CELLS, PEER, holds_run, holds_run_below, refuse_foreign
from quiverfl.task import Task
from quiverfl.topologies import Topology, make_topology
from quiverfl.training import Training
from quiverfl.transforms.compression import Quantize
from quiverfl.trees import first_leaf


def doctor(
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Verify a device: its numbers against the CPU, its speed against a bare loop, its memory.

    Ends with 1 if anything failed or differs. A slow device is no failure.
    """
    pass

    status = Console(emoji=False, stderr=True, highlight=False)
    findings = []
    with status.status("examining …") as shown:
        for finding in examine_device(device):
            findings.append(finding)
            shown.update(f"{finding.part}: {finding.what} {finding.verdict}")
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        table = Table("part", "what", "measured", "expected", "verdict", box=None, pad_edge=False)
        for finding in findings:
            table.add_row(*dataclasses.astuple(finding))
        Console(emoji=False, highlight=False).print(table)
    if any(finding.verdict in ("failed", "differs") for finding in findings):
        raise typer.Exit(1)


# `quiver init`: a first project that runs.


FILES = ("run.toml", "my_data.py", "my_model.py", "my_method.py")


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")] = Path("."),
) -> None:
    """Write a first project: a configuration, and data, model and method of your own that run."""
    durable.check_writable(folder)
    present = [name for name in FILES if (folder / name).exists()]
    if present:
        raise QuiverError(
            f"{folder / present[0]} is there already: choose another folder, or move it away."
        )
    refuse_foreign(folder, _is_free, "choose another folder")
    templates = resources.files("quiverfl") / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        durable.replace_file(folder / name, (templates / name).read_bytes())
        print(f"wrote {folder / name}")
    place = "" if folder == Path(".") else f"cd {folder} && "
    print(f"Try: {place}quiver compare run.toml --methods local,dfedpgp,my_method:MyMethod")
    print(f"and: {place}quiver check my_method:MyMethod")


def _is_free(folder: Path) -> bool:
    """A project may be begun beside other files; what runs and peers keep is theirs alone."""
    kept = holds_run(folder) or holds_run_below(folder) or holds_run_below(folder / CELLS)
    return not kept and not (folder / PEER).exists()


# `quiver check`: the laws of methods, tried on one of your own.


def check(
    method: Annotated[str, typer.Argument(help="module:Class of your own, or a name.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="option=value of the method.")
    ] = None,
    skip: Annotated[
        list[int] | None, typer.Option(help="Number of a law that it breaks on purpose.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The verdicts as JSON.")] = False,
) -> None:
    """Try the laws that every method keeps on a method of your own.

    Takes a few seconds: small federations of six clients. Ends with 1 if a law is broken, with 2
    if the method cannot be run.
    """
    from quiverfl.laws.check import LAWS, check_method

    made = _method(method, set_ or ())
    status = Console(emoji=False, stderr=True, highlight=False)
    with status.status(f"trying {len(LAWS)} laws …") as shown:
        check = check_method(
            made, skip or (), lambda one: shown.update(f"law {one.number}: {one.verdict}")
        )
    if as_json:
        print(json.dumps([dataclasses.asdict(one) for one in check.verdicts]))
    else:
        table = Table("", "law", "verdict", "on", box=None, pad_edge=False)
        for one in check.verdicts:
            table.add_row(str(one.number), one.law, one.verdict, ", ".join(one.graphs))
        console = Console(emoji=False, highlight=False, markup=False, soft_wrap=True)
        console.print(table, soft_wrap=False)
        console.print(f"\n{check}")
    if not check.lawful:
        raise typer.Exit(1)


def _method(name: str, settings: Iterable[str]) -> Method:
    """The method with its options, checked as those of a configuration are."""
    from quiverfl.runs.config import parse_config
    from quiverfl.runs.config_files import parse_toml_value
    from quiverfl.runs.experiment import make_method

    options: dict[str, Any] = {}
    for text in settings:
        key, separator, value = text.partition("=")
        key = key.strip().removeprefix("method.")
        if not separator or not value.strip():
            raise QuiverError(f"--set {text!r}: write option=value, such as epochs=2.")
        if "." in key or key == "name":
            raise QuiverError(f"--set {key!r}: it must be one of the options of the method.")
        options[key] = parse_toml_value(value.strip())
    return make_method(parse_config({"method": {"name": name, **options}}, f"quiver check {name}"))


# Does a device compute what the CPU computes, how fast, and in how much memory?
#
# Everything is measured here and now, on problems of a few seconds: what `quiver doctor` prints.


Verdict = Literal["ok", "differs", "slow", "failed", "-"]

AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative, after two rounds; in float64 executors agree to 1e-12 on one machine. A device without
float64 is tried in float32."""
SLOW = 1.5
"""Times the bare loop: more than that is worth an issue."""
OFF = 1.5
"""Times the predicted memory, or that part of it."""
CLIENTS, SAMPLES, BATCH = 8, 64, 16
SMALL_IMAGE = (3, 16, 16)
COMPILED = {
    "compiled convolutions": compiled_layers.SOURCE,
    "compiled norms": compiled_layers.NORM_SOURCE,
    "compiled crops": byte_images.SOURCE,
    "compiled mixing": matrix.SOURCE,
    "compiled quantising": quantized_mixing.SOURCE,
}
"""What C of our own does, for which a machine may have no compiler."""
IMAGE_MODELS = tuple(name for name in MODELS if name not in ("mlp", "resnet18_gn"))
"""ResNet-18 is ResNet-8 with more of the same, and takes minutes."""


@dataclass(frozen=True)
class Finding:
    part: str
    what: str
    measured: str
    expected: str
    verdict: Verdict


def examine_device(device: str) -> Iterator[Finding]:
    """One finding after the other; a device that cannot be used at all is refused first."""
    RunSettings(rounds=0, device=device).check_device()
    yield from _describe_device(device)
    yield from laws(device)
    yield from throughput(device)
    yield from memory(device)


def _describe_device(device: str) -> Iterator[Finding]:
    name = platform.processor() or platform.machine()
    if torch.device(device).type == "cuda":
        gpu = torch.cuda.get_device_properties(torch.device(device))
        name = f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GB"
    yield Finding("about", "device", f"{device}: {name}", "", "-")
    yield Finding("about", "torch", torch.__version__, "", "-")
    yield Finding("about", "quiver", quiverfl.__version__, "", "-")
    for what, source in COMPILED.items():
        reason = why_not_compiled(*source)
        other_bits = (source is matrix.SOURCE and not matrix.compiled_matches_torch()) or (
            source is quantized_mixing.SOURCE and not compiled_matches_torch(Quantize())
        )
        if reason is None and other_bits:
            reason = "other bits than PyTorch's on this processor."
        yield Finding("about", what, "yes" if reason is None else f"no: {reason}", "", "-")


def laws(device: str) -> Iterator[Finding]:
    """Every method and every model with both executors, against clients together on the CPU."""
    for name, kind in METHODS.items():
        yield from _law(name, "mlp", kind(), device)
    for model in IMAGE_MODELS:
        yield from _law(model, model, METHODS["dfedpgp"](), device)


def _law(name: str, model: str, method: Method, device: str) -> Iterator[Finding]:
    narrow = torch.device(device).type in NO_FLOAT64
    dtype = torch.float32 if narrow else torch.float64
    reference = _run_two_rounds(model, method, "cpu", "vectorized", dtype)
    executors: tuple[ExecutorName, ...] = ("vectorized", "sequential")
    for executor in executors:
        what = f"{name}, {executor}"
        try:
            difference = max(
                map(
                    _relative_difference,
                    reference,
                    _run_two_rounds(model, method, device, executor, dtype),
                )
            )
        except (QuiverError, RuntimeError, TypeError, NotImplementedError) as error:
            words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"
            yield Finding("laws", what, words, "the CPU's numbers", "failed")
            continue
        verdict: Verdict = "ok" if difference <= AGREEMENT[dtype] else "differs"
        yield Finding("laws", what, f"{difference:.1e}", f"≤ {AGREEMENT[dtype]:.0e}", verdict)


def _run_two_rounds(
    model: str, method: Method, device: str, executor: ExecutorName, dtype: torch.dtype
) -> list[Tensor]:
    """The states after two rounds of a tiny federation with ragged data."""
    settings = RunSettings(rounds=2, dtype=dtype, device=device, executor=executor, threads=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuiverWarning)
        shape = (12,) if model == "mlp" else SMALL_IMAGE
        run = _simulation(model, shape, method, settings, ragged=True).run()
    return [leaf.cpu() for leaf in run._shard.state]


def _relative_difference(mine: Tensor, theirs: Tensor) -> float:
    if not mine.numel():
        return 0.0
    scale = float(mine.double().abs().max()) or 1.0
    return float((mine.double() - theirs.double()).abs().max()) / scale


def throughput(device: str) -> Iterator[Finding]:
    """Seconds of a round of training against the same steps in a bare PyTorch loop."""
    executors: tuple[ExecutorName, ...] = ("vectorized", "sequential")
    for model in ("mlp", "cnn_small"):
        for executor in executors:
            settings = RunSettings(
                rounds=2, device=device, executor=executor, evaluate_every=10, threads=1
            )
            one = _simulation(model, SMALL_IMAGE, METHODS["dfedavgm"](), settings)
            run = one.run()
            ours = float(run.rounds["train_seconds"].min())
            bare = _run_bare_sgd(one, torch.device(device))
            verdict: Verdict = "ok" if ours <= SLOW * bare else "slow"
            words = f"{ours:.3f} s a round, {ours / bare:.2f} of the bare loop"
            yield Finding(
                "speed", f"{model}, {executor}", words, f"≤ {SLOW:g} × {bare:.3f} s", verdict
            )


def _run_bare_sgd(one: Simulation, device: torch.device) -> float:
    """The same number of SGD steps, client after client, with nothing of Quiver between.

    On one thread of the CPU, as the run is that it is compared with.
    """
    module = one.task.model().to(device)
    data, steps = one.data.train, 5 * SAMPLES // BATCH
    x, y = (first_leaf(part)[:SAMPLES].to(device) for part in (data.x, data.y))

    def all_clients() -> None:
        for _ in range(one.data.clients):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
            for step in range(steps):
                begin = step * BATCH % SAMPLES
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(
                    module(x[begin : begin + BATCH]), y[begin : begin + BATCH]
                )
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return min(_seconds(all_clients, device) for _ in range(2))
    finally:
        torch.set_num_threads(threads)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - begin


def memory(device: str) -> Iterator[Finding]:
    """What a run takes on a GPU; on a CPU the activations of one client's batch alone."""
    where = torch.device(device)
    for model, shape in (
        ("mlp", (3, 16, 16)),
        ("cnn_small", (3, 32, 32)),
        ("resnet8_gn", (3, 32, 32)),
    ):
        settings = RunSettings(rounds=1, device=device, executor="vectorized")
        one = _simulation(model, shape, METHODS["dfedpgp"](), settings)
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)
            before = torch.cuda.memory_allocated(where)
            one.run()
            measured = torch.cuda.max_memory_allocated(where) - before
            expected = predict_memory(one.task, one.data, one.method, one.training, settings).total
        else:
            x = first_leaf(one.data.train.x)[:1].expand(BATCH, *shape).contiguous()
            measured = saved_bytes(one.task, x, settings.dtype)
            expected = count_activations(one.task, one.data, settings.dtype).at_batch(BATCH)
        verdict: Verdict = "ok" if expected / OFF <= measured <= expected * OFF else "differs"
        yield Finding("memory", model, _mb(measured), f"{_mb(expected)} predicted", verdict)


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _simulation(
    model: str,
    shape: tuple[int, ...],
    method: Method,
    settings: RunSettings,
    ragged: bool = False,
) -> Simulation:
    random = np.random.default_rng(0)

    def pair(size: int) -> tuple[Any, Any]:
        return random.normal(size=(size, *shape)).astype(np.float32), random.integers(0, 10, size)

    most = SAMPLES if len(shape) == 1 or not ragged else BATCH  # images take their time
    sizes = [most - (ragged and most // 16 * client) for client in range(CLIENTS)]
    data = FederatedData.from_arrays(
        [pair(size) for size in sizes], [pair(4) for _ in sizes], classes=10
    )
    task = Task(model=lambda: make_model(model, shape, 10), personal=("head",))
    training = Training(lr=0.01, momentum=0.9, batch_size=BATCH)
    return Simulation(task, data, method, _graph(method), training, settings)


def _graph(method: Method) -> Topology:
    options: dict[str, dict[str, int]] = {
        "isolated": {},
        "star": {"sampled": CLIENTS // 2, "seed": 0},
        "random_regular": {"neighbors": 2, "seed": 0},
        "random_push": {"neighbors": 2, "seed": 0},
    }
    return make_topology(method.topology, CLIENTS, **options[method.topology])
