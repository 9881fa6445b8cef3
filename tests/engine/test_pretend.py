"""What a GPU would do with the engine, as far as it can be known without one (support/pretend.py).

Every run on the pretended device equals the CPU's to the last bit, and inside the step loop nothing
is copied between host and device and nothing is waited for.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quiverfl as qv
from pretend import DEVICE, OnDevice, Seen, pretended
from quiverfl.cli.setup import _law
from quiverfl.data.augmentation import CropFlip, Normalize
from quiverfl.engine.checkpoint import Checkpoint
from quiverfl.engine.history import History
from quiverfl.engine.local.examples import Examples
from quiverfl.models import MODELS, make_model
from quiverfl.support.environment import NO_FLOAT64
from small import AWAY, METHODS, PUSH, SOME, STAR, TinyModel, simulate, states, tiny_data, tiny_task

Simulate = Callable[..., qv.Run]
QUICK = (qv.DFedPGP, qv.OSGP, qv.DisPFL, qv.MOON, qv.FedProto, qv.APFL, qv.PerFedAvg, qv.PushDIGing)
"""One of every kind: the methods that differ from these in numbers alone are slow's."""


def cases() -> Iterator[Any]:
    """All methods on their graphs; each quick one on its first graph in one round, too."""
    quick = {kind: (method, graphs[0]) for method, graphs in METHODS for kind in [type(method)]}
    for kind in QUICK:
        yield pytest.param(*quick[kind], "vectorized", 1, id=kind.__name__)
    for method, graphs in METHODS:
        for graph in graphs:
            for executor in ("vectorized", "sequential"):
                name = f"{method}-{graph(6).name}-{executor}"
                yield pytest.param(method, graph, executor, 2, id=name, marks=pytest.mark.slow)


def on_both(run: Simulate, *arguments: Any, **options: Any) -> Seen:
    """The same run on the CPU and on the pretended device; what that did silently."""
    here = run(*arguments, **options)
    with pretended() as seen:
        there = run(*arguments, device="pretend", **options)
        assert all(leaf.device == DEVICE for leaf in there._shard.state)
        found = [leaf.cpu() for leaf in there._shard.state]
        history, model = there.history, there.personal(0).state_dict()
    for mine, theirs in zip(states(here), found, strict=True):
        assert torch.equal(mine, theirs)
    assert history.equals(here.history)
    for name, leaf in here.personal(0).state_dict().items():
        assert torch.equal(leaf, model[name].cpu())
    kept = seen.steps.copy()
    return Seen(kept, seen.elsewhere.copy())


@pytest.mark.parametrize(("method", "graph", "executor", "rounds"), list(cases()))
def test_every_method_is_the_cpu_s_and_its_steps_wait_for_nothing(
    method: Any, graph: Any, executor: str, rounds: int
) -> None:
    seen = on_both(simulate, method, graph(6), executor=executor, rounds=rounds, gradients=True)
    assert not seen.steps


@pytest.mark.parametrize(
    "executor", ["vectorized", pytest.param("sequential", marks=pytest.mark.slow)]
)
def test_some_methods_one_by_one_and_a_round_s_copies(executor: str) -> None:
    """A phase of a group moves its plan in two copies: samples, and which of them are padding."""
    options = {"executor": executor, "evaluate_every": 10}
    short = on_both(simulate, qv.DFedPGP(shared_epochs=1), PUSH(6), rounds=2, **options)
    long = on_both(simulate, qv.DFedPGP(shared_epochs=4), PUSH(6), rounds=2, **options)
    assert not short.steps
    assert not long.steps
    assert short.elsewhere == long.elsewhere  # four times the steps, and not a copy more
    groups, phases, rounds = (1 if executor == "vectorized" else 6), 2, 2
    moved = short.elsewhere["copy to the device | engine/local/examples.py:_move"]
    assert moved <= rounds * groups * phases * 2 + 20


