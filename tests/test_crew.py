"""Clients computed side by side: the same numbers, the first error, an end when it is wanted."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import quiverfl as qv
from quiverfl.engine.crew import Crew, Halted
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


@pytest.mark.parametrize(
    ("threads", "clients", "workers"),
    [(1, 100, 1), (2, 100, 2), (2, 1, 1), (8, 3, 3), (8, 100, 8), (12, 100, 6), (16, 100, 8)],
)
def test_threads_are_divided_among_the_workers(threads: int, clients: int, workers: int) -> None:
    torch.set_num_threads(threads)
    crew = Crew(clients)
    assert crew.workers == workers
    shares: list[int] = []
    crew.each(lambda _: shares.append(torch.get_num_threads()), range(4 * workers))
    assert set(shares) == {threads // workers}
    assert torch.get_num_threads() == threads
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_the_error_is_that_of_the_first_item_that_fails() -> None:
    torch.set_num_threads(4)
    crew = Crew(4)
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
            crew.each(work, range(4))


def test_work_that_is_broken_off_ends_at_its_next_step_and_the_crew_goes_on() -> None:
    torch.set_num_threads(2)
    crew = Crew(2)
    begun, broken_off = threading.Event(), threading.Event()

    def work(item: int) -> None:
        if item == 0:
            assert begun.wait(10)
            raise KeyboardInterrupt
        assert item == 1, "what had not begun must not begin"
        begun.set()
        try:
            for _ in range(10_000):
                crew.check()
                threading.Event().wait(0.001)
        except Halted:
            broken_off.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        crew.each(work, range(50))
    assert broken_off.is_set()
    done: list[int] = []
    crew.each(done.append, range(5))
    assert sorted(done) == list(range(5))
    crew.check()


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
    assert b"`quiver resume here` goes on" in said
    assert b"Traceback" not in said
