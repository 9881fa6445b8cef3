"""Clients computed side by side: the same numbers, the first error, an end when it is wanted."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import quiverfl as qv
from quiverfl.engine.local.workers import Halted, parallel_for, stop_if_halted, worker_count
from quiverfl.models import make_model
from quiverfl.topologies import Topology


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _run(method: qv.Method, topology: Topology, threads: int) -> qv.Run:
    pixels = torch.Generator().manual_seed(0)
    x = torch.randn(6, 12, 3, 16, 16, generator=pixels)
    y = torch.arange(6 * 12).view(6, 12) % 4
    clients = [(x[i, : 6 + i], y[i, : 6 + i]) for i in range(6)]
    return qv.simulate(
        qv.Task(lambda: make_model("cnn_small", (3, 16, 16), 4), personal=("head",)),
        qv.FederatedData.from_arrays(train=clients, test=clients),
        method=method,
        topology=topology,
        training=qv.Training(lr=0.05, momentum=0.9, batch_size=4),
        rounds=2,
        threads=threads,
    )


@pytest.mark.parametrize(
    ("method", "topology"),
    [
        (qv.DFedPGP(), qv.random_push(clients=6, neighbors=2, seed=0)),
        (qv.DisPFL(), qv.random_regular(clients=6, neighbors=2, seed=0)),
        (qv.FedBABU(), qv.star(clients=6, sampled=3, seed=0)),
    ],
    ids=["dfedpgp", "dispfl", "fedbabu"],
)
def test_side_by_side_every_number_is_that_of_one_after_the_other(
    method: qv.Method, topology: Topology
) -> None:
    alone, beside = _run(method, topology, threads=1), _run(method, topology, threads=4)
    assert alone.history.equals(beside.history)
    assert alone.rounds["steps"].equals(beside.rounds["steps"])
    for client in range(6):
        one, other = alone.personal(client).state_dict(), beside.personal(client).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert all(tensor.isfinite().all() for tensor in one.values())


class Stem(nn.Module):
    """A model whose personal part is its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.body = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(576, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.body(self.stem(x))
        return logits


def test_a_client_that_ends_while_another_differentiates_does_not_disturb_it() -> None:
    x = torch.randn(24, 8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    clients = [(x[i, : 1 + i % 8], torch.arange(1 + i % 8) % 4) for i in range(24)]
    qv.simulate(
        qv.Task(Stem, personal=("stem",)),
        qv.FederatedData.from_arrays(clients, clients, classes=4),
        method=qv.FedRep(personal_epochs=3, shared_epochs=3),
        topology=qv.full(clients=24),
        training=qv.Training(lr=0.01, batch_size=2),
        rounds=3,
        threads=4,
    )


def test_what_a_run_holds_can_be_copied() -> None:
    run = _run(qv.DFedPGP(), qv.random_push(clients=6, neighbors=2, seed=0), threads=2)
    again = copy.deepcopy(run)
    one, other = run.personal(0).state_dict(), again.personal(0).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("threads", "wanted", "workers"),
    [(1, 100, 1), (2, 100, 2), (2, 1, 1), (8, 3, 3), (8, 100, 8), (12, 100, 6), (16, 100, 8)],
)
def test_threads_are_divided_among_the_workers(threads: int, wanted: int, workers: int) -> None:
    torch.set_num_threads(threads)
    assert worker_count(wanted) == workers
    shares: list[int] = []
    parallel_for(lambda _: shares.append(torch.get_num_threads()), range(4 * workers), workers)
    assert set(shares) == {threads // workers}
    assert len(shares) == 4 * workers
    assert torch.get_num_threads() == threads
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_the_error_is_that_of_the_first_item_that_fails() -> None:
    last_failed = threading.Event()

    def work(item: int) -> None:
        if item == 0:
            assert last_failed.wait(10)
        if item in (0, 3):
            last_failed.set()
            raise ValueError(item)

    for _ in range(20):
        last_failed.clear()
        with pytest.raises(ValueError, match="0"):
            parallel_for(work, range(4), 4)


def test_work_that_is_broken_off_ends_at_its_next_step_and_no_other_begins() -> None:
    begun, broken_off = threading.Event(), threading.Event()

    def work(item: int) -> None:
        if item == 0:
            assert begun.wait(10)
            raise KeyboardInterrupt
        assert item == 1, "what had not begun must not begin"
        begun.set()
        try:
            for _ in range(10_000):
                stop_if_halted()
                threading.Event().wait(0.001)
        except Halted:
            broken_off.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        parallel_for(work, range(50), 2)
    assert broken_off.is_set()
    stop_if_halted()  # nothing is left behind
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker")]


def test_an_interruption_while_items_are_handed_out_ends_those_at_work() -> None:
    begun: list[int] = []

    def items() -> Iterator[int]:
        yield from range(40)
        raise KeyboardInterrupt

    def work(item: int) -> None:
        begun.append(item)
        for _ in range(10_000):
            stop_if_halted()
            threading.Event().wait(0.001)

    with pytest.raises(KeyboardInterrupt):
        parallel_for(work, items(), 2)
    assert len(begun) <= 2


def test_an_error_that_was_handled_keeps_nothing_alive() -> None:
    class Large:
        pass

    def fails() -> weakref.ref[Large]:
        large = Large()

        def work(item: int) -> None:
            assert large
            raise ValueError(item)

        with contextlib.suppress(ValueError):
            parallel_for(work, range(8), 2)
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


LONG = """
[data]
name = "synthetic"
clients = 2
partition = "iid"
samples_per_client = 4000
test_per_client = 10
options = { shape = [3, 32, 32], train = 8000, test = 20 }
[model]
name = "cnn_small"
[method]
name = "dfedpgp"
shared_epochs = 1000
[topology]
name = "random_push"
neighbors = 1
[run]
threads = 2
"""


def test_ctrl_c_does_not_wait_for_the_clients_in_hand(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(LONG)
    command = [sys.executable, "-m", "quiverfl.cli.main", "run", "long.toml", "--out", "here"]
    command = ["env", "--default-signal=INT", *command]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while sum(psutil.Process(process.pid).cpu_times()[:2]) < 8:  # starting takes less
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # the clients in hand would take hours
    assert process.returncode == 130
    assert b"`quiver resume here` continues" in said
    assert b"Traceback" not in said