def test_a_copy_inside_the_loop_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter counts: batches moved when they are used, as they were before."""

    def take_late(self: Any, places: Any, *rest: Any) -> Any:
        return take(self, places.cpu().to(self._device), *rest)

    take = Examples._take
    monkeypatch.setattr(Examples, "_take", take_late)
    seen = on_both(simulate, qv.DFedAvgM(epochs=1), SOME(6), rounds=1)
    steps = math.ceil(11 / 4)  # of the largest client
    assert sum(seen.steps.values()) == 2 * steps
    assert all("copy to the" in what for what in seen.steps)


IMAGES = 16
QUICK_MODELS = (("mlp", "vectorized"), ("lenet5", "vectorized"), ("cnn_small", "sequential"))


def image_data(augment: Any) -> qv.FederatedData:
    random = np.random.default_rng(0)

    def pair(size: int) -> tuple[Any, Any]:
        x = random.integers(0, 256, (size, 3, IMAGES, IMAGES), dtype=np.uint8)
        return x, random.integers(0, 3, size)

    return qv.FederatedData.from_arrays(
        [pair(size) for size in (5, 7, 6, 4)],
        [pair(3) for _ in range(4)],
        classes=3,
        prepare=Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.25)),
        augment=augment,
    )


@pytest.mark.parametrize(
    ("name", "executor"),
    [
        pytest.param(
            name,
            executor,
            marks=() if (name, executor) in QUICK_MODELS else pytest.mark.slow,
        )
        for name in MODELS
        for executor in ("vectorized", "sequential")
    ],
)
def test_every_model_with_augmented_images(name: str, executor: str) -> None:
    def model() -> nn.Module:
        return make_model(name, (3, IMAGES, IMAGES), 3)

    def run(**options: Any) -> qv.Run:
        return qv.simulate(
            qv.Task(model=model, personal=("head",)),
            image_data(CropFlip(padding=1, fill=(-2.5, -1.3, -1.2))),
            method=qv.DFedPGP(shared_epochs=1),
            topology=qv.random_push(clients=4, neighbors=1, seed=0),
            training=qv.Training(lr=0.05, momentum=0.9, batch_size=4),
            rounds=1,
            threads=1,
            executor=executor,
            **options,
        )

    seen = on_both(run)
    # What padding is filled with is moved once, for all runs of a process.
    assert set(seen.steps) <= {"copy to the device | data/augmentation.py:channel_tensor"}
    assert sum(seen.steps.values()) <= 1


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(qv.DFedPGP(shared_epochs=1), marks=pytest.mark.slow),
        qv.OSGP(epochs=1, delay=2),
    ],
    ids=str,
)
def test_a_checkpoint_of_the_device_is_the_cpu_s(method: Any, tmp_path: Path) -> None:
    """Written there it is resumed here, and the other way round, to the same bits."""
    whole = simulate(method, PUSH(6), rounds=4)

    def first(device: str) -> Path:
        written: list[Path] = []

        def save(checkpoint: Checkpoint) -> None:
            written.append(checkpoint.save(tmp_path / device))

        simulate(method, PUSH(6), rounds=2, checkpoint=save, checkpoint_every=2, device=device)
        return written[-1]

    def second(path: Path, device: str) -> list[torch.Tensor]:
        resume = Checkpoint.load(path, History())
        run = simulate(method, PUSH(6), rounds=4, resume=resume, device=device)
        return [leaf.cpu() for leaf in run._shard.state]

    with pretended():
        there = first("pretend")
        on_device = second(first("cpu"), "pretend")
    for found in (second(there, "cpu"), on_device):
        for mine, theirs in zip(states(whole), found, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("method", "graph"),
    [
        (qv.DFedPGP(shared_epochs=1), AWAY),
        pytest.param(qv.OSGP(epochs=1, delay=2), PUSH, marks=pytest.mark.slow),
        pytest.param(qv.Ditto(), STAR, marks=pytest.mark.slow),
    ],
    ids=["dfedpgp", "osgp", "ditto"],
)
def test_states_in_the_host_s_memory_visit_the_device_chunk_by_chunk(
    method: Any, graph: Any
) -> None:
    """Two clients at a time, and no stack of all six ever lies there."""
    options = {"chunk": 2, "rounds": 3, "executor": "vectorized", "gradients": method.mass == "mu"}
    here = simulate(method, graph(6), **options)
    with pretended() as seen:
        there = simulate(method, graph(6), device="pretend", states="host", **options)
        shared = tiny_task().shared_layout.size
        assert max(shape[0] for shape in seen.fetched if shape[1:] == (shared,)) == 2
        assert there.history.equals(here.history)
        assert there.rounds.gradient_shared.equals(here.rounds.gradient_shared)
    assert not seen.steps
    assert all(leaf.device.type == "cpu" for leaf in there._shard.state)
    for mine, theirs in zip(states(here), states(there), strict=True):
        assert torch.equal(mine, theirs)


class Dropping(TinyModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.body(x), 0.5, self.training))


@pytest.mark.parametrize(
    ("method", "executor"),
    [
        (qv.DFedSAM(epochs=1), "vectorized"),
        pytest.param(qv.DFedSAM(epochs=1), "sequential", marks=pytest.mark.slow),
        pytest.param(qv.DFedAvgM(epochs=2), "vectorized", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_model_that_draws_random_numbers(method: Any, executor: str) -> None:
    """Their keys are moved with the batches; adam and metrics of all samples beside it."""

    def run(**options: Any) -> qv.Run:
        return qv.simulate(
            qv.Task(
                model=Dropping,
                personal=("head",),
                metrics=("accuracy", "f1"),
            ),
            tiny_data(),
            method=method,
            topology=SOME(6),
            training=qv.Training(lr=0.01, optimizer="adam", batch_size=4),
            rounds=2,
            threads=1,
            executor=executor,
            **options,
        )

    assert not on_both(run).steps


def test_the_device_refuses_what_a_gpu_would() -> None:
    with pretended():
        there, here = torch.zeros(3, device=DEVICE), torch.zeros(3)
        assert isinstance(there, OnDevice)
        with pytest.raises(RuntimeError, match="two devices"):
            there + here
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="indices on the device"):
            here[torch.zeros(1, dtype=torch.int64, device=DEVICE)]
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(3, device=DEVICE, generator=torch.Generator())
        assert float(there.sum()) == 0


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """The pretended device is like Apple's GPUs: any float64 on it raises."""
    NO_FLOAT64.add("pretend")
    try:
        yield
    finally:
        NO_FLOAT64.remove("pretend")


def narrow_cases() -> Iterator[Any]:
    """Every method on its first graph; the slow ones with both executors."""
    seen: set[type] = set()
    for method, graphs in METHODS:
        quick = type(method) in (qv.DFedPGP, qv.DisPFL, qv.APFL) and type(method) not in seen
        seen.add(type(method))
        for executor in ("vectorized", "sequential"):
            marks = () if quick and executor == "vectorized" else pytest.mark.slow
            yield pytest.param(method, graphs[0], executor, id=f"{method}-{executor}", marks=marks)


@pytest.mark.parametrize(("method", "graph", "executor"), list(narrow_cases()))
def test_a_device_without_float64_keeps_mass_and_counts_on_the_host(
    method: Any, graph: Any, executor: str
) -> None:
    """μ and sample counts are the CPU's to the last bit; the rest agrees as float32 does."""
    options: dict[str, Any] = {
        "executor": executor,
        "rounds": 2,
        "dtype": torch.float32,
        "gradients": True,
    }
    here = simulate(method, graph(6), **options)
    with without_float64(), pretended():
        there = simulate(method, graph(6), device="pretend", **options)
        state = there._shard.state
        history = there.history
    assert there.summary["carried_out"]["states"] == "host"
    for name, mine, theirs in zip(state._fields, here._shard.state, state, strict=True):
        assert theirs.dtype == mine.dtype
        if mine.dtype == torch.float64:
            assert torch.equal(mine, theirs), name
        else:
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(history["loss"], here.history["loss"], rtol=1e-4)


def test_a_model_that_draws_on_a_device_without_float64() -> None:
    class Noisy(TinyModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = nn.functional.dropout(self.body(x), 0.5, self.training)
            if self.training:
                hidden = hidden * torch.bernoulli(torch.full_like(hidden, 0.5))
                hidden = hidden + 0.1 * torch.randn_like(hidden)
            return self.head(hidden)

    def run(**options: Any) -> qv.Run:
        return qv.simulate(
            qv.Task(model=Noisy),
            tiny_data(),
            method=qv.DFedPGP(shared_epochs=1),
            topology=PUSH(6),
            training=qv.Training(lr=0.1, batch_size=4),
            rounds=1,
            threads=1,
            **options,
        )

    here = run()
    with without_float64(), pretended():
        there = run(device="pretend")
    for mine, theirs in zip(here._shard.state, there._shard.state, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)


def test_peers_arithmetic_and_unseen_clients_on_a_device_without_float64() -> None:
    """The fixed-point accounts are on the host, as is the average that an unseen client gets."""
    data = tiny_data().hold_out([5], start="average", epochs=1)

    def run(**options: Any) -> qv.Run:
        return qv.simulate(
            tiny_task(),
            data,
            method=qv.DFedPGP(shared_epochs=1),
            topology=PUSH(5),
            training=qv.Training(lr=0.1, batch_size=4),
            rounds=2,
            threads=1,
            arithmetic="peers",
            **options,
        )

    here = run()
    with without_float64(), pretended():
        there = run(device="pretend")
    assert torch.equal(here._shard.state.mu, there._shard.state.mu)
    np.testing.assert_allclose(there.history["loss"], here.history["loss"], rtol=1e-4)


def test_float64_is_refused_where_the_device_has_none() -> None:
    with pytest.raises(qv.QuiverError, match="which has no float64: leave dtype out"):
        qv.RunSettings(device="mps", dtype=torch.float64)
    assert qv.RunSettings(device="mps").states == "host"
    assert qv.RunSettings(device="cpu").states == "device"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is one")
def test_a_gpu_of_apple_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(qv.QuiverError) as caught:
        qv.RunSettings(device="mps").check_device()
    assert str(caught.value) == (
        "device 'mps' cannot be used: torch finds no GPU of Apple's here. Use 'cpu', or install a "
        "torch build for your GPU (README)."
    )


def test_the_doctor_tries_float32_where_there_is_no_float64() -> None:
    """`quiver doctor --device mps`, on the pretended device."""
    with without_float64(), pretended():
        found = list(_law("dispfl", "mlp", qv.DisPFL(), "pretend"))
    assert [finding.verdict for finding in found] == ["ok", "ok"]
    assert all(finding.expected == "≤ 1e-03" for finding in found)
